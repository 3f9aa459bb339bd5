"""What config sections are checked with when they are built."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from raytrain_ddp.errors import ConfigError, quoted

# C0, C1 and DEL, and what YAML and Unicode treat as the end of a line.
_OF_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff"
CONTROL = re.compile(f"[{_OF_CONTROL}]")
_NOT_PLAIN = re.compile(f"[{_OF_CONTROL}\ud800-\udfff]")  # and surrogates

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

LEAST_OF_RESOURCE = 0.0001  # of a CPU or GPU, for Ray
FREE: dict[str, bool] = {"free": True}
MAY_BE_EMPTY = {"may_be_empty": True}
ADDRESS = {"metavar": "HOST:PORT|auto"}


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises ConfigError that names the field, the value and the rule, unless the rule holds."""
    if not holds:
        raise ConfigError(f"{field} = {quoted(value)}: {rule}.")


def require_no_control(words: Sequence[str]) -> None:
    """Raises ConfigError if a word of a command line has a control character: an error that quotes
    it would have several lines, or change the terminal."""
    for word in words:
        found = CONTROL.search(word)
        if found is not None:
            rule = f"must not contain the control character U+{ord(found[0]):04X}"
            raise ConfigError(f"the argument {word!r} {rule}.")


def require_least(args: object, **least: float) -> None:
    """Requires that the flags of these names have this value or more, where they are given."""
    for name, number in least.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        require(value is None or value >= number, flag, value, f"must be {number:g} or more")


def seconds_of(text: str) -> float:
    """Of a length of time such as 90s, 15m, 2.5h or 1d; nan if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(found[1]) * _UNITS[found[2]] if found else math.nan


def is_flag(word: str) -> bool:
    """Whether a word starts with a dash; a dash alone and negative numbers are values."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def scalar(value: str | bool | int | float) -> str | bool | int | float:
    """A word of a command line as what it looks like: an integer, a number, true, false, or
    text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            number = kind(value)
            return number if math.isfinite(number) else value
    return value


def group_rules(words: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """The patterns of ``optim.groups``, each with its "lr", "weight_decay", or both.

    Raises:
        ConfigError: a word is neither a pattern with values after it, nor a value.
    """
    rules: list[tuple[str, dict[str, float]]] = []

    def refuse_unless(holds: bool, word: str, rule: str) -> None:
        require(holds, "optim.groups", tuple(words), f"{quoted(word)} {rule}")

    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            rules.append((word, {}))
            continue
        is_known = bool(rules) and name in ("lr", "weight_decay")
        refuse_unless(is_known, word, "must be lr=NUMBER or weight_decay=NUMBER after a pattern")
        number = scalar(text)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        value = float(number) if is_number else -1.0
        refuse_unless(value >= 0, word, "must be a number, 0 or more")
        refuse_unless(name != "lr" or value > 0, word, "must be above 0; see model.freeze")
        rules[-1][1][name] = value
    for pattern, values in rules:
        refuse_unless(bool(values), pattern, "must have lr=NUMBER or weight_decay=NUMBER after it")
    return rules


def require_plain(holder: object) -> None:
    """Requires that no text in a config, at any depth, has a control character: it would be another
    line, or none at all, in files and commands that are made of the config."""
    for field, text in _texts(holder, ""):
        found = _NOT_PLAIN.search(text)
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
