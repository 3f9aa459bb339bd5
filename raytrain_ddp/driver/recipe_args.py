"""The command line of a training run: a recipe and flags; a config as such a line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import Any, TypeVar

from raytrain_ddp.config.command_line import Command, flat, is_flag, positional
from raytrain_ddp.config.field_types import fields_below, require, require_no_control, value_of
from raytrain_ddp.config.recipe import load, shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig, idle
from raytrain_ddp.errors import ConfigError

FIT = "python -m raytrain_ddp.fit"


@dataclass(frozen=True)
class RecipeArgs:
    """The flags of all commands that train."""

    config: TrainConfig = field(metadata=flat("run"))
    recipe: str | None = field(default=None, metadata=positional("RECIPE"))
    """A .toml file, a run, or a name from fit --describe. Flags override it."""


Args = TypeVar("Args", bound=RecipeArgs)


def parse_with_recipe(argv: Sequence[str], command: Command[Args]) -> Args:
    """The arguments of a command that trains: its flags override the recipe, which comes first.

    Args:
        argv: the recipe is a file, a shipped recipe, or a run.

    Raises:
        ConfigError: a recipe or a flag is wrong. SystemExit (0): help was printed.
    """
    require_no_control(argv)
    recipe = argv[0] if argv and not argv[0].startswith("-") else None
    args: Any = command.parse(argv, config=_config_of(recipe) if recipe else TrainConfig())
    if args.recipe != recipe:
        raise ConfigError(
            f"unexpected argument {args.recipe!r}: a recipe must be the first argument, before the "
            "flags."
        )
    return args  # type: ignore[no-any-return]


def _config_of(recipe: str) -> TrainConfig:
    """Loads the config of a file, a shipped recipe, or an existing run."""
    is_file = recipe.endswith(".toml") and PurePath(recipe).name != "config.toml"
    if is_file or recipe in shipped_recipes():
        return load(recipe)
    from raytrain_ddp.checkpoint.run_folder import config_of_run  # imports PyArrow

    return config_of_run(recipe) or load(recipe)


def command(config: TrainConfig, base: str | None = None) -> str:
    """The command line for this config, independent of files next to it.

    Args:
        base: the shipped recipe to start from; differences from it follow as flags.
    """
    before, without = load(base) if base else TrainConfig(), idle(config)
    words = [base] if base else []
    for each in fields_below(TrainConfig):
        name, value = each.name, value_of(config, each.name)
        if value == value_of(before, name) or name in without:  # the latter would be an error
            continue
        section, dot, last = name.replace("_", "-").rpartition(".")
        if each.kind is bool:
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
