"""The weights that a model starts from: where they come from, what of them fits, what is new."""

from __future__ import annotations

import fcntl
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError, did_you_mean
from raytrain_ddp.tasks.model_zoo import (
    TIMM,
    arguments,
    build,
    check_model,
    known_weights,
    timm_name,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

FILES = (".safetensors", ".pth", ".pt", ".bin")
HUB = "hf-hub:"  # timm's prefix of a repository of the Hugging Face Hub
_MOST = 0.8
"""Share of the parameters outside the head that a file or run must have. Of two different ResNets
about half fit by chance."""
_NAMED = 4  # tensors listed in a message


def check_weights(
    config: ModelConfig, storage: str, is_begun: Callable[[], bool] = lambda: False
) -> ModelConfig:
    """The config with a path that means the same in each worker; imports neither torch nor timm.

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
    place = Path(weights).expanduser()
    if weights.endswith(FILES):
        if not place.is_file() and not is_begun():
            raise ConfigError(f"model.weights = {weights!r}: there is no such file.")
        return replace(config, weights=str(place.absolute()))
    if "://" in weights or (place.is_absolute() and is_begun()):
        return config
    from raytrain_ddp.checkpoint.run_folder import holds_run  # PyArrow, for files of runs only

    places = (place, Path(storage) / weights)
    for folder in (*filter(holds_run, places), *places):  # the data may have the run's name
        if folder.is_dir():
            return replace(config, weights=str(folder.absolute()))
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


def has_weights(config: ModelConfig) -> bool:
    """Whether the model starts from weights: also if timm's name for them is in its own."""
    return config.weights is not None or is_named(config)


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
    if not has_weights(config):
        return build(config, classes), ""
    if not is_named(config):
        model = build(config, classes)
        if not load:
            return model, ""
        state, known = _read(str(config.weights))
        return model, _begin(
            config, model, state, _MOST, bool(names and known) and [*known] != [*names]
        )
    model = build(config, classes, _options(config))
    return model, _begin(config, model, _download(config), 1.0) if load else ""


def normalization_note(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> str:
    """A line if the weights of a model of timm expect other means and deviations; else ""."""
    known = getattr(model, "pretrained_cfg", None) or {}
    wanted = [tuple(known.get(name) or own) for name, own in (("mean", mean), ("std", std))]
    if wanted == [tuple(mean), tuple(std)]:
        return ""
    means, deviations = (" ".join(f"{value:g}" for value in values) for values in wanted)
    flags = f"--data.mean {means} --data.std {deviations}"
    return f"Its weights were trained with {flags}; this run has others."


def _given(config: ModelConfig) -> str:
    """The field that names the weights, with its value."""
    if config.weights is None:
        return f"model.name = {config.name!r}"
    return f"model.weights = {config.weights!r}"


def _options(config: ModelConfig) -> dict[str, Any]:
    """What torchvision's builders themselves set with these weights."""
    if config.name.startswith(TIMM):
        return {}
    from torchvision.models import get_model_weights

    wanted = get_model_weights(config.name)[config.weights]
    if config.name in ("googlenet", "inception_v3"):
        return {"transform_input": True}
    if config.name.startswith("vit_"):
        return {"image_size": wanted.meta["min_size"][0]}
    return {"input_size": wanted.meta["min_size"]} if config.name.startswith("maxvit") else {}


def _download(config: ModelConfig) -> Mapping[str, Tensor]:
    """The state of the pretrained model of torchvision or timm, with its own head."""
    import torch

    make: Callable[[], Any]
    if config.name.startswith(TIMM):
        import timm

        model, tag = timm_name(config.name)
        tag = tag or (config.weights or "").replace("DEFAULT", "")
        full = ".".join(filter(None, (model, tag)))
        if not timm.is_model_pretrained(full):
            raise ConfigError(f"{_given(config)}: timm has no pretrained weights of {full}.")
        place = f"timm's {full}"
        remedy = "Or download its weights elsewhere, and set model.weights to that file."
        make = lambda: timm.create_model(full, pretrained=True, **arguments(config))  # noqa: E731
    else:
        from torchvision.models import get_model, get_model_weights

        wanted = get_model_weights(config.name)[config.weights]
        folder, file = f"{torch.hub.get_dir()}/checkpoints", wanted.url.rpartition("/")[2]
        place, remedy = wanted.url, f"Put {file} into {folder}."
        make = lambda: get_model(config.name, weights=wanted, progress=False)  # noqa: E731
    with _downloads(_given(config), place, remedy):
        return make().state_dict()  # type: ignore[no-any-return]


def _from_hub(weights: str) -> Mapping[str, Tensor]:
    from timm.models import load_state_dict_from_hf

    remedy = "Or download its weights elsewhere, and set model.weights to that file."
    with _downloads(f"model.weights = {weights!r}", weights, remedy):
        return load_state_dict_from_hf(weights.removeprefix(HUB), weights_only=True)  # type: ignore[no-any-return]


@contextmanager
def _downloads(given: str, place: str, remedy: str) -> Iterator[None]:
    """Raises PreflightError if what is called in this context fails."""
    import torch

    try:
        with _one_per_node(Path(torch.hub.get_dir()) / "checkpoints"):
            yield
    except Exception as error:  # of the network, as the Hub's libraries raise many kinds
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"{given}: {place} cannot be downloaded ({reason}). {remedy}"
        ) from error


@contextmanager
def _one_per_node(folder: Path) -> Iterator[None]:
    """The first process of a node downloads, and the others find its files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".raytrain.lock").open("w")
    except OSError:  # read-only: then there is nothing to download
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(weights: str) -> tuple[Mapping[str, Tensor], Sequence[str]]:
    """Tensors of a file or a run, and the class names if these are known. Nothing in it is run:
    what needs more than tensors is refused."""
    from torch import Tensor

    if weights.startswith(HUB):
        return _from_hub(weights), ()
    if not weights.endswith(FILES):
        from raytrain_ddp.checkpoint.lookup import (
            NoCheckpointError,
            find_checkpoint,
            recorded_classes,
        )
        from raytrain_ddp.checkpoint.snapshot import decode_tensors

        try:
            found = find_checkpoint(weights)
            return decode_tensors(found.read("model.safetensors")), recorded_classes(found)
        except NoCheckpointError as error:
            raise ConfigError(f"model.weights = {weights!r}: {error}") from None
        except CheckpointError as error:
            raise CheckpointError(f"model.weights = {weights!r}: {error}") from None
    from timm.models import load_state_dict  # also of timm's and torchvision's own training

    try:
        if zipfile.is_zipfile(weights):  # torch does not compare the checksums that it writes
            with zipfile.ZipFile(weights) as parts:
                if damaged := parts.testzip():
                    raise ValueError(f"{damaged} in it is damaged")
        state = load_state_dict(weights, weights_only=True)
    except Exception as error:  # a damaged file raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        for end in (
            " No automatic unsafe",
            " This is an internal",
        ):  # advice to run its code, cause
            reason = reason.partition(end)[0]
        reason = reason.rstrip(".")
        raise ConfigError(f"model.weights = {weights!r}: it cannot be read: {reason}.") from error
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) < len(state):
        other = next(key for key in state if key not in tensors)
        raise ConfigError(
            f"model.weights = {weights!r}: its {other!r} is no tensor: save model.state_dict()."
        )
    return tensors, ()


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
            f"{_given(config)}: only {share:.0%} of the parameters of {config.name} "
            f"outside its head fit. Not there, of another shape or type: {_some(misfits)}."
        )
    for key, tensor in fits.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(f"{_given(config)}: {key} has values that are not finite (NaN, inf).")
    model.load_state_dict({**own, **fits})
    why = " for other classes" if other_head else ""
    parts = [f"new{why}: {_some(new)}"] * bool(new) + [f"not used: {_some(unused)}"] * bool(unused)
    return "; ".join([summary, *parts]) + "."


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same shape, and are both floating-point numbers or both not."""
    is_float = one.is_floating_point(), other.is_floating_point()
    return one.shape == other.shape and is_float[0] == is_float[1]


def _shaped(key: str, of: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    shape = "x".join(map(str, of[key].shape)) or "1"
    there = f", there {'x'.join(map(str, other[key].shape)) or '1'}" if key in other else ""
    return f"{key} ({shape}{there})"


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
