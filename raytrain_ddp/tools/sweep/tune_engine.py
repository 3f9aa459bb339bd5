"""Ray Tune runs the trials of a sweep; the only file of this package that imports Ray.

Tune places a trial where its resources are free, keeps its process for the next one, and starts
another when it died. Its own state stays in a temporary folder: a sweep continues with its runs.
Tuner.restore would lose the scheduler's state and the last seconds of the search, unpickle files of
the storage, and allow neither more trials nor other resources.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.trainable import wrap_function

from raytrain_ddp.checkpoint.lease import holder
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit
from raytrain_ddp.driver.preflight import answered
from raytrain_ddp.errors import ConfigError, DataError, DivergedError, RunLockedError, first_line
from raytrain_ddp.events import Eval, Event, SweepStop
from raytrain_ddp.ray_backend.ray_start import applied_settings
from raytrain_ddp.ray_backend.task_transfer import import_paths
from raytrain_ddp.ray_backend.worker import end_with_raylet, enter_folder, require_folder
from raytrain_ddp.tools.sweep.space import parse_space, tidy
from raytrain_ddp.tools.sweep.trials import Sweep, trial_config
from raytrain_ddp.training.membership import Membership

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs

Result = dict[str, Any]

_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs have their own logs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the trials go on from their newest checkpoints
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # there may be no value
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",  # for the checkpoint of a trial that is stopped
}
_STARTS = 3  # of a trial whose process dies, or whose code raises
# Of a driver that was killed, the trials may live on for a moment; a lease runs out after a minute.
_LOCKED_S = 90
_training: list[threading.Thread] = []  # in the process of a trial


def run_trials(
    args: SweepArgs,
    sweep: Sweep,
    amounts: Mapping[str, float],
    goal: str,
    tell: Callable[[str], None],
) -> None:
    """Runs the trials that are missing on the Ray that this process is connected to.

    Args:
        amounts: the amount of each of Ray's resources that a trial takes.
        goal: "max" or "min": the direction of the task's metric.
        tell: takes a line for each trial that is over.
    """
    base, lease = sweep.base, holder(sweep.folder)
    place = str(Path.cwd()), import_paths(base)

    def train(config: Result) -> Result:
        end_with_raylet()
        enter_folder(*place)
        os.environ.update(_SETTINGS)
        _training[:] = [threading.current_thread()]
        require_folder(base, lease)
        return train_trial(lambda: trial_config(base, **config["trial"]), tune.report)

    class TrialRun(wrap_function(train)):  # type: ignore[misc]
        def cleanup(self) -> None:
            super().cleanup()
            for thread in _training:  # Tune would not wait for the checkpoint
                thread.join()

    class Follower(tune.Callback):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            return tune.Callback, ()  # Tune wants to pickle it, for a restoration

        def on_trial_complete(self, trial: Any, **_: Any) -> None:
            tell(sweep.end(trial.config["trial"]["name"], trial.last_result.get("cause", "")))

        def on_trial_error(self, trial: Any, **_: Any) -> None:
            cause = str(trial.get_error()).strip().rpartition("\n")[2]
            tell(sweep.end(trial.config["trial"]["name"], cause))

    answered(base, sweep.save)
    search = _optuna(args, sweep, goal) if args.search == "optuna" else None
    with applied_settings(_SETTINGS), tempfile.TemporaryDirectory() as own:
        tune.Tuner(
            tune.with_resources(TrialRun, {name.lower(): each for name, each in amounts.items()}),
            param_space={} if search else {"trial": tune.grid_search(sweep.waiting())},
            tune_config=tune.TuneConfig(
                scheduler=_asha(args, sweep, goal) if args.asha else None,
                max_concurrent_trials=args.parallel,
                reuse_actors=True,  # torch is loaded once
                search_alg=search,
                num_samples=sweep.total - len(sweep.over) if search else 1,
            ),
            run_config=tune.RunConfig(
                storage_path=own,
                verbose=0,
                callbacks=[Follower()],
                failure_config=tune.FailureConfig(max_failures=_STARTS - 1),
            ),
        ).fit()


def _asha(args: SweepArgs, sweep: Sweep, goal: str) -> ASHAScheduler:
    """Tune's scheduler, which has heard of the trials that are over."""
    scheduler = ASHAScheduler(
        time_attr="epochs",
        metric="value",
        mode=goal,
        grace_period=args.asha,
        max_t=max(args.asha, sweep.base.epochs - 1),  # at the end, a trial is not stopped
        reduction_factor=3,
        stop_last_trials=False,
    )
    for run, _ in sweep.over.values():
        known = SimpleNamespace(trial_id=run.name)
        scheduler.on_trial_add(None, known)
        for each in run.evals:
            scheduler.on_trial_result(None, known, _reached(each))
    return scheduler


def _optuna(args: SweepArgs, sweep: Sweep, goal: str) -> Any:
    """Tune's search by Optuna, which has heard of the trials that are over: first the points of
    those that wait, then new ones."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    begun = sweep.waiting()

    class Search(OptunaSearch):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> Result:
            point = {name: tidy(value) for name, value in super().suggest(trial_id).items()}
            trial = begun.pop(0) if begun else {"name": sweep.add(point), "point": point}
            answered(sweep.base, sweep.save)  # before its run begins
            return {"trial": trial}

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seed = sweep.base.seed + len(sweep.points)
    search = Search(
        space={d.field: getattr(tune, d.kind)(*d.values) for d in parse_space(args.space)},
        metric="value",
        mode=goal,
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        points_to_evaluate=[trial["point"] for trial in begun] or None,
    )
    for name, (run, _) in sweep.over.items():
        if run.best:
            search.add_evaluated_point(sweep.points[name], run.value)
    return search


def train_trial(config: Callable[[], TrainConfig], report: Callable[[Result], None]) -> Result:
    """Trains the run of a trial to its end; resumes it if it exists.

    Args:
        report: takes what each evaluation has reached; raises SystemExit to stop the run.

    Returns:
        The best "value", or the "cause" of a failure that would come again.

    Raises:
        SystemExit: it was stopped, and has a checkpoint. Others: errors that may not come again.
    """
    until_s = time.monotonic() + _LOCKED_S
    while True:
        try:
            end = fit(config(), local=True, membership=partial(TrialMembership, report))
            break
        except (ConfigError, DataError, DivergedError) as error:
            return {"cause": first_line(error)}
        except RunLockedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(1)
    if end.status == "interrupted":
        raise SystemExit(0)
    return {"value": end.best.get(end.monitor)}


def _reached(record: Eval) -> Result:
    """What Tune hears of an evaluation."""
    return {"epochs": record.epoch + 1, "value": record.metrics.get(record.monitor, math.nan)}


class TrialMembership(Membership):
    """Reports as `train_trial` says."""

    def __init__(self, report: Callable[[Result], None], *args: Any) -> None:
        super().__init__(*args)
        self._report = report

    def show(self, event: Event) -> None:
        super().show(event)
        try:
            if isinstance(event, Eval) and not self._signal:
                self._report(_reached(event))
        except SystemExit:
            self._reported, self._signal = True, signal.SIGTERM
            self.show(SweepStop())
