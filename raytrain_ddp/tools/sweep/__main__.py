"""``raytrain sweep [RECIPE] --space FIELD=VALUES``: finds the best config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from raytrain_ddp.command_line import Command, RecipeArgs, parse_with_recipe, run_command
from raytrain_ddp.config.effects import given_flags
from raytrain_ddp.config.recipe import default_name
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import ADDRESS, require, require_least
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.sweep.space import MOST_TRIALS, grid, parse_space, size_of

_TRIALS = 20
# Of a run on several workers; a trial is one process.
_OF_WORKERS = [
    *("num_workers", "use_gpu", "cpus_per_worker", "gpus_per_worker", "backend", "placement"),
    *("max_failures", "replace_workers", "max_preemptions", "resize_s", "start_timeout_s"),
    "check_every_steps",
]


@dataclass(frozen=True)
class SweepArgs(RecipeArgs):
    """Train a recipe with many configs, and find the best one. Ray Tune places the trials.

    The trials are ordinary runs, in the folder of the sweep. All configs are checked before the
    first starts. The same command continues a sweep that was stopped or killed.
    """

    space: tuple[str, ...] = field(default=(), metadata={"metavar": "FIELD=VALUES ..."})
    """Fields to vary, such as optim.lr=log:1e-3:1 model.dropout=0:0.5 augment.policy=none,trivial.
    VALUES is LOW:HIGH (uniform), log:LOW:HIGH (uniform in the logarithm), or a list."""
    trials: int | None = None
    """Number of points to try. Default: 20, or all if there are fewer; for a grid, all. A larger
    number continues a sweep, but not with --scheduler halving or pbt."""
    seeds: int = 1
    """Train each point with this many seeds, from --seed on. Points are compared by their mean."""
    search: Literal["random", "grid", "optuna"] = "random"
    """How to choose points: random; grid, all combinations of lists; optuna, its TPE sampler, which
    learns from the trials that have ended (needs the extra sweep)."""
    scheduler: Literal["none", "asha", "halving", "pbt"] = "none"
    """Stop bad trials early, with a checkpoint. asha: each at a rung, by those that reached it
    before; halving: all pause at a rung, and the best continue, so the result does not depend on
    --parallel. Rungs are after --first-rung epochs, and each --factor times as late as the last.
    pbt: all pause every --first-rung epochs, and the worst are replaced by copies of the best, with
    values near theirs (population based training)."""
    first_rung: int = 1
    """Epochs before a scheduler stops the first trials."""
    factor: int = 3
    """One in this many trials continues after a rung. With pbt, one in this many is replaced."""
    per_trial: dict[str, str] = field(default_factory=dict, metadata={"metavar": "cpus=N gpus=N"})
    """Resources of a trial, such as cpus=4 gpus=0.5; below 1, several share a GPU. Default: a GPU
    with its share of the CPUs, if the cluster has any; else a CPU."""
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
        "Resources": ["per-trial", "parallel", "address"],
        "Runs": ["name", "storage"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped the sweep."""
    args = parse(argv)
    from raytrain_ddp.driver.run_naming import name_by_config
    from raytrain_ddp.tools.sweep.run_sweep import SweepOrder, prepared, run_sweep, settings_of
    from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
    from raytrain_ddp.tools.sweep.trial_configs import known_points, scaling_of_trial, shown

    space, config = parse_space(args.space), args.config
    most = len(grid(space)) if args.search == "grid" else int(min(_TRIALS, size_of(space)))
    trials = args.trials or most
    name = config.name or f"{default_name(args.recipe) or name_by_config(config)}-sweep"
    settings = settings_of(
        config,
        space=space,
        trials=trials,
        seeds=args.seeds,
        search=args.search,
        scheduler=args.scheduler,
        first_rung=args.first_rung,
        factor=args.factor,
    )
    order = SweepOrder(
        base=replace(config, name=name, scaling=scaling_of_trial(config.scaling, args.per_trial)),
        settings=settings,
        given=[*given_flags(argv)],
        parallel=args.parallel,
        address=args.address,
        dashboard=args.dashboard,
    )
    if args.dry_run:
        prepared(order)
        points = known_points(settings, config.seed)
        for number, point in enumerate(points):
            print(f"trial-{number:04}  {shown(point)}")
        if not points:
            print(f"{trials} trials; the results of the first decide the others")
        return 0
    return run_sweep(order, SweepDisplay())


def parse(argv: Sequence[str]) -> SweepArgs:
    """Raises ConfigError for a flag that is wrong, SystemExit (0) after --help."""
    args = parse_with_recipe(argv, COMMAND)
    given, config = given_flags(argv), args.config
    for name in sorted(given & {f"scaling.{each}" for each in _OF_WORKERS}):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} has no effect: a trial is one process; see --per-trial.")
    varied = {word.partition("=")[0].replace("-", "_") for word in args.space}
    for name in sorted(given & varied):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} has no effect: --space varies it. Remove one of them.")
    last = config.seed + args.seeds - 1
    require(last < 2**63, "--seeds", args.seeds, f"the last seed, {last}, must be below 2**63")
    if sum(word.partition("=")[0] == "--space" for word in argv) > 1:
        raise ConfigError("--space is given twice: list all fields after one --space.")
    require_least(args, trials=1, seeds=1, first_rung=1, factor=2, parallel=0)
    if (args.trials or 0) > MOST_TRIALS:
        raise ConfigError(f"--trials {args.trials}: a sweep has at most {MOST_TRIALS:,} trials.")
    if "per_trial" in given and not args.per_trial:
        raise ConfigError("--per-trial: give cpus=N, gpus=N or both.")
    if args.search == "grid" and args.trials is not None:
        raise ConfigError("--trials has no effect with --search grid, which tries all: remove it.")
    require(
        args.seeds == 1 or args.scheduler == "none",
        "--seeds",
        args.seeds,
        "must be 1 with --scheduler, which would stop the seeds of a point apart",
    )
    if args.search == "optuna" and args.scheduler in ("halving", "pbt"):
        raise ConfigError(
            f"--scheduler {args.scheduler} needs all points before the first rung: use --search "
            "random or grid, or --scheduler asha."
        )
    _require_rungs(args, config, given)
    return args


def _require_rungs(args: SweepArgs, config: TrainConfig, given: set[str]) -> None:
    """Raises ConfigError if a scheduler would have no rung, or its flags no effect."""
    if args.scheduler == "none":
        for name in ("first_rung", "factor"):
            flag = f"--{name.replace('_', '-')}"
            require(
                name not in given, flag, getattr(args, name), "has no effect without --scheduler"
            )
        return
    flag = f"--scheduler {args.scheduler}"
    if config.steps or any(word.startswith(("epochs=", "steps=")) for word in args.space):
        raise ConfigError(f"{flag} compares trials after equal epochs: set --epochs, and no steps.")
    if not (config.eval.every_epochs or config.eval.every_steps):
        raise ConfigError(f"{flag} needs evaluations: set --eval.every-epochs.")
    rule = f"must be below epochs = {config.epochs}; otherwise no trial stops early"
    require(args.first_rung < config.epochs, "--first-rung", args.first_rung, rule)


if __name__ == "__main__":
    run_command(main)
