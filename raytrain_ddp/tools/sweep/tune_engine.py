"""Ray Tune runs the trials of a sweep; the only file of this package that imports Ray.

Tune places a trial where its resources are free, keeps its process for the next one, and starts
another when it died. Its own state stays in a temporary folder: a sweep continues with sweep.json
and the logs of its runs. Tuner.restore would lose the scheduler's state, unpickle files of the
storage, and allow neither more trials nor other resources.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.trainable import wrap_function

from raytrain_ddp.checkpoint.lease import holder
from raytrain_ddp.checkpoint.run_folder import read_log
from raytrain_ddp.driver.preflight import answered
from raytrain_ddp.events import Eval
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.ray_settings import applied_settings
from raytrain_ddp.ray_backend.worker import require_folder
from raytrain_ddp.ray_backend.worker_process import end_with_raylet, enter_folder
from raytrain_ddp.tools.sweep.space import parse_space
from raytrain_ddp.tools.sweep.trial_run import evaluated, train_trial
from raytrain_ddp.tools.sweep.trials import OVER, Sweep, Trial

if TYPE_CHECKING:
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs
    from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay

_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs have their own logs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # see Interrupted
}
_STOP_S = "60"  # for the checkpoint of a trial, before its process trains another
_training: list[threading.Thread] = []  # in the process of a trial
_STARTS = 3  # of a trial whose process dies, or whose code raises


class Interrupted(Exception):
    """A signal stops the sweep."""


class Follower(tune.Callback):  # type: ignore[misc]
    """Writes what Tune says into sweep.json, and shows it."""

    def __init__(self, sweep: Sweep, display: SweepDisplay, signals: list[int]) -> None:
        self._sweep, self._display, self._signals, self._is_saved = sweep, display, signals, True

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune wants to pickle it, for a restoration

    def __deepcopy__(self, _: object) -> Follower:
        return self

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        self._sweep.metric = result.get("metric", self._sweep.metric)
        self._sweep.mode = result.get("mode", self._sweep.mode)
        self._set(trial, result)

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        self._set(trial, {"state": "stopped"})

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        last = str(trial.get_error() or "its process died").strip().splitlines()[-1]
        self._set(trial, {"state": "failed", "message": f"{_STARTS} times: {last}"})

    def on_step_end(self, **_: Any) -> None:
        """Called at least ten times a second, outside of what Tune catches."""
        if self._signals:
            raise Interrupted
        self._save()

    def on_experiment_end(self, **_: Any) -> None:
        for trial in self._sweep.of("running"):
            trial.state, self._is_saved = "waiting", False
        self._save()

    def _save(self) -> None:
        if not self._is_saved:
            answered(self._sweep.base, self._sweep.save)
            self._is_saved = True

    def _set(self, trial: Any, result: dict[str, Any]) -> None:
        own = self._sweep.trials[int(trial.config["trial"]["name"].rpartition("-")[2])]
        known = {name: value for name, value in result.items() if name in vars(own)}
        if own.state not in OVER and not known.items() <= vars(own).items():
            vars(own).update(known)
            self._is_saved = False
            if own.state in OVER:
                self._display.ended(own)


def run_trials(
    args: SweepArgs,
    sweep: Sweep,
    amounts: Mapping[str, float],
    display: SweepDisplay,
    signals: list[int],
) -> None:
    """Runs the trials that are missing on the Ray that this process is connected to, until none is
    left, or `signals` has one.

    Args:
        amounts: of each resource of Ray that a trial takes.
    """
    base, lease, place = (
        sweep.base,
        holder(sweep.folder),
        (str(Path.cwd()), import_paths(sweep.base)),
    )

    def train(config: dict[str, Any]) -> dict[str, Any]:
        end_with_raylet()
        enter_folder(*place)
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = _STOP_S
        _training[:] = [threading.current_thread()]
        require_folder(base, lease)
        trial = Trial(**config["trial"])
        return train_trial(base, trial.name, trial.values, tune.report)

    class TrialRun(wrap_function(train)):  # type: ignore[misc]
        def cleanup(self) -> None:
            super().cleanup()
            for thread in _training:  # Tune would not wait for the checkpoint
                thread.join()

    begun = sweep.of("waiting", "running")
    space: dict[str, Any] = {"trial": tune.grid_search([*map(asdict, begun)])}
    search: dict[str, Any] = {}
    if args.search == "optuna":
        number = len(begun) + sweep.total - len(sweep.trials)
        space, search = {}, {"search_alg": _optuna(args, sweep, begun), "num_samples": number}
    with (
        applied_settings(_SETTINGS),
        tempfile.TemporaryDirectory(prefix="raytrain-sweep-") as folder,
        suppress(Interrupted),
    ):
        tune.Tuner(
            tune.with_resources(TrialRun, {name.lower(): each for name, each in amounts.items()}),
            param_space=space,
            tune_config=tune.TuneConfig(
                scheduler=_asha(args, sweep) if args.scheduler == "asha" else None,
                max_concurrent_trials=args.parallel or None,
                reuse_actors=True,  # torch is loaded once
                **search,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                verbose=0,
                callbacks=[Follower(sweep, display, signals)],
                failure_config=tune.FailureConfig(max_failures=_STARTS - 1),
            ),
        ).fit()


def _asha(args: SweepArgs, sweep: Sweep) -> ASHAScheduler:
    """Tune's scheduler, which has heard of the trials that are over."""
    scheduler = ASHAScheduler(
        time_attr="epochs",
        metric="score",
        mode="max",
        grace_period=args.first_rung,
        max_t=max(args.first_rung, sweep.base.epochs - 1),  # at the end, a trial is not stopped
        reduction_factor=3,
        stop_last_trials=False,
    )
    for trial in sweep.of(*OVER):
        log, known = read_log(sweep.folder.join(trial.name)), SimpleNamespace(trial_id=trial.name)
        evals = [record for record in log if isinstance(record, Eval)]
        scheduler.on_trial_add(None, known)
        for count in range(len(evals)):
            scheduler.on_trial_result(None, known, evaluated(evals[: count + 1], sweep.mode))
    return scheduler


def _optuna(args: SweepArgs, sweep: Sweep, begun: list[Trial]) -> Any:
    """Tune's search by Optuna, which has heard of the trials that are over: first the points of
    `begun`, then new ones."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    space, waiting = parse_space(args.space), [*begun]

    class Search(OptunaSearch):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> dict[str, Any]:
            found = super().suggest(trial_id)
            values = {each.field: each.tidy(found[each.field]) for each in space}
            return {"trial": asdict(waiting.pop(0) if waiting else sweep.add(values))}

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = Search(
        space={each.field: each.distribution() for each in space},
        metric="score",
        mode="max",
        sampler=optuna.samplers.TPESampler(
            seed=sweep.base.seed + len(sweep.trials), constant_liar=True
        ),
        points_to_evaluate=[trial.values for trial in begun] or None,
    )
    for trial in sweep.of(*OVER):
        if trial.value is not None:
            search.add_evaluated_point(trial.values, sweep.score(trial))
    return search
