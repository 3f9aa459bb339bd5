"""``raytrain sweep [RECIPE] --space FIELD=VALUES``: finds the best config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.command_line import Command, given_flags
from raytrain_ddp.config.field_types import ADDRESS, as_text, require_least
from raytrain_ddp.config.process import run_command
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError

_OF_WORKERS = "num_workers placement max_failures replace_workers resize_s"


@dataclass(frozen=True)
class SweepArgs(RecipeArgs):
    """Train a recipe with many configs, and find the best one. Ray Tune runs the trials.

    Each trial is an ordinary run of one process, in the folder of the sweep, with the resources of
    a worker (--scaling.cpus-per-worker, --scaling.gpus-per-worker). All configs are checked before
    the first starts. The same command continues a sweep that was stopped or killed.
    """

    space: tuple[str, ...] = field(default=(), metadata={"metavar": "FIELD=VALUES ..."})
    """Fields to vary, such as optim.lr=log:1e-3:1 model.dropout=0:0.5 augment.policy=none,trivial.
    VALUES is LOW:HIGH (uniform), log:LOW:HIGH (uniform in the logarithm), or a list."""
    trials: int = 20
    """Number of points to try; of lists alone, at most all combinations. A larger number continues
    a sweep."""
    seeds: int = 1
    """Train each point with this many seeds, from --seed on. Points are compared by their mean."""
    search: Literal["random", "optuna"] = "random"
    """How to choose points. random: no point twice. optuna: its TPE sampler, which learns from the
    trials that have ended; it needs the extra sweep."""
    asha: int = 0
    """Stop bad trials early, with a checkpoint, by asynchronous successive halving: of those that
    have reached a rung, the best third continues. Rungs are after so many epochs, and each three
    times as late as the last. 0: stop none."""
    parallel: int | None = None
    """Trials at the same time. Default: as many as fit on the cluster."""
    dry_run: bool = False
    """Check all configs, print the trials, and start nothing."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started for this sweep."""


COMMAND = Command(
    "sweep",
    SweepArgs,
    "[RECIPE] --space FIELD=VALUES [--FLAG ...]",
    {
        "Search": ["space", "trials", "seeds", "search", "asha", "seed", "dry-run"],
        "Resources": ["scaling.cpus-per-worker", "scaling.gpus-per-worker", "parallel", "address"],
        "Runs": ["name", "storage"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped the sweep."""
    args = parse(argv)
    from raytrain_ddp.tools.sweep.trials import prepared, run_sweep

    sweep = prepared(args, argv)
    if not args.dry_run:
        return run_sweep(args, sweep)
    for name, point in sweep.points.items():
        print(name, *(f"{key}={as_text(value)}" for key, value in point.items()))
    return 0


def parse(argv: Sequence[str]) -> SweepArgs:
    """Raises ConfigError for a flag that is wrong, SystemExit (0) after --help."""
    args = parse_with_recipe(argv, COMMAND)
    require_least(args, trials=1, seeds=1, asha=0, parallel=1)
    if args.seeds > 1 and (args.search == "optuna" or args.asha):
        raise ConfigError("--seeds must be 1 with optuna and asha: repeat the best points later.")
    if [*argv].count("--space") > 1:
        raise ConfigError("--space is given twice: list all fields after one --space.")
    for name in given_flags(argv).intersection(f"scaling.{name}" for name in _OF_WORKERS.split()):
        raise ConfigError(f"{name} has no effect: each trial is one process. Remove it.")
    return args


if __name__ == "__main__":
    run_command(main)
