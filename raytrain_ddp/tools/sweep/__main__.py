"""``raytrain sweep [RECIPE] --space FIELD=VALUES``: finds the best config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.validation import ADDRESS, require_least
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.sweep.space import MAX_POINTS


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
    trials: int | None = None
    """Number of points to try. Default: 20, or all if there are fewer; for a grid, all. A larger
    number continues a sweep."""
    seeds: int = 1
    """Train each point with this many seeds, from --seed on. Points are compared by their mean."""
    search: Literal["random", "grid", "optuna"] = "random"
    """How to choose points. grid: all combinations of lists. optuna: its TPE sampler, which learns
    from the trials that have ended; it needs the extra sweep."""
    scheduler: Literal["none", "asha"] = "none"
    """Stop bad trials early, with a checkpoint. asha: asynchronous successive halving. The best
    third of those that have reached a rung continues. Rungs are after --first-rung epochs, and each
    three times as late as the last."""
    first_rung: int = 1
    """Epochs before the scheduler stops the first trials."""
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
        "Search": ["space", "trials", "seeds", "search", "seed", "dry-run"],
        "Early stopping": ["scheduler", "first-rung"],
        "Resources": ["scaling.cpus-per-worker", "scaling.gpus-per-worker", "parallel", "address"],
        "Runs": ["name", "storage"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped the sweep."""
    args = parse(argv)
    from raytrain_ddp.tools.sweep.run_sweep import prepared, run_sweep

    if not args.dry_run:
        return run_sweep(args)
    for trial in prepared(args).trials:
        print(trial.name, *(f"{name}={as_text(value)}" for name, value in trial.values.items()))
    return 0


def parse(argv: Sequence[str]) -> SweepArgs:
    """Raises ConfigError for a flag that is wrong, SystemExit (0) after --help."""
    args = parse_with_recipe(argv, COMMAND)
    require_least(args, trials=1, seeds=1, first_rung=1, parallel=1)
    if args.seeds > 1 and (args.search == "optuna" or args.scheduler == "asha"):
        raise ConfigError("--seeds must be 1 with optuna and asha: repeat the best points later.")
    if (args.trials or 1) * args.seeds > MAX_POINTS:
        raise ConfigError(f"--trials times --seeds must be {MAX_POINTS:,} or less.")
    if [*argv].count("--space") > 1:
        raise ConfigError("--space is given twice: list all fields after one --space.")
    if args.first_rung > 1 and args.scheduler == "none":
        raise ConfigError("--first-rung has no effect without --scheduler asha: remove it.")
    if any(word.replace("_", "-").startswith("--scaling.num-workers") for word in argv):
        raise ConfigError("--scaling.num-workers: each trial is one process; see --parallel.")
    return args


if __name__ == "__main__":
    run_command(main)
