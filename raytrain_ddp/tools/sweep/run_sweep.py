"""The driver of `sweep`: checks all configs, then starts or continues the sweep."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.paths import absolute_path, with_paths
from raytrain_ddp.config.recipe import default_name, fields_of, publishable, to_dict
from raytrain_ddp.config.rules import idle
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.driver.config_flags import command
from raytrain_ddp.driver.preflight import answered, check, try_model
from raytrain_ddp.driver.run_naming import name_by_config
from raytrain_ddp.errors import ConfigError, PreflightError, TaskError
from raytrain_ddp.process_state import process_as_found
from raytrain_ddp.signals import handling, heeded
from raytrain_ddp.tasks.task_loading import BUILT_IN, task_of
from raytrain_ddp.tools.sweep.space import (
    Dimension,
    Point,
    grid,
    parse_space,
    random_points,
    table_of,
    with_point,
)
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
from raytrain_ddp.tools.sweep.trials import OVER, SEED, Sweep, opened
from raytrain_ddp.uri import below

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs

_TRIALS = 20
# Of the recipe's fields: they may change while a sweep is continued.
_FREE = ("scaling.", "log.", "checkpoint.", "name", "storage", "settled")
_DECIDING = ("space", "seeds", "search", "scheduler", "first_rung", "factor")


def prepared(args: SweepArgs, given: Sequence[str]) -> Sweep:
    """The sweep to start or to continue, with all trials that are known by now. All configs are
    checked, and nothing is started.

    Args:
        given: the fields that the command line sets.

    Raises:
        ConfigError: a config is refused, a field has no effect in any trial, or the folder holds
            something else.
        RaytrainError: the data, the model or the task do not exist, or Optuna is not installed.
    """
    config, space = with_paths(args.config, absolute_path), parse_space(args.space)
    is_adaptive, seeds = args.search == "optuna", range(config.seed, config.seed + args.seeds)
    if is_adaptive and find_spec("optuna") is None:
        raise PreflightError("--search optuna needs Optuna: pip install 'raytrain_ddp[sweep]'.")
    drawn = random_points(space, config.seed, args.trials or _TRIALS)
    if len(drawn) < (args.trials or 0) and not is_adaptive:
        raise ConfigError(f"--trials {args.trials}: the space has only {len(drawn)} points.")
    points = grid(space) if args.search == "grid" else drawn
    _require_valid(config, space, points, given)
    settings = {n: v for n, v in fields_of(to_dict(publishable(config))) if not n.startswith(_FREE)}
    settings |= {f"--{name}": getattr(args, name) for name in _DECIDING}
    name = config.name or f"{default_name(args.recipe) or name_by_config(config)}-sweep"
    base = replace(config, name=name, scaling=replace(config.scaling, num_workers=1))
    folder, fields = open_storage(config.storage).join(name), [each.field for each in space]
    total = args.trials or _TRIALS if is_adaptive else args.seeds * len(points)
    if args.seeds > 1:
        fields, points = [*fields, SEED], [{**p, SEED: seed} for p in points for seed in seeds]
    sweep = answered(config, lambda: opened(Sweep(base, folder, space, fields, settings, total)))
    for point in [] if is_adaptive else points[len(sweep.trials) :]:
        sweep.add(point)
    return sweep


@process_as_found()
def run_sweep(args: SweepArgs, given: Sequence[str] = ()) -> int:
    """Runs the trials that are missing; returns the exit status: 0, or 128 + a signal.

    Raises:
        RunLockedError: another process runs this sweep.
        TaskError: all trials have failed.
        RaytrainError: as `prepared`; also if the trials do not fit into the cluster.
        KeyboardInterrupt: a second signal; the trials end without another checkpoint.
    """
    sweep = prepared(args, given)
    display, signals = SweepDisplay(sweep), list[int]()
    answered(sweep.base, sweep.folder.mkdir)
    with answered(sweep.base, lambda: Lease.take(sweep.folder, display.note)), display:
        try:
            if sweep.count(*OVER) < sweep.total:
                _run(args, sweep, display, signals)
        finally:
            for trial in sweep.trials:
                trial.state = trial.state if trial.is_over else "waiting"
            answered(sweep.base, sweep.save)
    display.summary(_conclusion(sweep))
    failed = [trial.message for trial in sweep.trials if trial.state == "failed"]
    if len(failed) == sweep.total:
        first = failed[0].partition("\n")[0].rstrip(".")
        raise TaskError(
            f"all {len(failed)} trials have failed; the first: {first}. This sweep does not train "
            "them again: after a fix, give another --name."
        )
    return 128 + signals[0] if signals else 0


def _run(args: SweepArgs, sweep: Sweep, display: SweepDisplay, signals: list[int]) -> None:
    from raytrain_ddp.ray_backend.cluster import cluster, live_node_resources, only_one
    from raytrain_ddp.ray_backend.placement import workers_that_fit
    from raytrain_ddp.ray_backend.ray_output import ray_output_to_file
    from raytrain_ddp.ray_backend.ray_settings import applied_settings

    def note(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1 and {*signals} != {1}:  # a closed terminal sends several SIGHUP
            raise KeyboardInterrupt(number)

    with (
        only_one(),
        ray_output_to_file(sweep.folder),
        cluster(sweep.base, args.address, args.dashboard, display.phase) as layout,
    ):
        from raytrain_ddp.tools.sweep.tune_engine import TUNE_SETTINGS, run_trials  # imports Ray

        cpus = layout.per_worker["CPU"]  # so that a run has the same threads later
        scaling = replace(sweep.base.scaling, use_gpu=layout.use_gpu, cpus_per_worker=cpus)
        sweep.base = replace(sweep.base, scaling=scaling)
        parallel = args.parallel or max(1, workers_that_fit(layout, live_node_resources()))
        with applied_settings(TUNE_SETTINGS), handling(heeded(), note):
            run_trials(args, sweep, layout, parallel, display, signals)


def _conclusion(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """What follows from the sweep, as lines of (title, text)."""
    place, plain = sweep.folder.address, TrainConfig()
    for best in sweep.ranked()[:1]:
        config = replace(with_point(sweep.base, best.values), name=None)
        config = replace(config, scaling=plain.scaling, storage=plain.storage)
        yield "best run", below(place, best.name)
        yield "train it", command(config)  # independent of the sweep
        if best.state == "stopped" and "://" not in place:
            begun = shlex.quote(f"{place}/{best.name}/config.toml")
            yield "train it further", f"python -m raytrain_ddp.fit {begun}"
    if sweep.count(*OVER) < sweep.total:
        yield "continue", "the same command again"
    yield "report", f"raytrain report {shlex.quote(place)}"


def _require_valid(
    base: TrainConfig, space: Sequence[Dimension], points: Sequence[Point], given: Sequence[str]
) -> None:
    """Checks the configs of these points, of which an adaptive search may have others."""
    refusals, configs = [], []
    for point in points:
        try:
            configs.append(with_point(base, point))
        except ConfigError as error:
            values = ", ".join(f"{name} = {value}" for name, value in point.items())
            refusals.append(f"{values}: {error}")
    if refusals:
        lines = "\n  ".join([*refusals[:5], "..."][: len(refusals)])
        raise ConfigError(f"{len(refusals)} of {len(points)} points are refused:\n  {lines}")
    possible = [idle(config) for config in configs]
    for point in random_points(space, 0, 100):  # what these points do not have, others may
        with suppress(ConfigError):
            possible.append(idle(with_point(base, point)))
    for name in [*given, *(each.field for each in space)]:
        if all(table_of(name) in each for each in possible):
            needs = possible[0][table_of(name)]
            raise ConfigError(f"{name} has no effect in any trial: it needs {needs}. Remove it.")
    differing = {repr((c.data, c.model, c.optim, c.loss.name, c.task_options)): c for c in configs}
    for config in differing.values():
        checked = check(config)
        if config.task not in BUILT_IN:
            task_of(checked)
            continue
        try_model(checked, is_new=True)
        if not config.data.holdout and locate(config.data).eval is None:
            raise ConfigError(
                "no trial would be evaluated, so none could be the best: set --data.holdout 0.1 "
                "to hold out a part of the training set, or set --data.eval-source."
            )
