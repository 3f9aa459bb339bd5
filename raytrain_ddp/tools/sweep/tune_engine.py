"""Ray Tune places the trials of a sweep; the only file of this package that imports Ray.

Tune starts a trial's process where its resources are free, keeps it for the next trial, and says
when it died. Which trial starts, and which one stops, the conductor decides; so the state of Tune
is not needed to continue a sweep.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_ddp.checkpoint.lease import holder, is_seen
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import from_dict, to_dict
from raytrain_ddp.errors import RaytrainError, RetriesExhausted, first_line
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.ray_settings import applied_settings
from raytrain_ddp.ray_backend.worker_process import end_with_raylet, enter_folder
from raytrain_ddp.signals import handling, heeded
from raytrain_ddp.tools.sweep.conductor import Conductor, Ended, Evaluation
from raytrain_ddp.tools.sweep.trial_session import StopOrder, Ties, train_trial
from raytrain_ddp.uri import without_secrets

SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs have their own logs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C stops the trials with checkpoints
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # its experiment state is not used
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
_POLL_S = 0.1
_ANSWER_S = 10.0


class StopRequests:
    """An actor that trials ask whether they are to stop; an answer comes when they are."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, int], asyncio.Future[StopOrder]] = {}
        self._all: StopOrder | None = None

    async def wait(self, trial: int, start: int) -> StopOrder:
        """Returns once this start of the trial is to stop."""
        return await self._order(trial, start)

    async def given(self, trial: int, start: int) -> StopOrder | None:
        """The order to stop this start of the trial, if there is one by now."""
        future = self._order(trial, start)
        return future.result() if future.done() else None

    async def stop(self, trial: int, start: int, order: StopOrder) -> None:
        future = self._order(trial, start)
        if not future.done():
            future.set_result(order)

    async def stop_all(self, order: StopOrder) -> None:
        """All trials are to stop, also those that have not asked yet."""
        self._all = order
        for trial, start in self._orders:
            await self.stop(trial, start, order)

    def _order(self, trial: int, start: int) -> asyncio.Future[StopOrder]:
        future = self._orders.get((trial, start))
        if future is None:
            future = self._orders[trial, start] = asyncio.get_running_loop().create_future()
            if self._all is not None:
                future.set_result(self._all)
        return future


def run_trials(conductor: Conductor, resources: Mapping[str, float], parallel: int) -> None:
    """Runs the trials of a sweep on the Ray that this process is connected to, until nothing is
    left, or a signal stops it; `conductor.stopping` is its number then.

    Args:
        resources: of a trial, as Ray names them.
        parallel: trials at the same time, at most.

    Raises:
        KeyboardInterrupt: a second signal; the trials end without another checkpoint.
        RaytrainError: what the conductor raised, such as a storage that fails.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lasting = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 10_000}
    stops = ray.remote(num_cpus=0, scheduling_strategy=here, **lasting)(StopRequests).remote()
    raised: list[BaseException] = []
    folder = tempfile.mkdtemp(prefix="raytrain-sweep-")

    def work() -> None:
        try:
            with applied_settings(SETTINGS):
                _tuner(conductor, stops, resources, parallel, folder, raised).fit()
        except BaseException as error:
            raised.append(error)

    signals: list[int] = []

    def note(number: int, _: object) -> None:
        if number != signal.SIGHUP or not signals:  # a closed terminal sends it twice
            signals.append(number)

    thread = threading.Thread(target=work, name="ray-tune", daemon=True)
    try:
        with handling(heeded(), note):
            thread.start()
            while thread.is_alive():
                if len(signals) > 1:
                    raise KeyboardInterrupt(signals[-1])
                if signals and not conductor.stopping:
                    conductor.stopping = signals[0]
                    stops.stop_all.remote(StopOrder(signals[0], "Ctrl-C, or a signal"))
                time.sleep(_POLL_S)
    finally:
        with suppress(Exception):  # Ray may be lost
            ray.kill(stops)
        shutil.rmtree(folder, ignore_errors=True)
    for error in raised[:1]:
        if isinstance(error, RaytrainError):
            raise error
        raise RetriesExhausted(
            f"Ray Tune ended with {type(error).__name__}: {first_line(error)}: "
            "run the same command again to continue."
        ) from error


def _tuner(
    conductor: Conductor,
    stops: Any,
    resources: Mapping[str, float],
    parallel: int,
    folder: str,
    raised: list[BaseException],
) -> tune.Tuner:
    here = Here(str(Path.cwd()), import_paths(conductor.base), holder(conductor.folder))

    def train(order: dict[str, Any]) -> None:
        _train(stops, order, here)

    amounts = {name.lower(): amount for name, amount in resources.items()}
    return tune.Tuner(
        tune.with_resources(train, amounts),
        tune_config=tune.TuneConfig(
            search_alg=_Points(conductor, parallel, raised),
            scheduler=_Results(conductor, stops, raised),
            num_samples=-1,
            reuse_actors=True,  # torch is loaded once
        ),
        run_config=tune.RunConfig(storage_path=folder, name="tune", verbose=0),
    )


@dataclass(frozen=True)
class Here:
    """What a process on any node needs to train as one that this process started.

    Args:
        folder: the current one. import_paths: of the user's task and model.
        lease: the token in the lease of the sweep; "" if there is none.
    """

    folder: str
    import_paths: Sequence[str]
    lease: str

    def missing(self, storage: str) -> str:
        """Enters the folder; why this node cannot train a trial, or ""."""
        enter_folder(self.folder, self.import_paths)
        if self.lease and not is_seen(open_storage(storage), self.lease):
            shown = without_secrets(storage)
            return (
                f"node {socket.gethostname()} does not see the folder of the sweep ({shown}). "
                "Several nodes need a shared folder or a URI."
            )
        return ""


@cache
def _bind_to_raylet() -> None:
    end_with_raylet()  # once in a process, which trains several trials


def _train(stops: Any, order: Mapping[str, Any], here: Here) -> None:
    """Trains a trial, in a process of Ray Tune."""
    _bind_to_raylet()
    missing = here.missing(order["config"]["storage"])
    if missing:
        tune.report({"said": Ended("lost", missing)})
        raise RuntimeError(missing)
    number, start = order["trial"], order["start"]
    stop = stops.wait.remote(number, start)

    def asked() -> StopOrder | None:
        ready, _ = ray.wait([stop], timeout=0)
        return ray.get(ready[0]) if ready else None

    def tell(evaluation: Any) -> StopOrder | None:
        tune.report({"said": evaluation})  # returns when the conductor has decided
        # Not left to `asked`, which may know only a step later: a copy would start from there.
        order: StopOrder | None = ray.get(stops.given.remote(number, start))
        return order

    end = train_trial(from_dict(order["config"]), Ties(tell, asked))
    tune.report({"said": end})
    if end.status in ("failed", "lost"):
        # Tune ends this process: what went wrong in it may also spoil the next trial.
        raise RuntimeError(end.message)


class _Stateless:
    """Is pickled without its fields, as Ray Tune wants to: a sweep is not continued from that."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Points(_Stateless, Searcher):  # type: ignore[misc]
    """Gives Ray Tune the next trial whenever there is one."""

    def __init__(self, conductor: Conductor, parallel: int, raised: list[BaseException]) -> None:
        super().__init__()
        self._conductor, self._parallel, self._raised = conductor, parallel, raised

    def suggest(self, trial_id: str) -> Any:
        if self._raised or self._conductor.is_over:
            return Searcher.FINISHED
        try:
            trial = self._conductor.next(self._parallel)
            if trial is None:
                return Searcher.FINISHED if self._conductor.is_over else None
            config = to_dict(self._conductor.config_of(trial))
            return {"trial": trial.number, "start": trial.starts, "config": config}
        except BaseException as error:
            self._raised.append(error)
            return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None: ...

    def save(self, checkpoint_path: str) -> None: ...

    def restore(self, checkpoint_path: str) -> None: ...


class _Results(_Stateless, FIFOScheduler):  # type: ignore[misc]
    """Passes on what the trials say, and their deaths."""

    def __init__(self, conductor: Conductor, stops: Any, raised: list[BaseException]) -> None:
        super().__init__()
        self._conductor, self._stops, self._raised = conductor, stops, raised

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number, start = trial.config["trial"], trial.config["start"]
        try:
            match result.get("said"):
                case Ended() as end:
                    self._conductor.ended(number, end)
                case Evaluation() as evaluation:
                    why = self._conductor.evaluated(number, evaluation)
                    if why:
                        order = StopOrder(signal.SIGTERM, why)
                        ray.get(self._stops.stop.remote(number, start, order), timeout=_ANSWER_S)
        except BaseException as error:
            self._raised.append(error)
            return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        try:
            lines = str(trial.get_error() or "").split("\n")
            why = next((line for line in lines[::-1] if line.strip()), "its process died")
            self._conductor.ended(trial.config["trial"], Ended("lost", why.strip()))
        except BaseException as error:
            self._raised.append(error)
