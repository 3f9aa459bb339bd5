"""Runs the workers under Ray Train, and handles their events until they are done."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from raytrain_ddp import errors
from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import first_line
from raytrain_ddp.events import Note, Plan, Preempted
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE, failpoint
from raytrain_ddp.messages import (
    Alive,
    ControllerStarted,
    Died,
    Event,
    InProgress,
    Joined,
    Outcome,
    Phase,
    Placed,
    WorkerFailed,
)
from raytrain_ddp.ray_backend.capacity_watch import CapacityWatch, LiveNodes
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.failure_policy import FailurePolicy
from raytrain_ddp.ray_backend.mailbox import Inbox, Mailbox
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.prometheus import PrometheusMetrics
from raytrain_ddp.ray_backend.ray_private import notify_node_change
from raytrain_ddp.ray_backend.ray_process import LOST
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.ray_backend.task_transfer import code_of
from raytrain_ddp.ray_backend.worker import WorkerSettings
from raytrain_ddp.signals import handling, heeded

if TYPE_CHECKING:
    from raytrain_ddp.ray_backend.ray_workers import RayWorkers

_POLL_S = 0.1
_MAILBOX_TIMEOUT_S = 60.0
# Ray Train's clean-up after the workers end takes less; its cleaner of placement groups, if a later
# Ray starts it, would wait 15 s for a dashboard.
_CLEAN_UP_S = 3.0
# A check costs all workers 4 to 13 ms; notices come at least half a minute ahead.
_LOOK_EVERY_S = 3.0

_RESTARTS_ALL = (
    "scaling.replace_workers = true has no effect here: all workers restart if one dies. Over "
    "NCCL, it needs scaling.hang_s above 0."
)


def run_workers(
    config: TrainConfig,
    run: Storage,
    layout: Layout,
    show: Callable[[Event], None],
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
    show(Phase("loading torch"))  # while the mailbox starts
    from raytrain_ddp.ray_backend.ray_workers import RayWorkers

    failures, nodes = FailurePolicy(config.scaling.max_failures, committed), LiveNodes()
    metrics = PrometheusMetrics(str(config.name))

    def announce(event: Event) -> None:
        metrics.take(event)
        show(event)

    wait_s, awake = config.scaling.wait_s, nodes.awake
    waiting = CapacityWatch(layout, wait_s, nodes, notify_node_change, announce, awake)
    listener = _Listener(mailbox, failures, waiting, metrics, announce, awake)
    try:
        with handling(heeded(), listener.on_signal):
            given = _worker_settings(config, run, layout, mailbox, task, lease)
            workers = RayWorkers(config, run, layout, given)
            listener.begin(workers, layout, config.scaling)
            while True:
                show(Phase(f"placing {layout.said} (each loads torch)"))
                why = _attend(workers, listener)
                if listener.outcome is not None:
                    return listener.outcome
                announce(failures.ended(why))
                waiting.lost()
                workers.free_placement()
    finally:  # end the run also on a Ray that outlives this call
        nodes.close()
        if not nodes.is_lost:  # otherwise, each call would wait for the lost head
            mailbox.close.remote()
            metrics.close()
            listener.close()


def _worker_settings(
    config: TrainConfig,
    run: Storage,
    layout: Layout,
    mailbox: Any,
    task: bytes | None,
    lease: str,
) -> WorkerSettings:
    """What each worker receives; see `run_workers`."""
    return WorkerSettings(
        config=to_dict(config),
        task=task,
        folder=str(Path.cwd()),
        import_paths=import_paths(config),
        log_folder=f"{run.path}/{LOGS}" if run.is_local else None,
        mailbox=mailbox,
        threads=max(1, int(layout.per_worker["CPU"])),
        lease=lease,
        look_every_s=0.0 if os.environ.get(PREEMPTION_WATCHER) == "0" else _LOOK_EVERY_S,
        most=layout.most,
        backend=layout.backend,
        code=code_of(config),
        argv=tuple(sys.argv),
        failpoints=(os.environ.get(VARIABLE, ""), os.environ.get(FOLDER_VARIABLE, "")),
    )


def _attend(workers: RayWorkers, listener: _Listener) -> str:
    """Handles events until training is over; returns Ray Train's last error if it has failed."""
    raised: list[BaseException] = []

    def fit() -> None:
        try:
            workers.fit()
        except BaseException as error:
            raised.append(error)

    # In a thread, so that this one can show events and receive signals (Ray's own handling of
    # Ctrl-C ends the workers without a checkpoint).
    training = threading.Thread(target=fit, name="ray-train", daemon=True)
    training.start()
    while training.is_alive() and not listener.waited_enough():
        listener.listen()
        time.sleep(_POLL_S)
    listener.listen()
    from ray.exceptions import RayActorError

    if raised and isinstance(raised[0], RayActorError):
        return "Ray Train's controller crashed, or was killed"
    return str(raised[0]) if raised else ""


class _Listener:
    """Takes events from the mailbox, and shows or processes them."""

    def __init__(
        self,
        mailbox: Any,
        failures: FailurePolicy,
        waiting: CapacityWatch,
        metrics: PrometheusMetrics,
        show: Callable[[Event], None],
        awake: Callable[[], float],
    ) -> None:
        self._inbox, self._awake = Inbox(), awake
        self._mailbox, self._failures, self._show = mailbox, failures, show
        self._waiting, self._metrics = waiting, metrics
        self._began = False
        self._signals: list[int] = []
        self._stopping = False
        self._workers: RayWorkers | None = None
        self.outcome: Outcome | None = None
        self._outcome_at = 0.0

    def waited_enough(self) -> bool:
        """Whether the outcome, which follows the last commit, arrived a while ago."""
        return self.outcome is not None and time.monotonic() - self._outcome_at > _CLEAN_UP_S

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
            if self._workers is not None:
                self._workers.look(self._began)
            self._waiting.look()

    def _pass_on(self, event: Event) -> None:
        match event:
            case Outcome():
                self.outcome, self._outcome_at = event, time.monotonic()
            case ControllerStarted() | Placed():
                if self._workers is not None:
                    self._workers.take(event)
            case InProgress():
                self._metrics.take(event)
            case WorkerFailed() | Died() | Joined() | Alive():
                pass  # the failure policy decides what to show
            case _:
                self._show(event)

    def begin(self, workers: RayWorkers, layout: Layout, scaling: ScalingConfig) -> None:
        """These workers are about to be started."""
        self._workers = workers
        if scaling.replace_workers is True and not workers.least and layout.most > 1:
            self._show(Note(_RESTARTS_ALL))
        self._failures.replaced = workers.size
        if workers.are_single:
            self._failures.most_preemptions = scaling.max_preemptions
        self._waiting.least_left = workers.least if workers.least < layout.most else 0
        if 0 < workers.size < layout.most:
            text = f"there is room for {workers.size} of {layout.said}: others join when they fit"
            self._show(Note(text))

    def close(self) -> None:
        """Ends all workers, which Ray Train would restart as long as this process lives."""
        import ray

        if self._workers is None:
            return
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
