"""The driver of `sweep`: resumes or starts the sweep of this command, and runs its trials."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, EVENTS_FILE
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.paths import absolute_path, with_paths
from raytrain_ddp.config.recipe import publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.driver.branching import OF_STATE
from raytrain_ddp.driver.config_flags import command
from raytrain_ddp.driver.preflight import answered
from raytrain_ddp.errors import ConfigError, PreflightError, RunLockedError, TaskError
from raytrain_ddp.process_state import process_as_found
from raytrain_ddp.tasks.task_loading import BUILT_IN
from raytrain_ddp.tools.sweep.conductor import Conductor
from raytrain_ddp.tools.sweep.optuna_search import require_optuna
from raytrain_ddp.tools.sweep.space import field_of, with_point
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
from raytrain_ddp.tools.sweep.sweep_state import Settings, Sweep, Trial, differences, load_sweep
from raytrain_ddp.tools.sweep.trial_configs import known_points, require_valid
from raytrain_ddp.uri import below


@dataclass(frozen=True)
class SweepOrder:
    """A sweep to run.

    Args:
        base: the recipe with its flags; `name` and `storage` are those of the sweep.
        settings: what decides its trials. given: the fields that the command line sets.
        parallel: trials at the same time; 0: as many as fit.
    """

    base: TrainConfig
    settings: Settings
    given: Sequence[str] = ()
    parallel: int = 0
    address: str | None = None
    dashboard: bool = False


def settings_of(base: TrainConfig, **values: object) -> Settings:
    """The settings of a sweep of this recipe."""
    config = to_dict(publishable(replace(base, name=None)))
    return Settings(config=config, **values)  # type: ignore[arg-type]


def checked(order: SweepOrder) -> SweepOrder:
    """The order with its storage absolute and all configs checked. Nothing is started.

    Raises:
        RaytrainError: see `require_valid`; also if Optuna is wanted and not installed.
    """
    base = with_paths(order.base, absolute_path)
    if order.settings.search == "optuna":
        require_optuna()
    fixed = [each.field for each in order.settings.space if field_of(each.field) in OF_STATE]
    if order.settings.scheduler == "pbt" and fixed:
        raise ConfigError(
            f"--scheduler pbt: {', '.join(fixed)} cannot change during training, because the "
            "state depends on it: remove it from --space."
        )
    points = known_points(order.settings, base.seed)
    require_valid(base, order.settings.space, points, order.given)
    data = base.data
    varies = any(each.field.startswith("data.") for each in order.settings.space)
    if base.task in BUILT_IN and not varies and not data.holdout and locate(data).eval is None:
        raise ConfigError(
            "no trial would be evaluated, so none could be the best: set --data.holdout 0.1 to "
            "hold out a part of the training set, or set --data.eval-source."
        )
    return replace(order, base=base)


@process_as_found()
def run_sweep(order: SweepOrder, display: SweepDisplay) -> int:
    """Runs the trials that are missing; returns the exit status: 0, or 128 + a signal.

    Raises:
        ConfigError: the folder holds another sweep, or a run; also as `checked`.
        RunLockedError: another process runs this sweep.
        TaskError: all trials have failed.
    """
    order, folder, sweep = prepared(order)
    with ExitStack() as stack:
        stack.enter_context(_lease(order.base, folder, display))
        stack.enter_context(display)
        conductor = Conductor(sweep, order.base, folder, display.ended)
        conductor.take_up()
        display.begin(str(order.base.name), conductor)
        if not conductor.is_over:
            _run(order, folder, conductor, display)
    display.summary(sweep, conclusion(order, folder, sweep))
    failed = [trial for trial in sweep.trials if trial.status == "failed"]
    if failed and len(failed) == len(sweep.trials):
        first = failed[0].message.partition("\n")[0].rstrip(".")
        raise TaskError(
            f"all {len(failed)} trials have failed; the first: {first}. This sweep does not train "
            "them again: after a fix, give another --name."
        )
    return 128 + conductor.stopping if conductor.stopping else 0


def prepared(order: SweepOrder) -> tuple[SweepOrder, Storage, Sweep]:
    """The `checked` order, the folder, and the sweep that is `found` there, or a new one."""
    order = checked(order)
    folder = open_storage(order.base.storage).join(str(order.base.name))
    sweep = answered(order.base, lambda: found(folder, order.settings))
    return order, folder, sweep or Sweep(order.settings)


def found(folder: Storage, settings: Settings) -> Sweep | None:
    """The sweep in a folder, with as many trials as are wanted now; None if there is none, or
    another of which no trial has begun.

    Raises:
        ConfigError: it is another sweep, or a run.
    """
    sweep = load_sweep(folder)
    if sweep is None:
        if any(folder.exists(name) for name in (CONFIG_FILE, EVENTS_FILE)):
            raise ConfigError(f"{folder} is a run: give the sweep another --name.")
        return None
    changed = differences(sweep.settings, settings)
    if changed and not any(trial.starts for trial in sweep.trials):
        return None  # it could not start; nothing of it is lost
    if changed:
        raise ConfigError(
            f"{folder} contains a different sweep (then -> now):\n  " + "\n  ".join(changed) + "\n"
            "Revert these changes to continue it, or give this one another --name."
        )
    sweep.settings = settings
    return sweep


def conclusion(order: SweepOrder, folder: Storage, sweep: Sweep) -> list[tuple[str, str]]:
    """What follows from the sweep, as lines of (title, text)."""
    rows, place = [], folder.address
    for best in sweep.ranked()[:1]:
        deleted = is_deleted(folder, best)
        rows.append(("best run", below(place, best.name) + " (deleted)" * deleted))
        if best.origin:  # its values were others before
            rows.append(("it began as", best.history))
        else:
            rows.append(("train it", best_command(order.base, best)))
        if best.status == "stopped" and "://" not in place and not deleted:
            begun = shlex.quote(f"{place}/{best.name}/config.toml")
            rows.append(("train it further", f"python -m raytrain_ddp.fit {begun}"))
    if sweep.count("waiting", "running", "paused") or sweep.missing > 0:
        rows.append(("continue", "the same command again"))
    rows.append(("report", f"raytrain report {shlex.quote(place)}"))
    rows.append(("all runs", f"raytrain watch {shlex.quote(place)}"))
    return rows


def is_deleted(folder: Storage, trial: Trial) -> bool:
    """Whether somebody has deleted the run of a trial that was evaluated; a store is not asked."""
    return folder.is_local and not folder.join(trial.name).exists(CONFIG_FILE)


def best_command(base: TrainConfig, trial: Trial) -> str:
    """The command that trains with the values of a trial, independent of the sweep."""
    config = replace(with_point(base, trial.point), seed=trial.seed, name=None)
    return command(replace(config, scaling=TrainConfig().scaling, storage=TrainConfig().storage))


def _lease(base: TrainConfig, folder: Storage, display: SweepDisplay) -> Lease:
    def tell(text: str) -> None:
        display.note(_of_sweep(text))

    try:
        return answered(base, lambda: Lease.take(folder, tell))
    except RunLockedError as error:
        raise RunLockedError(_of_sweep(str(error))) from None


def _of_sweep(text: str) -> str:
    """A message of the lease, which is the same as a run's."""
    return text.replace("Run ", "Sweep ", 1).replace("this run", "this sweep")


def _run(order: SweepOrder, folder: Storage, conductor: Conductor, display: SweepDisplay) -> None:
    from raytrain_ddp.ray_backend.cluster import cluster, live_node_resources, only_one
    from raytrain_ddp.ray_backend.placement import workers_that_fit
    from raytrain_ddp.ray_backend.ray_output import ray_output_to_file

    with (
        _of_trials(),
        only_one(),
        ray_output_to_file(folder),
        cluster(order.base, order.address, order.dashboard, display.phase) as layout,
    ):
        from raytrain_ddp.tools.sweep.tune_engine import run_trials  # imports Ray

        nodes = live_node_resources()
        parallel = order.parallel or max(1, workers_that_fit(layout, nodes))
        scaling = replace(
            order.base.scaling,
            use_gpu=layout.use_gpu,
            cpus_per_worker=layout.per_worker["CPU"],  # so that a run has the same threads later
        )
        conductor.base = replace(order.base, scaling=scaling)
        display.running(parallel)
        try:
            run_trials(conductor, layout.per_worker, parallel)
        finally:
            conductor.release()


@contextmanager
def _of_trials() -> Iterator[None]:
    """Says what does not fit into the cluster in terms of this command's flags."""
    try:
        yield
    except PreflightError as error:
        head, *rest = str(error).split("\n")
        if " do not fit on " not in head or not rest:
            raise
        place = head.partition(" do not fit on ")[2]
        lines = [f"a trial does not fit on {place}", *rest[:-1]]
        remedy = "Ask for less with --per-trial cpus=N gpus=N."
        raise PreflightError("\n".join([*lines, remedy])) from None
