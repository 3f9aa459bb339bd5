"""The commands that take a recipe and the flags of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.flags import flat, positional
from raytrain_ddp.config.recipe import load, shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require_no_control
from raytrain_ddp.errors import ConfigError


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
