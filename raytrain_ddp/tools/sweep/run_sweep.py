"""The driver of `sweep`: checks all configs, then starts or continues the sweep."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING

from rich.text import Text

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.command_line import given_flags
from raytrain_ddp.config.paths import absolute_path, with_paths
from raytrain_ddp.config.recipe import default_name
from raytrain_ddp.config.rules import require_effect
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.driver.preflight import answered, check, try_model
from raytrain_ddp.driver.recipe_args import command
from raytrain_ddp.driver.run_naming import name_by_config
from raytrain_ddp.errors import ConfigError, PreflightError, TaskError
from raytrain_ddp.formatting import format_metric
from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task, task_of
from raytrain_ddp.tools.display.terminal import Screen
from raytrain_ddp.tools.report.history import state_of
from raytrain_ddp.tools.sweep.space import parse_space, random_points, with_point
from raytrain_ddp.tools.sweep.trials import SEED, Sweep

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs


def prepared(args: SweepArgs, argv: Sequence[str]) -> Sweep:
    """The sweep to start or to continue, with all trials that are known by now. All configs are
    checked, and nothing is started.

    Args:
        argv: the command line, whose flags must have an effect in some trial.

    Raises:
        ConfigError: a config is refused, or the folder holds something else.
        RaytrainError: the data, the model or the task do not exist, or Optuna is not installed.
    """
    config, space = with_paths(args.config, absolute_path), parse_space(args.space)
    if args.search == "optuna" and find_spec("optuna") is None:
        raise PreflightError("--search optuna needs Optuna: pip install 'raytrain_ddp[sweep]'.")
    points = random_points(space, config.seed, args.trials)
    configs = [with_point(config, point) for point in points]
    given, varying = given_flags(argv), {each.field for each in space}
    for name in given & varying:
        raise ConfigError(f"{name} has no effect: --space varies it. Remove it.")
    require_effect({*given, *varying, *(name.rpartition(".")[0] for name in varying)}, *configs)
    epochs = max(point.epochs for point in configs)
    if args.asha >= epochs and not config.steps:
        raise ConfigError(f"--asha {args.asha} has no effect: a trial has {epochs} epochs.")
    _require_valid(configs)
    name = config.name or f"{default_name(args.recipe) or name_by_config(config)}-sweep"
    base = replace(config, name=name, scaling=replace(config.scaling, num_workers=1))
    settings = {"space": [*args.space], "search": args.search, "seeds": args.seeds}
    settings |= {"epochs": config.epochs, "steps": config.steps}  # a run may change these
    sweep = Sweep(base, open_storage(config.storage).join(name), settings)
    answered(config, sweep.load)
    if args.seeds > 1:
        seeds = range(config.seed, config.seed + args.seeds)
        points = [{**point, SEED: seed} for point in points for seed in seeds]
    for point in points[len(sweep.points) :] if args.search == "random" else ():
        sweep.add(point)
    sweep.total = max(len(sweep.points), len(points))
    return sweep


def _require_valid(configs: Sequence[TrainConfig]) -> None:
    """Checks the configs of the points, of which an adaptive search may have others."""
    differing = {repr((c.data, c.model, c.optim, c.loss.name, c.task_options)): c for c in configs}
    for config in map(check, differing.values()):
        if config.task not in BUILT_IN:
            task_of(config)
            continue
        try_model(config, is_new=True)
        if not config.data.holdout and locate(config.data).eval is None:
            raise ConfigError("without evaluations no trial is the best: set --data.holdout 0.1.")


def run_sweep(args: SweepArgs, sweep: Sweep) -> int:
    """Runs the trials that are missing; returns the exit status: 0, or 130 after Ctrl-C.

    Raises:
        RunLockedError: another process runs this sweep.
        TaskError: all trials have failed.
        RaytrainError: the trials do not fit into the cluster, or the storage does not answer.
    """
    screen, status, goal = Screen(Text, live=False), 0, load_task(sweep.base).goal

    def tell(text: str) -> None:
        screen.print(Text(text))

    tell(f"{sweep.base.name}: {' '.join(args.space)}")
    answered(sweep.base, sweep.folder.mkdir)
    with answered(sweep.base, lambda: Lease.take(sweep.folder, tell)):
        try:
            if len(sweep.over) < sweep.total:
                _run(args, sweep, goal, tell)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
    best = sweep.best(goal)
    for title, text in _conclusion(sweep, best).items():
        screen.print(Text(f"{title:<9} {text}"), copied=True)
    if not best and len(sweep.over) == sweep.total:
        causes = (state_of(run).cause for run in sweep.over.values())
        raise TaskError(
            f"all trials have failed ({next(filter(None, causes), 'see above')}). This sweep does "
            "not train them again: after a fix, give another --name."
        )
    return status


def _run(args: SweepArgs, sweep: Sweep, goal: str, tell: Callable[[str], None]) -> None:
    from raytrain_ddp.ray_backend.cluster import cluster, only_one
    from raytrain_ddp.ray_backend.ray_output import ray_output_to_file

    started = cluster(sweep.base, args.address, False, tell)
    with only_one(), ray_output_to_file(sweep.folder), started as layout:
        from raytrain_ddp.tools.sweep.tune_engine import run_trials  # imports Ray

        amounts, scaling = layout.per_worker, sweep.base.scaling
        # so that a run has the same threads later
        scaling = replace(scaling, use_gpu=layout.use_gpu, cpus_per_worker=amounts["CPU"])
        sweep.base = replace(sweep.base, scaling=scaling)
        run_trials(args, sweep, amounts, goal, tell)


def _conclusion(sweep: Sweep, best: Sequence[str]) -> dict[str, str]:
    """The end of a sweep and what follows from it, as lines by their titles."""
    plain = TrainConfig()
    lines = {f"\n{sweep.base.name}": f"{len(sweep.over)} of {sweep.total} trials are over"}
    if best:
        lines["best"] = sweep.shown(best[0])
        runs = [sweep.over[each] for each in best]
        if len(runs) > 1 and sweep.settings["seeds"] > 1:  # optuna may repeat a point
            mean = format_metric(runs[0].monitor, fmean(run.value for run in runs))
            lines[""] = f"{mean} (mean of {len(runs)} seeds)"
        config = replace(with_point(sweep.base, sweep.points[best[0]]), name=None)
        config = replace(config, scaling=plain.scaling, storage=plain.storage)  # not the sweep's
        lines["train it"] = command(config)
    if len(sweep.over) < sweep.total:
        lines["continue"] = "the same command again"
    return {**lines, "report": f"raytrain report {shlex.quote(sweep.folder.address)}"}
