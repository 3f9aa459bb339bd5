"""The weights that a model starts from: what of them fits, and what is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import ConfigError, did_you_mean, first_names
from raytrain_ddp.files import absolute, expanded
from raytrain_ddp.tasks.model_zoo import TIMM, build, check_model, known_weights, timm_name
from raytrain_ddp.tasks.weight_sources import (
    FILES,
    HUB,
    needed_arguments,
    pretrained_state,
    stored_state,
    weights_field,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST = 0.8
"""Share of the parameters outside the head that a file or run must have. Of two different ResNets
about half fit by chance."""
_NAMED = 4  # tensors listed in a message


def check_weights(
    config: ModelConfig, storage: str, is_begun: Callable[[], bool] = lambda: False
) -> ModelConfig:
    """Returns the config with the path of a file or run; imports the package of the model.

    Args:
        storage: folder or URI in which runs are looked up by name.
        is_begun: whether the weights are not needed anymore.

    Raises:
        ConfigError: the model has no such weights, and there is no such file or run.
    """
    check_model(config.name)
    name, weights = config.name, config.weights
    if weights is None or weights.startswith(HUB) or is_named(config):
        return config
    place = Path(weights) if "://" in weights else expanded(weights)
    if weights.endswith(FILES):
        if not place.is_file() and not is_begun():
            raise ConfigError(f"model.weights = {weights!r}: there is no such file.")
        return replace(config, weights=absolute(place))
    if "://" in weights or (place.is_absolute() and is_begun()):
        return config
    from raytrain_ddp.checkpoint.run_folder import path_of_run  # PyArrow, for files of runs only

    folder = Path(path_of_run(str(place), storage))
    if folder.is_dir():
        return replace(config, weights=absolute(folder))
    known = known_weights(name)
    runs = [path.name for path in Path(storage).glob("*/")] if Path(storage).is_dir() else []
    own = f"{name} has {', '.join(known)}" if known else f"{name} has no weights of its own"
    if "://" in storage:
        own = f"{own}, and a run in {storage} needs its whole URI"
    raise ConfigError(
        f"model.weights = {weights!r}: {own}.{did_you_mean(weights, [*known, *runs])} It may "
        f"also be a file ({', '.join(FILES)}), a run, or a checkpoint; none is there."
    )


def is_named(config: ModelConfig) -> bool:
    """Whether these are torchvision's or timm's own pretrained weights for this model.

    Raises:
        ConfigError: `weights` and the tag in the model's name differ.
    """
    if not config.name.startswith(TIMM):
        return config.weights in known_weights(config.name)
    model, tag = timm_name(config.name)
    if config.weights in (None, "DEFAULT", tag):
        return bool(tag) or config.weights is not None
    if config.weights not in known_weights(config.name):
        return False
    if tag:
        raise ConfigError(
            f"model.weights = {config.weights!r}: model.name = {config.name!r} already names its "
            f"weights. Set --model.name {TIMM}{model}.{config.weights}."
        )
    return True


def begun_model(
    config: ModelConfig, classes: int, load: bool = True, names: Sequence[str] = ()
) -> tuple[nn.Module, str]:
    """The model, and a line about the weights that it starts from; "" without any.

    Args:
        load: False: only the model that these weights would fit.
        names: of the classes. The head of a run with other classes is not used.

    Raises:
        ConfigError: the model does not take `config.args`, or most of it does not fit the weights.
        PreflightError: the weights cannot be downloaded.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    named = is_named(config)
    model = build(config, classes, needed_arguments(config) if named else None)
    if not load or (config.weights is None and not named):
        return model, ""
    if named:
        return model, _begin(config, model, pretrained_state(config), 1.0)
    state, known = stored_state(str(config.weights))
    new_head = bool(names and known) and [*known] != [*names]
    return model, _begin(config, model, state, _MOST, new_head)


def normalization_note(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> str:
    """A line if the weights of a model of timm expect other means and deviations; else ""."""
    known = getattr(model, "pretrained_cfg", None) or {}
    wanted = [tuple(known.get(name) or own) for name, own in (("mean", mean), ("std", std))]
    if wanted == [tuple(mean), tuple(std)]:
        return ""
    means, deviations = (" ".join(f"{value:g}" for value in values) for values in wanted)
    flags = f"--data.mean {means} --data.std {deviations}"
    return f"Its weights were trained with {flags}; this run has others."


def _begin(
    config: ModelConfig,
    model: nn.Module,
    state: Mapping[str, Tensor],
    most: float,
    new_head: bool = False,
) -> str:
    """Copies what fits; says what does not, and what is new.

    Args:
        new_head: the head is for other classes, though maybe as many.

    Raises:
        ConfigError: less than `most` of the parameters outside the head fit.
    """
    from raytrain_ddp.tasks.model_parts import head_of

    own, head = model.state_dict(), head_of(model)
    fits = {key: t for key, t in state.items() if key in own and _is_alike(own[key], t)}
    other_head = [fits.pop(key) for key in head if new_head and key in fits]
    new = [_shaped(key, own, state) for key in own if key not in fits]
    unused = [_shaped(key, state, {}) for key in state if key not in own]
    body = {key: p.numel() for key, p in model.named_parameters() if key not in head}
    fitting = sum(size for key, size in body.items() if key in fits)
    share = fitting / max(1, sum(body.values()))
    weights = config.weights or timm_name(config.name)[1]
    summary = f"Start from {weights}: {len(fits)} of {len(own)} tensors of {config.name} fit"
    misfits = [_shaped(key, own, state) for key in body if key not in fits]
    if share < most:
        raise ConfigError(
            f"{weights_field(config)}: only {share:.0%} of the parameters of {config.name} "
            f"outside its head fit. Not there, of another shape or type: {_some(misfits)}."
        )
    for key, tensor in fits.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(
                f"{weights_field(config)}: {key} has values that are not finite (NaN, inf)."
            )
    model.load_state_dict({**own, **fits})
    why = " for other classes" if other_head else ""
    parts = [f"new{why}: {_some(new)}"] * bool(new) + [f"not used: {_some(unused)}"] * bool(unused)
    return "; ".join([summary, *parts]) + "."


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same shape, and are both floating-point numbers or both not."""
    return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()


def _shaped(key: str, of: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    shape = "x".join(map(str, of[key].shape)) or "1"
    there = f", there {'x'.join(map(str, other[key].shape)) or '1'}" if key in other else ""
    return f"{key} ({shape}{there})"


def _some(names: list[str]) -> str:
    return first_names(names, _NAMED, ", and ")
