"""Writes a config as a command line."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Container, Iterator
from itertools import chain
from typing import Any

from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.rules import idle
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import is_flag, require

FIT = "python -m raytrain_ddp.fit"


def command(config: TrainConfig, base: str | None = None) -> str:
    """The command line for this config, independent of files next to it.

    Args:
        base: the shipped recipe to start from; differences from it follow as flags.
    """
    words = [base] if base else []
    words += _flags(config, load(base) if base else TrainConfig(), idle(config))
    return shlex.join([*FIT.split(), *words])


def _flags(section: Any, base: Any, without: Container[str], prefix: str = "") -> Iterator[str]:
    """The flags by which `section` differs from `base`, of the same class, except those `without`
    effect, which would be an error."""
    for field in dataclasses.fields(section):
        value, before = getattr(section, field.name), getattr(base, field.name)
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _flags(value, before, without, f"{prefix}{field.name}.")
        elif f"{prefix}{field.name}" in without:
            continue
        elif value != before and field.type == "bool":
            yield f"--{prefix}{'' if value else 'no-'}{name}"
        elif value != before:
            yield from _with_value(f"--{prefix}{name}", value)


def _with_value(flag: str, value: Any) -> Iterator[str]:
    values: Any = value if isinstance(value, tuple) else (value,)
    if isinstance(value, dict):
        values = chain.from_iterable(value.items())
    words = [*map(_as_text, values)]
    first = [f"{flag}={words.pop(0)}"] if words and is_flag(words[0]) else [flag]
    for word in filter(is_flag, words):
        rule = f"{word!r} would be parsed as a flag on a command line: change its first character"
        require(False, flag[2:].replace("-", "_"), value, rule)
    yield from first + words


def _as_text(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
