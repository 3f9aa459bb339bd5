"""What config sections are checked with when they are built."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from raytrain_ddp.errors import ConfigError

# Of C0, C1 and DEL; what YAML and Unicode take for the end of a line; halves of a character.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

FREE: dict[str, bool] = {"free": True}
ADDRESS = {"metavar": "HOST:PORT|auto"}


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises ConfigError that names the field, the value and the rule, unless the rule holds."""
    if not holds:
        raise ConfigError(f"{field} = {value!r}: {rule}.")


def at_least(least: float, section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section are `least` or more."""
    for name in fields:
        value = getattr(holder, name)
        field = f"{section}.{name}" if section else name
        require(value >= least, field, value, f"must be {least:g} or more")


def above_zero(section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section are above 0."""
    for name in fields:
        value = getattr(holder, name)
        require(value > 0, f"{section}.{name}", value, "must be above 0")


def below_one(section: str, holder: object, *fields: str) -> None:
    """Requires that the fields of a section lie in [0, 1)."""
    for name in fields:
        value = getattr(holder, name)
        require(0 <= value < 1, f"{section}.{name}", value, "must be 0 or more and below 1")


def seconds_of(text: str) -> float:
    """Of a length of time such as 90, 90s, 15m, 2.5h or 1d; nan if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    return float(found[1]) * _UNITS[found[2]] if found else math.nan


def require_plain(holder: object, name: str = "") -> None:
    """Requires that no text in a config, at any depth, has a control character: it would be another
    line, or none at all, in files and commands that are made of the config."""
    for field, text in _texts(holder, name):
        found = _CONTROL.search(text)
        rule = f"must not contain the control character U+{ord(found[0]):04X}" if found else ""
        require(found is None, field, text, rule)


def _texts(holder: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(holder, str):
        yield name, holder
    elif dataclasses.is_dataclass(holder):
        for field in dataclasses.fields(holder):
            below = f"{name}.{field.name}" if name else field.name
            yield from _texts(getattr(holder, field.name), below)
    elif isinstance(holder, Mapping):
        for pair in holder.items():
            yield from _texts(pair, name)
    elif isinstance(holder, tuple | list):
        for each in holder:
            yield from _texts(each, name)
