"""``raytrain sweep [RECIPE] --space FIELD=VALUES``: finds the best config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.rules import given_flags
from raytrain_ddp.config.validation import ADDRESS, require_least
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError

MAX_TRIALS = 10_000
# Of a run on several workers; a trial is one process.
_OF_WORKERS = {"num_workers", "backend", "placement", "max_failures", "replace_workers"}
_OF_WORKERS |= {"max_preemptions", "resize_s", "start_timeout_s", "check_every_steps"}


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
    """How to choose points: random; grid, all combinations of lists; optuna, its TPE sampler, which
    learns from the trials that have ended (needs the extra sweep)."""
    scheduler: Literal["none", "asha"] = "none"
    """Stop bad trials early, with a checkpoint. asha: asynchronous successive halving, each at a
    rung, by those that reached it before. Rungs are after --first-rung epochs, and each --factor
    times as late as the last."""
    first_rung: int = 1
    """Epochs before the scheduler stops the first trials."""
    factor: int = 3
    """One in this many trials continues after a rung."""
    parallel: int = 0
    """Trials at the same time. 0: as many as fit on the cluster when the sweep starts."""
    dry_run: bool = False
    """Check all configs, print the trials, and start nothing."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started for this sweep."""
    dashboard: bool = False
    """Start the dashboard of the Ray that is started for this sweep."""


COMMAND = Command(
    "sweep",
    SweepArgs,
    "[RECIPE] --space FIELD=VALUES [--FLAG ...]",
    {
        "Search": ["space", "trials", "seeds", "search", "seed", "dry-run"],
        "Early stopping": ["scheduler", "first-rung", "factor"],
        "Resources": ["scaling.cpus-per-worker", "scaling.gpus-per-worker", "parallel", "address"],
        "Runs": ["name", "storage"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped the sweep."""
    args, given = parse(argv), sorted(given_flags(argv))
    from raytrain_ddp.tools.sweep.run_sweep import prepared, run_sweep

    if not args.dry_run:
        return run_sweep(args, given)
    for trial in prepared(args, given).trials:
        print(trial.name, "", ", ".join(f"{n}={as_text(v)}" for n, v in trial.values.items()))
    if args.search == "optuna":
        print("the results of the first trials decide the others")
    return 0


def parse(argv: Sequence[str]) -> SweepArgs:
    """Raises ConfigError for a flag that is wrong, SystemExit (0) after --help."""
    args, given = parse_with_recipe(argv, COMMAND), given_flags(argv)
    config, varied = args.config, {word.partition("=")[0].replace("-", "_") for word in args.space}
    require_least(args, trials=1, seeds=1, first_rung=1, factor=2, parallel=0)
    if (args.trials or 1) * args.seeds > MAX_TRIALS:
        raise ConfigError(f"--trials times --seeds must be {MAX_TRIALS:,} or less.")
    if sum(word.partition("=")[0] == "--space" for word in argv) > 1:
        raise ConfigError("--space is given twice: list all fields after one --space.")
    rungs, asha = {"first_rung", "factor"} & given, args.scheduler == "asha"
    no_effect = [
        (given & varied, "--space varies it"),
        (given & {f"scaling.{name}" for name in _OF_WORKERS}, "a trial is one process"),
        ({"trials"} & given if args.search == "grid" else set(), "--search grid tries all"),
        (set() if asha else rungs, "it needs --scheduler"),
    ]
    for names, why in no_effect:
        for name in sorted(names):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect: {why}. Remove it.")
    has_evaluations = config.eval.every_epochs or config.eval.every_steps
    rules = [
        (args.seeds == 1 or not asha, "--seeds must be 1: seeds of a point would stop apart"),
        (not config.steps and varied.isdisjoint({"epochs", "steps"}), "set --epochs, and no steps"),
        (has_evaluations, "it compares evaluations: set --eval.every-epochs"),
        (args.first_rung < config.epochs, f"--first-rung must be below epochs = {config.epochs}"),
    ]
    for holds, rule in rules if asha else []:
        if not holds:
            raise ConfigError(f"--scheduler asha: {rule}.")
    if args.search == "optuna" and args.seeds > 1:
        raise ConfigError("--seeds must be 1 with --search optuna: repeat the best points later.")
    return args


if __name__ == "__main__":
    run_command(main)
