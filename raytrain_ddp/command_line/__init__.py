"""The former place of config/command_line.py, for imports that have not moved yet."""

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.process import run_command
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.fit import parse_fit

__all__ = ["Command", "RecipeArgs", "parse_fit", "parse_with_recipe", "run_command"]
