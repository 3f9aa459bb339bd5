"""The names of models, known without importing torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from raytrain_ddp.errors import ConfigError, did_you_mean

DIGITS = "digits-cnn"
_REGISTERED = re.compile(
    r'@register_model\((?:name="(?P<given>\w+)")?\)[\s\S]*?\ndef (?P<name>\w+)'
)


def known_models() -> list[str]:
    """digits-cnn and torchvision's classification models, read from the installed files: importing
    torchvision takes seconds, and a misspelled name should be told at once."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return [DIGITS]
    sources = (Path(spec.origin).parent / "models").glob("*.py")
    found = (match for file in sources for match in _REGISTERED.finditer(file.read_text("utf-8")))
    return [DIGITS, *sorted(match["given"] or match["name"] for match in found)]


def check_model_name(name: str) -> None:
    """Raises ConfigError for a model that is not known."""
    known = known_models()
    if name not in known:
        raise ConfigError(
            f"model.name = {name!r}: no such model.{did_you_mean(name, known)} "
            f"There are {DIGITS} and torchvision's {len(known) - 1} classification models."
        )
