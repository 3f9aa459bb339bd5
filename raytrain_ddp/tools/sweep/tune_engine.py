"""Ray Tune runs the trials of a sweep; the only file of this package that imports Ray.

Tune places a trial where its resources are free, keeps its process for the next one, and starts
another when it died. Its own state stays in a temporary folder: a sweep continues with sweep.json
and the evaluations in its runs. Tuner.restore would lose the scheduler's state, unpickle files of
the storage, and allow neither more trials nor other resources.
"""

from __future__ import annotations

import queue
import socket
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from raytrain_ddp.checkpoint.lease import holder, is_seen
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import answered
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.worker_process import end_with_raylet, enter_folder
from raytrain_ddp.tools.sweep.space import Dimension
from raytrain_ddp.tools.sweep.trial_session import train_trial
from raytrain_ddp.tools.sweep.trials import Sweep, Trial, trial_config

if TYPE_CHECKING:
    from raytrain_ddp.ray_backend.placement import Layout
    from raytrain_ddp.tools.sweep.__main__ import SweepArgs

TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs have their own logs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # see Interrupted
}
_STARTS = 3  # of a trial whose process dies, or whose code raises
_BEAT_S = 0.5  # a process can be stopped at least this often
_WORST = -1e30  # a score that is finite: Tune computes percentiles


class Interrupted(Exception):
    """A signal stops the sweep."""


@dataclass(frozen=True)
class Order:
    """What a process on any node needs to train trials.

    Args:
        base: the recipe; `name` and `storage` are those of the sweep, whose lease is `lease`.
        folder: the current one. paths: from which the user's task and model are imported.
        over: the trials that ended in an earlier start; they are only reported again.
    """

    base: TrainConfig
    space: Sequence[Dimension]
    lease: str
    folder: str
    paths: Sequence[str]
    over: frozenset[str]


class TrialRun(tune.Trainable):  # type: ignore[misc]
    """A trial, as Ray Tune knows it: the run trains in a thread, which waits after each evaluation
    for Tune's decision. When Tune stops it, it commits a checkpoint."""

    def setup(self, config: dict[str, Any], order: Order) -> None:
        _end_with_raylet()
        enter_folder(order.folder, order.paths)
        self._order = order
        self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._last: dict[str, Any] = {"score": _WORST, "epochs": 0, "state": "running"}
        self._said: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()
        self._go, self._stop, self._waits = threading.Semaphore(0), threading.Event(), False
        trial = Trial(self.trial_name, _values(config, self._order.space))
        self._thread = threading.Thread(target=self._train, args=(trial,), name="run", daemon=True)
        self._thread.start()

    def _train(self, trial: Trial) -> None:
        def tell(evaluated: dict[str, Any]) -> None:
            self._said.put(evaluated)
            self._go.acquire()

        order = self._order
        try:
            config = trial_config(order.base, trial)
            is_local, folder = "://" not in config.storage, open_storage(config.storage)
            if is_local and not is_seen(folder, order.lease):
                raise PreflightError(f"{socket.gethostname()} does not see {folder}")
            self._said.put(train_trial(config, tell, self._stop, trial.name in order.over))
        except BaseException as error:
            self._said.put(error)

    def step(self) -> dict[str, Any]:
        if self._waits:
            self._go.release()
        self._waits = False
        with suppress(queue.Empty):
            said = self._said.get(timeout=_BEAT_S)
            if isinstance(said, BaseException):
                raise said
            self._waits = "score" in said
            if self._waits and not said["score"] >= self._last["score"]:  # nan, or worse
                said = {"epochs": said["epochs"]}
            self._last |= said
        return dict(self._last)

    def cleanup(self) -> None:
        self._stop.set()
        self._go.release()
        self._thread.join()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True


class Follower(tune.Callback):  # type: ignore[misc]
    """Writes what Tune says into sweep.json, and shows it.

    Args:
        names: of the trials that Tune makes first; the others are new.
    """

    def __init__(self, sweep: Sweep, names: list[str], display: Any, signals: list[int]) -> None:
        self._sweep, self._names, self._display, self._signals = sweep, names, display, signals
        self._is_saved = True

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune wants to pickle it, for a restoration

    def __deepcopy__(self, _: object) -> Follower:
        return self

    def name(self, trial: Any) -> str:
        """Called for each trial of Tune, in their order."""
        if self._names:
            return self._names.pop(0)
        self._is_saved = False
        return self._sweep.add(_values(trial.config, self._sweep.space)).name

    def on_trial_result(self, **of: Any) -> None:
        result = of["result"]
        if "value" in result:
            self._sweep.metric, self._sweep.mode = result["metric"], result["mode"]
        names = ("value", "epochs", "message", "state")
        self._set(of["trial"], {name: result[name] for name in names if name in result})

    def on_trial_complete(self, **of: Any) -> None:
        self._set(of["trial"], {"state": "stopped"})

    def on_trial_error(self, **of: Any) -> None:
        last = str(of["trial"].get_error() or "its process died").strip().splitlines()[-1]
        self._set(of["trial"], {"message": f"{_STARTS} times: {last}", "state": "failed"})

    def on_step_end(self, **_: Any) -> None:
        """Called at least ten times a second, outside of what Tune catches."""
        if not self._is_saved:
            answered(self._sweep.base, self._sweep.save)
            self._is_saved = True
        if self._signals:
            raise Interrupted

    def _set(self, trial: Any, fields: Mapping[str, Any]) -> None:
        own = self._sweep.named(str(trial))
        if not own.is_over and vars(own) != {**vars(own), **fields}:
            vars(own).update(fields)
            self._is_saved = False
            if own.is_over:
                self._display.ended(own)


def run_trials(
    args: SweepArgs, sweep: Sweep, layout: Layout, parallel: int, display: Any, signals: list[int]
) -> None:
    """Runs the trials that are missing on the Ray that this process is connected to, until none is
    left, or `signals` has one. A trial has the resources of a worker of `layout`."""
    # The scheduler hears again of trials that are over: they are what others are compared with.
    is_told = {t.name: args.scheduler == "asha" and t.value is not None for t in sweep.trials}
    begun = [trial for trial in sweep.trials if not trial.is_over or is_told[trial.name]]
    over = frozenset(trial.name for trial in begun if trial.is_over)
    here = (holder(sweep.folder), str(Path.cwd()), import_paths(sweep.base))
    order = Order(sweep.base, sweep.space, *here, over)
    follower = Follower(sweep, [trial.name for trial in begun], display, signals)
    space: Any = {"values": tune.grid_search([trial.values for trial in begun])}
    search: dict[str, Any] = {}
    if args.search == "optuna":
        number = len(begun) + sweep.total - len(sweep.trials)
        space, search = {}, {"search_alg": _optuna(sweep, begun), "num_samples": number}
    scheduler = ASHAScheduler(
        time_attr="epochs",
        grace_period=args.first_rung,
        max_t=max(args.first_rung, sweep.base.epochs - 1),  # at the end, a trial is not stopped
        reduction_factor=args.factor,
        stop_last_trials=False,
    )
    amounts = {name.lower(): amount for name, amount in layout.per_worker.items()}
    with tempfile.TemporaryDirectory(prefix="raytrain-sweep-") as folder, suppress(Interrupted):
        tune.Tuner(
            tune.with_resources(tune.with_parameters(TrialRun, order=order), amounts),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                scheduler=scheduler if args.scheduler == "asha" else None,
                max_concurrent_trials=parallel,
                reuse_actors=True,  # torch is loaded once
                trial_name_creator=follower.name,
                **search,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                name="tune",
                verbose=0,
                callbacks=[follower],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=_STARTS - 1),
            ),
        ).fit()


def _values(config: Mapping[str, Any], space: Sequence[Dimension]) -> dict[str, Any]:
    """The values of a trial by Tune's config of it."""
    given = config["values"]
    return {**given, **{each.field: each.tidy(given[each.field]) for each in space}}


def _optuna(sweep: Sweep, begun: Sequence[Trial]) -> Any:
    """Tune's search by Optuna: first the points of `begun` again, then new ones, by the results of
    these and of the other trials so far."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    params = {t.name: {f"values/{name}": v for name, v in t.values.items()} for t in sweep.trials}
    seed = zlib.crc32(f"raytrain sweep {sweep.base.seed} {len(sweep.trials)}".encode())
    search = OptunaSearch(
        space={f"values/{each.field}": each.distribution() for each in sweep.space},
        metric="score",
        mode="max",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        points_to_evaluate=[params[trial.name] for trial in begun] or None,
    )
    for trial in sweep.trials:
        if trial not in begun and trial.value is not None:
            search.add_evaluated_point(params[trial.name], sweep.score(trial))
    return search


@cache
def _end_with_raylet() -> None:
    end_with_raylet()  # once in a process, which trains several trials
