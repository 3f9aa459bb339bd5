"""Models by name: digits-cnn, those of torchvision and timm, and the user's."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import ConfigError, did_you_mean, in_one_line
from raytrain_ddp.tasks.task_loading import check_place, imported

if TYPE_CHECKING:
    from torch import nn

DIGITS = "digits-cnn"
TIMM = "timm:"
# Arguments of builders that the data and model.weights decide.
_DECIDED = ("classes", "num_classes", "weights", "pretrained", "checkpoint_path")


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

    name, make = config.name, _builder(config)
    count = "classes" if name == DIGITS or _is_own(name) else "num_classes"
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


def _builder(config: ModelConfig) -> Callable[..., Any]:
    """The function that builds the model, without its pretrained weights."""
    name = config.name
    if name == DIGITS:
        from raytrain_ddp.tasks.small_networks import DigitsCNN

        return partial(DigitsCNN, dropout=config.dropout)
    if _is_own(name):
        return imported("model.name", name)  # type: ignore[no-any-return]
    if name.startswith(TIMM):
        import timm

        return partial(timm.create_model, name.removeprefix(TIMM))
    from torchvision.models import get_model

    # No loss here would train their auxiliary heads.
    auxiliary = {"aux_logits": False, "init_weights": True}
    options = auxiliary if name in ("googlenet", "inception_v3") else {}
    return partial(get_model, name, weights=None, **options)


def arguments(config: ModelConfig) -> dict[str, Any]:
    """`config.args` as Python values: ``None`` and ``(256, 256)`` are what they look like.

    Raises:
        ConfigError: another field of the config decides one of them.
    """
    for name in config.args:
        if name in _DECIDED:
            raise ConfigError(f"model.args has {name}: the data and model.weights decide it.")
    return {name: _literal(value) for name, value in config.args.items()}


def _literal(value: str | bool | int | float) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return ast.literal_eval(value)
    return value
