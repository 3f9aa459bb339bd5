"""Command lines: a recipe, flags from the dataclasses, errors in one line with their status."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import tyro

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import ConfigError, RaytrainError, status_of
from raytrain_ddp.recipe import load, shipped_recipes

_PROFILE_STEPS = 5


@dataclass(frozen=True)
class RecipeArgs:
    """The flags of all doors that train."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe (.toml) or the name of a shipped one; must come first. Flags win over it."""


Args = TypeVar("Args", bound=RecipeArgs)


@dataclass(frozen=True)
class FitArgs(RecipeArgs):
    """Train a model on Ray: one worker per GPU, on this machine or on a cluster.

    Without arguments it trains a small network on handwritten digits with two CPU workers. The same
    command again goes on where the run stopped; all randomness follows from the seed.
    """

    print_config: bool = False
    """Print the resolved config as TOML, and do nothing else."""
    dry_run: bool = False
    """Print what would be done (batches, steps, learning rate, sizes, workers); take no worker."""
    emit: Literal["slurm", "kuberay", "ray-up", "command"] | None = None
    """Print a file for this run on a cluster, or its command line, and do nothing else."""
    audit: bool = False
    """Log a hash of each step's sample ids and pixels: equal hashes, equal data (log.audit)."""
    profile: bool = False
    """Trace five steps with torch.profiler on rank 0 (log.profile_steps, log.profile_ranks)."""
    local: bool = False
    """Without Ray: in this process, or under torchrun."""
    address: str | None = None
    """A running Ray cluster (auto: on this machine). Default: RAY_ADDRESS, else an embedded Ray."""
    dashboard: bool = False
    """Start the embedded Ray with its dashboard."""


def parse_fit(argv: Sequence[str]) -> FitArgs:
    """Raises ConfigError for a recipe, SystemExit (2) for a flag that is wrong."""
    args = parse_with_recipe(argv, FitArgs, "fit")
    log = args.config.log
    if args.audit:
        log = replace(log, audit=True)
    if args.profile and not log.profile_steps:
        log = replace(log, profile_steps=_PROFILE_STEPS)
    return replace(args, config=replace(args.config, log=log))


def parse_with_recipe(argv: Sequence[str], kind: type[Args], door: str) -> Args:
    """The flags of a door that trains: those of `kind`, over the recipe that comes first, if any.

    Raises ConfigError for a recipe, SystemExit (2) for a flag that is wrong.
    """
    recipe = argv[0] if argv and not argv[0].startswith("-") else None
    config = load(recipe) if recipe is not None else TrainConfig()
    names = ", ".join(shipped_recipes())
    args = tyro.cli(
        kind,
        prog=f"python -m raytrain_ddp.{door}",
        description=f"{inspect.getdoc(kind)}\n\nShipped recipes: {names}.",
        args=list(argv),
        default=kind(config=config),
    )
    if args.recipe != recipe:
        raise ConfigError(
            f"the recipe {args.recipe!r} must be the first argument, before the flags. (If it is "
            "none: the flag before it takes no value.)"
        )
    return args


def run_door(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a door's main with the command line, and exits with its status.

    An error of ours is one line (or its own few) on standard error, without a traceback.
    """
    try:
        status = main(sys.argv[1:])
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr)
        status = status_of(error)
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        number = stop.args[0] if stop.args and isinstance(stop.args[0], int) else 2
        status = 128 + number
    sys.exit(status)
