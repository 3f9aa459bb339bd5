"""A sweep: what is checked before it starts, its trials, and its end.

Trials are runs: what became of each is read from its run. sweep.json has the points of the trials,
in their order, and what decides them.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.text import Text

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, SWEEP_FILE
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.command_line import given_flags
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.recipe import (
    absolute_path,
    changed_fields,
    default_name,
    publishable,
    to_dict,
    with_paths,
)
from raytrain_ddp.config.train_config import TrainConfig, require_effect
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.driver.preflight import answered, check, try_model
from raytrain_ddp.driver.recipe_args import command
from raytrain_ddp.driver.run_naming import name_by_config
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError, TaskError
from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task, task_of
from raytrain_ddp.tools.display.terminal import Screen
from raytrain_ddp.tools.formatting import format_metric
from raytrain_ddp.tools.report.run_files import Run, State, read_run, state_of
from raytrain_ddp.tools.sweep.space import Point, parse_space, random_points, with_point
from raytrain_ddp.uri import below

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs

_OVER = ("finished", "stopped", "failed")
_SEED = "seed"  # in a point, if each is trained with several
Trial = dict[str, Any]  # its "name" and its "point"


@dataclass
class Sweep:
    """A sweep so far. A trial is named by its number, as ``trial-0007``.

    Args:
        base: the recipe with its flags; `name` and `storage` are those of the sweep.
        folder: the runs of its trials are below.
        settings: the flags that decide the trials; with others, it is another sweep.
        total: of the trials, with those that are not known yet.
        points: of the trials that are known, by their names.
        over: the runs of those that need no training anymore, with their states.
    """

    base: TrainConfig
    folder: Storage
    settings: Mapping[str, Any]
    total: int = 0
    points: dict[str, Point] = field(default_factory=dict)
    over: dict[str, tuple[Run, State]] = field(default_factory=dict)

    def add(self, point: Point) -> str:
        """The name of the next trial."""
        name = f"trial-{len(self.points):04}"
        self.points[name] = point
        return name

    def waiting(self) -> list[Trial]:
        """The trials that are known, and not over."""
        return [{"name": n, "point": p} for n, p in self.points.items() if n not in self.over]

    def read(self, name: str) -> tuple[Run, State]:
        """The run of a trial, and its state; both also if it has not begun. Raises
        RaytrainError."""
        run = read_run(self.folder.join(name), name)
        return run, state_of(run)

    def end(self, name: str, cause: str) -> str:
        """Takes over the run of a trial that has ended; returns a line about it.

        Args:
            cause: the cause of its failure, as Tune knows it; "" for none.
        """
        _, state = self.over[name] = self.read(name)
        ended = state.name if state.name in _OVER else "stopped"  # it may be about to end
        place = f"({len(self.over)} of {self.total})"
        words = "failed" if cause else ended, self.shown(name), place, state.cause or cause
        return "  ".join(words).rstrip()

    def shown(self, name: str) -> str:
        """A trial that is over, with its best evaluation and its point, as text."""
        point = (f"{field} {as_text(value)}" for field, value in self.points[name].items())
        return "  ".join((name, self.over[name][0].best_summary or "-", *point))

    def best(self, goal: str) -> list[Run]:
        """The trials of the best point, the best of them first: the point with the best mean, of
        those that have a value for the most seeds. Failed trials do not count."""
        sign, found = 1 if goal == "max" else -1, defaultdict[str, list[Run]](list)
        for name, (run, state) in self.over.items():
            if run.best and state.name != "failed":
                found[repr({**self.points[name], _SEED: None})].append(run)
        best = max(found.values(), key=lambda r: (len(r), sign * _mean(r)), default=[])
        return sorted(best, key=lambda run: sign * run.value, reverse=True)

    def save(self) -> None:
        """Raises OSError."""
        known = {"version": 2, "settings": self.settings, "points": [*self.points.values()]}
        known |= {"config": to_dict(publishable(self.base))}
        self.folder.write_atomic(SWEEP_FILE, json.dumps(known, indent=1).encode())

    def load(self) -> None:
        """Takes over the trials of this sweep, if it has begun.

        Raises:
            ConfigError: the folder holds a run or another sweep.
            CheckpointError: its file is damaged, or of another version.
            RaytrainError, OSError: a run cannot be read.
        """
        if self.folder.exists(CONFIG_FILE):
            raise ConfigError(f"{self.folder} is a run: give the sweep another --name.")
        if not self.folder.exists(SWEEP_FILE):
            return
        try:
            known = json.loads(self.folder.read(SWEEP_FILE))
            config, settings, points = (known[part] for part in ("config", "settings", "points"))
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder.join(SWEEP_FILE)} is damaged, or of another version: give the sweep "
                "another --name. Its runs are whole."
            ) from error
        changed = [name for name, _, _ in changed_fields(config, self.base)]
        changed += [f"--{n}" for n, now in self.settings.items() if settings.get(n) != now]
        if changed:
            raise ConfigError(
                f"{self.folder} is another sweep: {', '.join(changed)} differ. Revert them to "
                "continue it, or give this one another --name."
            )
        for name in map(self.add, points):
            found = self.read(name)
            if found[1].name in _OVER:
                self.over[name] = found


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
        points = [{**point, _SEED: seed} for point in points for seed in seeds]
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
        causes = [state.cause for _, state in sweep.over.values() if state.cause]
        raise TaskError(
            f"all trials have failed ({[*causes, 'see above'][0]}). This sweep does not train them "
            "again: after a fix, give another --name."
        )
    return status


def _run(args: SweepArgs, sweep: Sweep, goal: str, tell: Callable[[str], None]) -> None:
    from raytrain_ddp.ray_backend.cluster import cluster, only_one
    from raytrain_ddp.ray_backend.ray_process import ray_output_to_file

    started = cluster(sweep.base, args.address, False, tell)
    with only_one(), ray_output_to_file(sweep.folder), started as layout:
        from raytrain_ddp.tools.sweep.tune_engine import run_trials  # imports Ray

        amounts, scaling = layout.per_worker, sweep.base.scaling
        # so that a run has the same threads later
        scaling = replace(scaling, use_gpu=layout.use_gpu, cpus_per_worker=amounts["CPU"])
        sweep.base = replace(sweep.base, scaling=scaling)
        run_trials(args, sweep, amounts, goal, tell)


def _conclusion(sweep: Sweep, best: Sequence[Run]) -> dict[str, str]:
    """The end of a sweep and what follows from it, as lines by their titles."""
    plain = TrainConfig()
    lines = {f"\n{sweep.base.name}": f"{len(sweep.over)} of {sweep.total} trials are over"}
    if best:
        lines["best"] = sweep.shown(best[0].name)
        if len(best) > 1 and sweep.settings["seeds"] > 1:  # optuna may repeat a point
            mean = format_metric(best[0].monitor, _mean(best))
            lines[""] = f"{mean} (mean of {len(best)} seeds)"
        config = with_point(sweep.base, sweep.points[best[0].name])
        # not those of the sweep
        config = replace(config, name=None, scaling=plain.scaling, storage=plain.storage)
        lines["train it"] = command(config)
    if len(sweep.over) < sweep.total:
        lines["continue"] = "the same command again"
    return {**lines, "report": f"raytrain report {shlex.quote(sweep.folder.address)}"}


def _mean(runs: Sequence[Run]) -> float:
    return fmean(run.value for run in runs)


def trial_config(base: TrainConfig, name: str, point: Point) -> TrainConfig:
    """The config of a trial's run, in the folder of the sweep. Raises ConfigError: see
    `with_point`."""
    storage = below(base.storage, str(base.name))
    return replace(with_point(base, point), name=name, storage=storage)
