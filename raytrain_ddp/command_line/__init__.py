"""Command lines: a recipe, flags from the dataclasses, errors in one line with their status."""

from raytrain_ddp.command_line.commands import Command
from raytrain_ddp.command_line.process import run_command
from raytrain_ddp.command_line.recipe_args import (
    FIT,
    FitArgs,
    RecipeArgs,
    parse_fit,
    parse_with_recipe,
)

__all__ = [
    "FIT",
    "Command",
    "FitArgs",
    "RecipeArgs",
    "parse_fit",
    "parse_with_recipe",
    "run_command",
]
