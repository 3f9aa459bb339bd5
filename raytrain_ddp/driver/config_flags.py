"""Writes a config as a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import chain
from typing import Any

from raytrain_ddp.config.field_types import fields_below, value_of
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
    before, without = load(base) if base else TrainConfig(), idle(config)
    words = [base] if base else []
    for name, field in fields_below(TrainConfig):
        value = value_of(config, name)
        if value == value_of(before, name) or name in without:  # the latter would be an error
            continue
        section, dot, last = name.replace("_", "-").rpartition(".")
        if field.type == "bool":
            words.append(f"--{section}{dot}{'' if value else 'no-'}{last}")
        else:
            words += _with_value(name, value)
    return shlex.join([*FIT.split(), *words])


def _with_value(name: str, value: Any) -> Iterator[str]:
    values: Any = value if isinstance(value, tuple) else (value,)
    if isinstance(value, dict):
        values = chain.from_iterable(value.items())
    flag, words = f"--{name.replace('_', '-')}", [*map(_as_text, values)]
    first = [f"{flag}={words.pop(0)}"] if words and is_flag(words[0]) else [flag]
    for word in filter(is_flag, words):
        rule = f"{word!r} would be parsed as a flag on a command line: change its first character"
        require(False, name, value, rule)
    yield from first + words


def _as_text(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
