"""Runs the workers under Ray Train, and handles their events until they are done."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from raytrain_ddp import errors
from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import first_line
from raytrain_ddp.events import (
    Alive,
    ControllerStarted,
    Died,
    Event,
    InProgress,
    Joined,
    Note,
    Outcome,
    Phase,
    Placed,
    Plan,
    Preempted,
    WorkerFailed,
)
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE, failpoint
from raytrain_ddp.ray_backend.capacity_watch import CapacityWatch, LiveNodes
from raytrain_ddp.ray_backend.failure_policy import FailurePolicy
from raytrain_ddp.ray_backend.mailbox import Inbox, Mailbox
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.prometheus import PrometheusMetrics
from raytrain_ddp.ray_backend.ray_process import LOST
from raytrain_ddp.ray_backend.ray_start import PREEMPTION_WATCHER
from raytrain_ddp.ray_backend.task_transfer import code_of, import_paths
from raytrain_ddp.ray_backend.train_report import REPORT_S
from raytrain_ddp.ray_backend.worker import WorkerSettings
from raytrain_ddp.signals import handling, heeded

if TYPE_CHECKING:
    from raytrain_ddp.ray_backend.ray_workers import RayWorkers

_POLL_S = 0.1
_MAILBOX_TIMEOUT_S = 60.0
# A check costs all workers 4 to 13 ms; notices come at least half a minute ahead.
_LOOK_EVERY_S = 3.0


def run_workers(
    config: TrainConfig,
    run: Storage,
    layout: Layout,
    tell: Callable[[Event], None],
    committed: int = 0,
    task: bytes | None = None,
    lease: str = "",
) -> Outcome:
    """Trains on `layout`; returns the outcome reported by rank 0.

    Args:
        committed: the step of the newest checkpoint, 0 without one.
        task: the task, if its name does not suffice; see `pickled_task`.
        lease: the token of the process that holds the run's lease.

    Raises:
        RaytrainError: the error of a worker, with its exit status.
        RetriesExhausted: workers died too often, or repeatedly at the same step; see
            failure_policy.py.
        PreflightError: there were never, or are no longer, enough resources for the workers.
        KeyboardInterrupt: a signal, its argument, arrived before there was anything to save, or
            it was the second one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # If it is killed, Ray restarts it and retries calls: see mailbox.py.
    lasting = {"max_restarts": -1, "max_task_retries": -1}
    mailbox = ray.remote(num_cpus=0, scheduling_strategy=here, **lasting)(Mailbox).remote()
    tell(Phase("loading torch"))  # while the mailbox starts
    from raytrain_ddp.ray_backend.ray_workers import RayWorkers

    scaling, nodes = config.scaling, LiveNodes()
    metrics = PrometheusMetrics(str(config.name))

    def show(event: Event) -> None:
        metrics.take(event)
        tell(event)

    given = WorkerSettings(
        config=to_dict(config),
        task=task,
        folder=str(Path.cwd()),
        import_paths=import_paths(config),
        log_folder=f"{run.path}/{LOGS}" if run.is_local else None,
        mailbox=mailbox,
        threads=max(1, int(layout.per_worker["CPU"])),
        lease=lease,
        look_every_s=0.0 if os.environ.get(PREEMPTION_WATCHER) == "0" else _LOOK_EVERY_S,
        code=code_of(config),
        argv=tuple(sys.argv),
        failpoints=(os.environ.get(VARIABLE, ""), os.environ.get(FOLDER_VARIABLE, "")),
    )
    workers = RayWorkers(config, run, layout, given)
    failures = FailurePolicy(scaling.max_failures, committed, workers.size)
    waiting = CapacityWatch(layout, scaling.wait_s, nodes, show, nodes.awake, workers.least_left)
    listener = _Listener(mailbox, workers, failures, waiting, metrics, show, nodes.awake)
    try:
        with handling(heeded(), listener.on_signal):
            for text in workers.notes:
                show(Note(text))
            while True:
                show(Phase(f"placing {layout.said} (each loads torch)"))
                ended = _attend(workers, listener)
                if listener.outcome is not None:
                    of_ray = ended if isinstance(ended, bytes) else b""
                    return replace(listener.outcome, of_ray=of_ray)
                show(failures.ended(_said(ended)))
                waiting.lost()
    finally:  # end the run also on a Ray that outlives this call
        nodes.close()
        if not nodes.is_lost:  # otherwise, each call would wait for the lost head
            mailbox.close.remote()
            metrics.close()
            listener.close()


def _attend(workers: RayWorkers, listener: _Listener) -> bytes | BaseException | None:
    """Handles events until the workers have ended; returns Ray Train's Result, or what has ended
    it. After the outcome, waits only as long as Ray Train may be told of it."""
    ended: list[bytes | BaseException] = []

    def fit() -> None:
        try:
            ended.append(workers.fit())
        except BaseException as error:
            ended.append(error)

    # In a thread, so that this one can show events and receive signals (Ray's own handling of
    # Ctrl-C ends the workers without a checkpoint).
    training = threading.Thread(target=fit, name="ray-train", daemon=True)
    training.start()
    while training.is_alive() and listener.outcome is None:
        listener.listen()
        time.sleep(_POLL_S)
    if listener.outcome is None:
        listener.listen()
    else:
        training.join(REPORT_S)
    return next(iter(ended), None)


def _said(ended: bytes | BaseException | None) -> str:
    """What Ray Train says about its end."""
    from ray.exceptions import RayActorError

    if isinstance(ended, RayActorError):
        return "Ray Train's controller crashed, or was killed"
    return str(ended) if isinstance(ended, BaseException) else ""


class _Listener:
    """Takes events from the mailbox, and shows or processes them."""

    def __init__(
        self,
        mailbox: Any,
        workers: RayWorkers,
        failures: FailurePolicy,
        waiting: CapacityWatch,
        metrics: PrometheusMetrics,
        show: Callable[[Event], None],
        awake: Callable[[], float],
    ) -> None:
        self._inbox, self._awake = Inbox(), awake
        self._mailbox, self._workers, self._failures = mailbox, workers, failures
        self._waiting, self._metrics, self._show = waiting, metrics, show
        self._began = False
        self._signals: list[int] = []
        self._stopping = False
        self.outcome: Outcome | None = None

    def listen(self) -> None:
        for event in self._take():
            self._began = self._began or isinstance(event, Plan)
            self._waiting.take(event)
            stops = not isinstance(event, Died) or self._failures.stops_training(event)
            to_show = self._failures.take(event)
            if to_show is not None or isinstance(event, Preempted):
                if stops:
                    self._waiting.lost()
                self._show(to_show or event)
            else:
                self._pass_on(event)
            failpoint("driver.event", step=getattr(event, "step", None) or 0)
        if self.outcome is None:
            self._workers.look(self._began)
            self._waiting.look()
        else:
            self._mailbox.take.remote(self._inbox.taken)  # confirms it to the worker

    def _pass_on(self, event: Event) -> None:
        match event:
            case Outcome():
                self.outcome = event
            case ControllerStarted() | Placed():
                self._workers.take(event)
            case InProgress():
                self._metrics.take(event)
            case WorkerFailed() | Died() | Joined() | Alive():
                pass  # the failure policy decides what to show
            case _:
                self._show(event)

    def close(self) -> None:
        """Ends all workers."""
        import ray

        with suppress(Exception):  # it, or all of Ray, has already ended
            for _, _, event in ray.get(self._mailbox.take.remote(self._inbox.taken), timeout=1):
                if isinstance(event, ControllerStarted | Placed):
                    self._workers.take(event)
        self._workers.close()

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Only records it: an exception raised here could not pass through Ray's code."""
        if number != signal.SIGHUP or not self._signals:  # a closed terminal sends it twice
            self._signals.append(number)

    def _take(self) -> list[Event]:
        import ray

        stop = self._signals[0] if self._stopping else 0
        asked = self._mailbox.take.remote(self._inbox.taken, stop)
        deadline = self._awake() + _MAILBOX_TIMEOUT_S
        while self._awake() < deadline:
            self._stop_if_asked()
            ready, _ = ray.wait([asked], timeout=0.2)
            if ready:
                break
        try:
            return self._inbox.sort(ray.get(asked, timeout=1))
        except ray.exceptions.RayError as error:
            raise errors.RetriesExhausted(f"{LOST}{first_line(error)}") from error

    def _stop_if_asked(self) -> None:
        if not self._signals:
            return
        if len(self._signals) > 1 or not self._began:
            raise KeyboardInterrupt(self._signals[-1])
        if not self._stopping:
            self._stopping = True
            text = "Stopping after this step, with a checkpoint. Repeat to stop without it."
            self._show(Note(text))
