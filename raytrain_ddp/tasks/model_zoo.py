"""Models by name: our own, those of torchvision and timm, and the user's."""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import ConfigError, did_you_mean
from raytrain_ddp.tasks.task_loading import check_place, imported

if TYPE_CHECKING:
    from torch import nn

DIGITS = "digits-cnn"
TIMM = "timm:"
# Arguments of builders that other fields of the config decide.
_DECIDED = {
    **dict.fromkeys(("classes", "num_classes"), "the data decide it"),
    **dict.fromkeys(("weights", "pretrained", "checkpoint_path"), "set model.weights"),
    "progress": "no builder here shows its progress",
}


def known_models() -> list[str]:
    """Returns digits-cnn and torchvision's classification models; imports torchvision."""
    from torchvision import models

    return [DIGITS, *models.list_models(module=models)]


@cache
def timm_models() -> dict[str, list[str]]:
    """Returns timm's models, each with the tags of its pretrained weights; imports timm."""
    import timm

    found: dict[str, list[str]] = {name: [] for name in timm.list_models()}
    for full in timm.list_pretrained():
        name, _, tag = full.partition(".")
        found[name].append(tag)
    return found


def known_weights(model: str) -> list[str]:
    """Returns the names of the pretrained weights of a torchvision or timm model; else none."""
    if model.startswith(TIMM):
        return [*timm_models().get(timm_name(model)[0], []), "DEFAULT"]
    if model == DIGITS or ":" in model:
        return []
    from torchvision.models import get_model_weights

    return [*get_model_weights(model).__members__]


def timm_name(name: str) -> tuple[str, str]:
    """``timm:resnet50.a1_in1k`` -> resnet50, a1_in1k; the tag is empty if there is none."""
    model, _, tag = name.removeprefix(TIMM).partition(".")
    return model, tag


def check_model(name: str) -> None:
    """Raises ConfigError if there is no such model; imports torchvision or timm if needed."""
    if name == DIGITS:
        return
    if name.startswith(TIMM):
        model, tag = timm_name(name)
        models = timm_models()
        if model not in models:
            raise ConfigError(
                f"model.name = {name!r}: no such model.{_meant(model, models, TIMM)} "
                f"timm has {len(models)} models."
            )
        if tag and tag not in models[model]:
            raise ConfigError(
                f"model.name = {name!r}: the weights of {model} are "
                f"{', '.join(models[model]) or '(none)'}."
                f"{did_you_mean(tag, models[model])}"
            )
    elif ":" in name:
        check_place("model.name", name)
    else:
        known = known_models()
        if name not in known:
            raise ConfigError(
                f"model.name = {name!r}: no such model.{did_you_mean(name, known)}"
                f"{_meant(name, timm_models(), TIMM) if name in timm_models() else ''} "
                f"There are {DIGITS} and torchvision's {len(known) - 1} classification models; "
                "those of timm are timm:NAME, your own are module:function."
            )


def _meant(name: str, known: dict[str, list[str]], prefix: str) -> str:
    return did_you_mean(prefix + name, [prefix + each for each in known])


def build(config: ModelConfig, classes: int, options: dict[str, Any] | None = None) -> nn.Module:
    """The model with a head for `classes`, and without pretrained weights.

    Args:
        options: defaults of `config.args`, as pretrained weights need them.

    Raises:
        ConfigError: the model does not take `config.args`.
    """
    make = builder(config)
    given = {**(options or {}), **arguments(config)}
    if not config.name.startswith(TIMM) and ":" in config.name:
        return _made_by_user(config, make, {"classes": classes, **given})
    count = "classes" if config.name == DIGITS else "num_classes"
    try:
        model: nn.Module = make(**{count: classes}, **given)
    except Exception as error:
        if config.name.startswith(TIMM) and not config.args:
            raise ConfigError(f"model.name = {config.name!r}: {error}.") from error
        if not config.args:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"model.args = {config.args}: {config.name} refuses them: {reason}."
        ) from error
    return model


def builder(config: ModelConfig) -> Callable[..., Any]:
    """The function that builds the model, without its pretrained weights."""
    from functools import partial

    if config.name == DIGITS:
        from raytrain_ddp.tasks.small_networks import DigitsCNN

        return partial(DigitsCNN, dropout=config.dropout)
    if config.name.startswith(TIMM):
        import timm  # seconds

        return partial(timm.create_model, ".".join(filter(None, timm_name(config.name))))
    if ":" in config.name:
        return imported("model.name", config.name)  # type: ignore[no-any-return]
    from torchvision.models import get_model

    options: dict[str, Any] = {}
    if config.name in ("googlenet", "inception_v3"):
        # No loss here would train their auxiliary heads.
        options = {"aux_logits": False, "init_weights": True}
    return partial(get_model, config.name, weights=None, **options)


def arguments(config: ModelConfig) -> dict[str, Any]:
    """`config.args` as Python values: ``None`` and ``(256, 256)`` are what they look like.

    Raises:
        ConfigError: another field of the config decides one of them.
    """
    for name in config.args:
        if name in _DECIDED:
            raise ConfigError(f"model.args has {name}: remove it; {_DECIDED[name]}.")
    return {name: _literal(value) for name, value in config.args.items()}


def _literal(value: str | bool | int | float) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return ast.literal_eval(value)
    return value


def _made_by_user(
    config: ModelConfig, make: Callable[..., Any], given: dict[str, Any]
) -> nn.Module:
    """What the user's own function returns.

    Raises:
        ConfigError: it does not take `given`, fails with `config.args`, or returns no module.
    """
    from torch import nn

    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"model.name = {config.name!r}: it is called with ({', '.join(given)}) as keywords, "
            f"that is classes and model.args: {error}."
        ) from None
    try:
        model = make(**given)
    except Exception as error:
        if not config.args:
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.args = {config.args}: {config.name} fails with them: {type(error).__name__}: "
            f"{reason} ({at.filename}:{at.lineno})."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name = {config.name!r}: it returned a {type(model).__name__}; expected a "
            "torch.nn.Module."
        )
    return model
