"""What config sections are checked with when they are built."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress

from raytrain_ddp.errors import ConfigError, quoted

# C0, C1 and DEL, and what YAML and Unicode treat as the end of a line.
_OF_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff"
CONTROL = re.compile(f"[{_OF_CONTROL}]")
NOT_PLAIN = re.compile(f"[{_OF_CONTROL}\ud800-\udfff]")  # and surrogates

LEAST_OF_RESOURCE = 0.0001  # of a CPU or GPU, for Ray
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
    for word in [*words, ""]:
        name, equals, text = word.partition("=")
        subject, wrong = word, ""
        if not equals and rules and not rules[-1][1]:
            subject, wrong = rules[-1][0], "must have lr=NUMBER or weight_decay=NUMBER after it"
        elif not equals:
            rules.append((word, {}))
        elif not rules or name not in ("lr", "weight_decay"):
            wrong = "must be lr=NUMBER or weight_decay=NUMBER after a pattern"
        elif not isinstance(value := scalar(text), int | float) or value is True or value < 0:
            wrong = "must be a number, 0 or more"
        elif name == "lr" and not value:
            wrong = "must be above 0; see model.freeze"
        else:
            rules[-1][1][name] = float(value)
        require(not wrong, "optim.groups", tuple(words), f"{quoted(subject)} {wrong}")
    return rules[:-1]
