"""The driver of `sweep`: checks all configs, then starts or continues the sweep."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.paths import absolute_path, with_paths
from raytrain_ddp.config.recipe import default_name
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
from raytrain_ddp.tools.sweep.space import Point, grid, parse_space, random_points, with_point
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
from raytrain_ddp.tools.sweep.trials import OVER, SEED, Sweep

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs

_TRIALS = 20


def prepared(args: SweepArgs) -> Sweep:
    """The sweep to start or to continue, with all trials that are known by now. All configs are
    checked, and nothing is started.

    Raises:
        ConfigError: a config is refused, or the folder holds something else.
        RaytrainError: the data, the model or the task do not exist, or Optuna is not installed.
    """
    config, space = with_paths(args.config, absolute_path), parse_space(args.space)
    is_adaptive, count = args.search == "optuna", args.trials or _TRIALS
    if is_adaptive and find_spec("optuna") is None:
        raise PreflightError("--search optuna needs Optuna: pip install 'raytrain_ddp[sweep]'.")
    is_grid = args.search == "grid"
    points = grid(space)[: args.trials] if is_grid else random_points(space, config.seed, count)
    _require_valid([with_point(config, point) for point in points], points[0])
    name = config.name or f"{default_name(args.recipe) or name_by_config(config)}-sweep"
    base = replace(config, name=name, scaling=replace(config.scaling, num_workers=1))
    settings = {"space": [*args.space], "search": args.search, "seeds": args.seeds}
    settings |= {"epochs": config.epochs, "steps": config.steps}  # a run may change these
    sweep = Sweep(base, open_storage(config.storage).join(name), settings)
    answered(config, sweep.load)
    if args.seeds > 1:
        seeds = range(config.seed, config.seed + args.seeds)
        points = [{**point, SEED: seed} for point in points for seed in seeds]
    for point in [] if is_adaptive else points[len(sweep.trials) :]:
        sweep.add(point)
    sweep.total = max(len(sweep.trials), count * is_adaptive)
    return sweep


@process_as_found()
def run_sweep(args: SweepArgs) -> int:
    """Runs the trials that are missing; returns the exit status: 0, or 128 + a signal.

    Raises:
        RunLockedError: another process runs this sweep.
        TaskError: all trials have failed.
        RaytrainError: as `prepared`; also if the trials do not fit into the cluster.
        KeyboardInterrupt: a second signal; the trials end without another checkpoint.
    """
    sweep, signals = prepared(args), list[int]()
    display = SweepDisplay(sweep)
    answered(sweep.base, sweep.folder.mkdir)
    with answered(sweep.base, lambda: Lease.take(sweep.folder, display.note)), display:
        if len(sweep.of(*OVER)) < sweep.total:
            _run(args, sweep, display, signals)
    display.summary(_conclusion(sweep))
    failed = sweep.of("failed")
    if len(failed) == sweep.total:
        raise TaskError(
            f"all trials have failed, the first by: {failed[0].message}\n"
            "This sweep does not train them again: after a fix, give another --name."
        )
    return 128 + signals[0] if signals else 0


def _run(args: SweepArgs, sweep: Sweep, display: SweepDisplay, signals: list[int]) -> None:
    from raytrain_ddp.ray_backend.cluster import cluster, only_one
    from raytrain_ddp.ray_backend.ray_output import ray_output_to_file

    def note(number: int, _: object) -> None:
        if signals and number != signal.SIGHUP:  # a closed terminal sends several
            raise KeyboardInterrupt(number)
        signals.append(number)

    with (
        only_one(),
        ray_output_to_file(sweep.folder),
        cluster(sweep.base, args.address, False, display.note) as layout,
    ):
        from raytrain_ddp.tools.sweep.tune_engine import run_trials  # imports Ray

        cpus = layout.per_worker["CPU"]  # so that a run has the same threads later
        scaling = replace(sweep.base.scaling, use_gpu=layout.use_gpu, cpus_per_worker=cpus)
        sweep.base = replace(sweep.base, scaling=scaling)
        with handling(heeded(), note):
            run_trials(args, sweep, layout.per_worker, display, signals)


def _conclusion(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """What follows from the sweep, as lines of (title, text)."""
    plain = TrainConfig()
    for best in sweep.ranked()[:1]:  # independent of the sweep
        config = replace(with_point(sweep.base, best.values), name=None)
        yield "train it", command(replace(config, scaling=plain.scaling, storage=plain.storage))
    if len(sweep.of(*OVER)) < sweep.total:
        yield "continue", "the same command again"
    yield "report", f"raytrain report {shlex.quote(sweep.folder.address)}"


def _require_valid(configs: Sequence[TrainConfig], fields: Point) -> None:
    """Checks the configs of the points, of which an adaptive search may have others; each of the
    fields must have an effect in one of them."""
    for name, needs in idle(configs[0]).items():
        varies = any(f"{field}.".startswith(f"{name}.") for field in fields)
        if varies and all(name in idle(config) for config in configs):
            raise ConfigError(f"--space {name} has no effect in any trial: it needs {needs}.")
    differing = {repr((c.data, c.model, c.optim, c.loss.name, c.task_options)): c for c in configs}
    for config in map(check, differing.values()):
        if config.task not in BUILT_IN:
            task_of(config)
            continue
        try_model(config, is_new=True)
        if not config.data.holdout and locate(config.data).eval is None:
            raise ConfigError("without evaluations no trial is the best: set --data.holdout 0.1.")
