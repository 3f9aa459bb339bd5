"""Models by name. The list of names is available without importing torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.errors import ConfigError, PreflightError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

DIGITS = "digits-cnn"
_REGISTERED = re.compile(
    r'@register_model\((?:name="(?P<given>\w+)")?\)[\s\S]*?\ndef (?P<name>\w+)'
)


def known_models() -> list[str]:
    """digits-cnn and torchvision's classification models, read from the installed files: importing
    torchvision takes seconds, and a misspelled name should be reported at once."""
    found = (match for text in _sources() for match in _REGISTERED.finditer(text))
    return [DIGITS, *sorted(match["given"] or match["name"] for match in found)]


def known_weights(model: str) -> list[str]:
    """The names of torchvision's weights for one of its models; none if they cannot be read."""
    for text in _sources():
        taken = re.search(rf"\ndef {model}\(\s*\*,\s*weights: (?:Optional\[)?(\w+)", text)
        if taken is not None:
            _, _, rest = text.partition(f"\nclass {taken[1]}(WeightsEnum):")
            body = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
            return re.findall(r"^    (\w+) = ", body, re.MULTILINE)
    return []


def _sources() -> Iterator[str]:
    spec = importlib.util.find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parent / "models").glob("*.py")):
            yield path.read_text("utf-8")


def check_model(name: str, weights: str | None = None) -> None:
    """Raises ConfigError if the model is unknown or has no such weights."""
    known = known_models()
    if name not in known:
        raise ConfigError(
            f"model.name = {name!r}: no such model.{did_you_mean(name, known)} "
            f"There are {DIGITS} and torchvision's {len(known) - 1} classification models."
        )
    if weights is None:
        return
    if name == DIGITS:
        raise ConfigError(f"model.weights = {weights!r}: {name} has no weights; remove it.")
    names = known_weights(name)
    if names and weights not in names:
        raise ConfigError(
            f"model.weights = {weights!r}: {name} has {', '.join(names)}."
            f"{did_you_mean(weights, names)}"
        )


def torchvision_model(name: str, weights: str | None, classes: int) -> nn.Module:
    """A torchvision model with a new head for `classes`.

    Args:
        weights: the name of the pretrained weights to load, except for the head.

    Raises:
        ConfigError: there are no weights of that name.
        PreflightError: the weights cannot be downloaded.
    """
    from torchvision.models import get_model, get_model_weights

    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # No loss here would train their auxiliary heads.
        options = {"aux_logits": False, "init_weights": True}
    if weights is None:
        return get_model(name, weights=None, num_classes=classes, **options)  # type: ignore[no-any-return]
    check_model(name, weights)
    wanted = get_model_weights(name)[weights]
    # With weights, torchvision's builders set these themselves.
    if name in ("googlenet", "inception_v3"):
        options["transform_input"] = True
    elif name.startswith("vit_"):
        options["image_size"] = wanted.meta["min_size"][0]
    elif name.startswith("maxvit"):
        options["input_size"] = wanted.meta["min_size"]
    model: nn.Module = get_model(name, weights=None, num_classes=classes, **options)
    try:
        begun = get_model(name, weights=wanted, progress=False).state_dict()
    except (OSError, RuntimeError) as error:
        import torch

        file = wanted.url.rpartition("/")[2]
        raise PreflightError(
            f"model.weights = {weights!r}: {wanted.url} cannot be downloaded "
            f"({' '.join(str(error).split())}). Put {file} into {torch.hub.get_dir()}/checkpoints."
        ) from error
    own, all_classes = model.state_dict(), len(wanted.meta["categories"])
    for key, tensor in own.items():
        head = (classes, *tensor.shape[1:]), (all_classes, *tensor.shape[1:])
        if begun[key].shape == tensor.shape:
            own[key] = begun[key]
        elif (tensor.shape, begun[key].shape) != head:
            raise ConfigError(
                f"model.weights = {weights!r}: {key} of {name} has a different shape."
            )
    model.load_state_dict(own)
    return model
