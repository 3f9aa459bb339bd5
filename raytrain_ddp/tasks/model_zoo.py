"""Models by name, and the weights that they start from.

Models are digits-cnn, those of torchvision and timm, and the user's; weights are those of
torchvision, timm, the Hub, a file or a run. Says what of the weights fits, and what is new.
"""

from __future__ import annotations

import ast
import fcntl
import os
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import (
    CheckpointError,
    ConfigError,
    PreflightError,
    did_you_mean,
    first_names,
    in_one_line,
)
from raytrain_ddp.files import absolute, expanded
from raytrain_ddp.tasks.model_parts import head_of, nonfinite
from raytrain_ddp.tasks.task_loading import check_place, imported

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raytrain_ddp.checkpoint.committed import Checkpoint

    State = Mapping[str, Tensor]

DIGITS = "digits-cnn"
TIMM = "timm:"
# Arguments of builders that the data and model.weights decide.
_DECIDED = ("classes", "num_classes", "weights", "pretrained", "checkpoint_path")

_FILES = (".safetensors", ".pth", ".pt", ".bin")
_HUB = "hf-hub:"  # timm's prefix of a repository of the Hugging Face Hub
_MOST = 0.8
"""Share of the parameters outside the head that a file or run must have. Of two different ResNets
about half fit by chance."""
_NAMED = 4  # tensors listed in a message


def split_name(name: str) -> tuple[str, str]:
    """``timm:resnet50.a1_in1k`` -> timm:resnet50, a1_in1k; the second is empty without a tag."""
    model, _, tag = name.partition(".") if name.startswith(TIMM) else (name, "", "")
    return model, tag


def check_model(name: str) -> None:
    """Raises ConfigError if there is no such model; imports torchvision or timm if needed."""
    if _is_own(name):
        check_place("model.name", name)
        return
    model, tag = split_name(name)
    if name != DIGITS and model not in (_of_timm if ":" in name else _of_torchvision)():
        known = [DIGITS, *_of_torchvision(), *_of_timm()]
        raise ConfigError(
            f"model.name = {name!r}: no such model.{did_you_mean(model, known)} There are {DIGITS},"
            " torchvision's classification models, those of timm as timm:NAME, and your own as "
            "module:function."
        )
    if tag and tag not in (known := known_weights(name)):
        raise ConfigError(
            f"model.name = {name!r}: the weights of {model} are {', '.join(known) or '(none)'}."
            f"{did_you_mean(tag, known)}"
        )


def known_weights(name: str) -> list[str]:
    """The names of the pretrained weights of a torchvision or timm model; else none."""
    if name.startswith(TIMM):
        import timm  # seconds

        found = timm.list_pretrained(split_name(name)[0].removeprefix(TIMM))
        return [*(full.partition(".")[2] for full in found), *["DEFAULT"] * bool(found)]
    if name == DIGITS or ":" in name:
        return []
    from torchvision.models import get_model_weights

    return [*get_model_weights(name).__members__]


def _is_own(name: str) -> bool:
    return ":" in name and not name.startswith(TIMM)


def _of_torchvision() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)  # type: ignore[no-any-return]


def _of_timm() -> list[str]:
    import timm

    return [f"{TIMM}{name}" for name in timm.list_models()]


def build(config: ModelConfig, classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The model with a head for `classes`, and without pretrained weights.

    Args:
        options: defaults of `config.args`, as pretrained weights need them.

    Raises:
        ConfigError: the model does not take `config.args`, or the user's function returns no
            module. Without arguments, an error that this function raises is passed through.
    """
    from torch import nn

    name, count = config.name, "num_classes"
    make: Callable[..., Any]
    if name == DIGITS:
        from raytrain_ddp.tasks.small_networks import DigitsCNN

        count, make = "classes", partial(DigitsCNN, dropout=config.dropout)
    elif _is_own(name):
        count, make = "classes", imported("model.name", name)
    elif name.startswith(TIMM):
        import timm

        make = partial(timm.create_model, name.removeprefix(TIMM))
    else:
        from torchvision.models import get_model

        # No loss here would train their auxiliary heads.
        auxiliary = {"aux_logits": False, "init_weights": True}
        fixed = auxiliary if name in ("googlenet", "inception_v3") else {}
        make = partial(get_model, name, weights=None, **fixed)
    given = {count: classes, **(options or {}), **arguments(config)}
    try:
        model = make(**given)
    except Exception as error:
        if not config.args:
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        reason = in_one_line(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ConfigError(
            f"model.args = {config.args}: {name} fails with them: {reason} "
            f"({at.filename}:{at.lineno})."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name = {name!r}: it returned a {type(model).__name__}; expected a "
            "torch.nn.Module."
        )
    return model


def arguments(config: ModelConfig) -> dict[str, Any]:
    """`config.args` as Python values: ``None`` and ``(256, 256)`` are what they look like.

    Raises:
        ConfigError: another field of the config decides one of them.
    """
    for name in config.args:
        if name in _DECIDED:
            raise ConfigError(f"model.args has {name}: the data and model.weights decide it.")
    values: dict[str, Any] = dict(config.args)
    for name, value in config.args.items():
        if isinstance(value, str):
            with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                values[name] = ast.literal_eval(value)
    return values


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
    if weights is None or weights.startswith(_HUB) or "://" in weights or _of_library(config):
        return config
    from raytrain_ddp.checkpoint.run_folder import path_of_run  # PyArrow, for files of runs only

    place = expanded(weights)
    if not weights.endswith(_FILES):
        place = Path(path_of_run(str(place), storage))
    if place.exists() or is_begun():
        return replace(config, weights=absolute(place))
    known, runs = known_weights(name), [path.name for path in Path(storage).glob("*/")]
    own = f"{name} has {', '.join(known)}" if known else f"{name} has no weights of its own"
    if "://" in storage:
        own = f"{own}, and a run in {storage} needs its whole URI"
    raise ConfigError(
        f"model.weights = {weights!r}: {own}.{did_you_mean(weights, [*known, *runs])} It may "
        f"also be a file ({', '.join(_FILES)}), a run, or a checkpoint; none is there."
    )


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
    own, weights = _of_library(config), config.weights
    model = build(config, classes, _needed_arguments(config.name, own))
    if not load or not (own or weights):
        return model, ""
    if own:
        return model, _begin(config, model, _state_of_library(config, own), 1.0)
    state, known = stored_state(str(weights))
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


def _of_library(config: ModelConfig) -> str:
    """The pretrained weights of torchvision or timm that the config names; "" for none, and for
    others.

    Raises:
        ConfigError: `weights` and the tag in the model's name differ.
    """
    (model, tag), weights = split_name(config.name), config.weights
    if weights in (None, tag) or (tag and weights == "DEFAULT"):
        return tag
    if weights not in known_weights(config.name):
        return ""
    if tag:
        raise ConfigError(
            f"model.weights = {weights!r}: model.name = {config.name!r} already names its weights. "
            f"Set --model.name {model}.{weights}."
        )
    return str(weights)


def _needed_arguments(model: str, weights: str) -> dict[str, Any]:
    """The arguments that torchvision's builders set themselves for these weights."""
    if weights and model in ("googlenet", "inception_v3"):
        return {"transform_input": True}
    if weights and model.startswith(("vit_", "maxvit")):
        from torchvision.models import get_model_weights

        size = get_model_weights(model)[weights].meta["min_size"]
        return {"image_size": size[0]} if model.startswith("vit_") else {"input_size": size}
    return {}


def _state_of_library(config: ModelConfig, weights: str) -> State:
    """The state of the pretrained model of torchvision or timm, with its own head."""
    make: Callable[[], Any]
    if config.name.startswith(TIMM):
        import timm

        full = split_name(config.name)[0].removeprefix(TIMM)
        full = full if weights == "DEFAULT" else f"{full}.{weights}"
        place = f"timm's {full}"
        make = partial(timm.create_model, full, pretrained=True, **arguments(config))
    else:
        from torchvision.models import get_model, get_model_weights

        wanted = get_model_weights(config.name)[weights]
        place, make = wanted.url, partial(get_model, config.name, weights=wanted, progress=False)
    with _downloads(_field(config), place):
        return make().state_dict()  # type: ignore[no-any-return]


@contextmanager
def _downloads(given: str, place: str) -> Iterator[None]:
    """Lets one process of a node download at a time: the others find its files. Raises
    PreflightError if what is called in this context fails."""
    lock = f"{tempfile.gettempdir()}/raytrain-downloads-{os.getuid()}.lock"
    try:
        with open(lock, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
    except Exception as error:  # of the network, as the Hub's libraries raise many kinds
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"{given}: {place} cannot be downloaded ({reason}). Download the file elsewhere, "
            "and set model.weights to it."
        ) from error


def stored_state(weights: str) -> tuple[State, Sequence[str]]:
    """Tensors of a file or a run, and the class names if these are known. Nothing in it is run:
    what needs more than tensors is refused."""
    from timm.models import load_state_dict, load_state_dict_from_hf
    from torch import Tensor

    field = f"model.weights = {weights!r}"
    if weights.startswith(_HUB):
        with _downloads(field, weights):
            return load_state_dict_from_hf(weights.removeprefix(_HUB), weights_only=True), ()
    if not weights.endswith(_FILES):
        from raytrain_ddp.checkpoint.run_folder import recorded_classes, with_checkpoint

        def read(found: Checkpoint) -> tuple[State, Sequence[str]]:
            return found.tensors("model.safetensors"), recorded_classes(found)

        try:
            return with_checkpoint(weights, None, read)
        except (CheckpointError, ConfigError) as error:
            raise type(error)(f"{field}: {error}") from None
    try:
        if zipfile.is_zipfile(weights):  # torch does not compare the checksums that it writes
            with zipfile.ZipFile(weights) as parts:
                if damaged := parts.testzip():
                    raise ValueError(f"{damaged} in it is damaged")
        state = load_state_dict(weights, weights_only=True)  # also of timm's own training
    except Exception as error:  # a damaged file raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        for end in (" No automatic unsafe", " This is an internal"):  # its advice, its cause
            reason = reason.partition(end)[0]
        raise ConfigError(f"{field}: it cannot be read: {reason.rstrip('.')}.") from error
    other = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise ConfigError(f"{field}: its {other!r} is not a tensor: save model.state_dict().")
    return state, ()


def _begin(
    config: ModelConfig, model: nn.Module, state: State, most: float, new_head: bool = False
) -> str:
    """Copies what fits; says what does not, and what is new.

    Args:
        new_head: the head is for other classes, though maybe as many.

    Raises:
        ConfigError: less than `most` of the parameters outside the head fit, or the model is not
            finite now.
    """
    own, head = model.state_dict(), head_of(model)
    fits = {
        key: tensor
        for key, tensor in state.items()
        if key in own and tensor.shape == own[key].shape and not (new_head and key in head)
        if tensor.is_floating_point() == own[key].is_floating_point()
    }
    new = model.load_state_dict(fits, strict=False).missing_keys
    body = {key: p.numel() for key, p in model.named_parameters() if key not in head}
    share = 1 - sum(body.get(key, 0) for key in new) / max(1, sum(body.values()))
    if share < most:
        misfits = _some([key for key in new if key in body], own, state)
        raise ConfigError(
            f"{_field(config)}: only {share:.0%} of the parameters of {config.name} outside its "
            f"head fit. Missing, or of another shape or type: {misfits}."
        )
    if lost := nonfinite(model):
        raise ConfigError(f"{_field(config)}: not finite (NaN, inf): {first_names(lost, _NAMED)}.")
    weights = config.weights or split_name(config.name)[1]
    parts = [f"Start from {weights}: {len(fits)} of {len(own)} tensors of {config.name} fit"]
    if new:
        why = " for other classes" if new_head else ""
        parts.append(f"new{why}: {_some(new, own, state)}")
    if unused := [key for key in state if key not in own]:
        parts.append(f"not used: {_some(unused, state, {})}")
    return "; ".join(parts) + "."


def _field(config: ModelConfig) -> str:
    """The field that names the weights, with its value."""
    if config.weights is None:
        return f"model.name = {config.name!r}"
    return f"model.weights = {config.weights!r}"


def _some(names: Sequence[str], of: State, other: State) -> str:
    """The first names, with their shapes and the shapes in `other`: ``fc.bias (5, there 1000)``."""

    def shape(tensor: Tensor) -> str:
        return "x".join(map(str, tensor.shape)) or "1"

    there = {key: f", there {shape(tensor)}" for key, tensor in other.items()}
    shown = [f"{key} ({shape(of[key])}{there.get(key, '')})" for key in names]
    return first_names(shown, _NAMED, ", and ")
