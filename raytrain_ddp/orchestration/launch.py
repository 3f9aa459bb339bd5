"""Runs the workers under Ray Train, and listens to them until they are done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from raytrain_ddp import errors
from raytrain_ddp.checkpoint.layout import LOGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE, failpoint
from raytrain_ddp.orchestration.board import Board
from raytrain_ddp.orchestration.cluster import (
    PREEMPTION_WATCHER,
    Nodes,
    import_paths,
    recount,
)
from raytrain_ddp.orchestration.failures import KEPT, Failures
from raytrain_ddp.orchestration.resources import Layout
from raytrain_ddp.orchestration.waiting import Waiting
from raytrain_ddp.orchestration.worker import WorkerSettings, train_on_worker
from raytrain_ddp.recipe import to_dict

_POLL_S = 0.1
_BOARD_TIMEOUT_S = 60.0
# Ray Train's clean-up after the workers' end; without a dashboard it waits 15 s for nothing.
_CLEAN_UP_S = 3.0
# A look costs 4 to 13 ms of all workers; notices come half a minute ahead and more.
_LOOK_EVERY_S = 3.0
_RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"

Event = Mapping[str, Any]


class Interrupted(Exception):
    """Stopped by a signal before there was anything to save, or by a second one."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(
    config: TrainConfig, run: Storage, layout: Layout, show: Callable[[Event], None]
) -> Event:
    """Trains on `layout`; returns the outcome that rank 0 told.

    Raises:
        RaytrainError: what a worker raised, with its exit status.
        RetriesExhausted: workers died too often, or for ever at the same step; see failures.py.
        PreflightError: there was no room for the workers, or there is none any more.
        Interrupted: by a signal that nothing could be saved for.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    show({"kind": "phase", "name": "loading torch"})
    trainer = _trainer(config, run, layout, board)
    show({"kind": "phase", "name": f"placing {layout.said} (each loads torch)"})
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    # In a thread, so that this one can show events and take signals (Ray's own answer to Ctrl-C
    # ends the workers without a checkpoint).
    training = threading.Thread(target=fit, name="ray-train", daemon=True)
    training.start()
    failures = Failures(config.scaling.max_failures)
    nodes = Nodes()
    waiting = Waiting(layout, config.scaling.wait_s, nodes, recount, show)
    listener = _Listener(board, failures, waiting, show)
    try:
        with _signals(listener.on_signal):
            while training.is_alive() and not listener.waited_enough():
                listener.listen()
                time.sleep(_POLL_S)
            listener.listen()
    except BaseException:
        board.ask_stop.remote(signal.SIGTERM)
        raise
    finally:  # on a Ray that outlives this call, the run shall end as well
        board.close.remote()
        nodes.close()
    if listener.outcome is not None and not failure:
        return listener.outcome
    raise _given_up(layout, failures.first_cause(), failure)


class _Listener:
    """Takes events off the board, and shows them or hands them to those who judge them."""

    def __init__(
        self, board: Any, failures: Failures, waiting: Waiting, show: Callable[[Event], None]
    ) -> None:
        self._board, self._failures, self._waiting, self._show = board, failures, waiting, show
        self._began = False
        self._signals: list[int] = []
        self._stopping = False
        self.outcome: Event | None = None
        self._outcome_at = 0.0

    def waited_enough(self) -> bool:
        """Whether the outcome, which follows the last commit, has been there for a while."""
        return self.outcome is not None and time.monotonic() - self._outcome_at > _CLEAN_UP_S

    def listen(self) -> None:
        for event in self._take():
            kind = event["kind"]
            self._began = self._began or kind == "plan"
            to_show = self._failures.take(event)
            if kind == "outcome":
                self.outcome, self._outcome_at = event, time.monotonic()
            elif kind == "joined":
                self._waiting.joined()
            elif kind == "preempted" or to_show is not None:
                self._waiting.lost()
                self._show(to_show or event)
            elif kind not in ("failed", "died", "at"):
                self._show(event)
            failpoint("driver.event", step=event.get("step") or 0)
        if self.outcome is None:
            self._waiting.look()

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Only notes it: an exception from here could not pass through Ray's own code."""
        self._signals.append(number)

    def _take(self) -> list[Event]:
        import ray

        asked, deadline = self._board.take.remote(), time.monotonic() + _BOARD_TIMEOUT_S
        while time.monotonic() < deadline:
            self._obey()
            ready, _ = ray.wait([asked], timeout=0.2)
            if ready:
                break
        try:
            events: list[Event] = ray.get(asked, timeout=1)
        except ray.exceptions.RayError as error:
            raise errors.RetriesExhausted(
                "the connection to Ray is lost; the last committed checkpoint is kept, and the "
                f"same command goes on from there: {str(error).splitlines()[0]}"
            ) from error
        return events

    def _obey(self) -> None:
        if not self._signals:
            return
        if len(self._signals) > 1 or not self._began:
            raise Interrupted(self._signals[-1])
        if not self._stopping:
            self._stopping = True
            self._board.ask_stop.remote(self._signals[0])
            text = "Stopping after this step, with a checkpoint. Once more to stop without."
            self._show({"kind": "note", "text": text})


def _trainer(config: TrainConfig, run: Storage, layout: Layout, board: Any) -> Any:
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from raytrain_ddp.orchestration.witness import Witness

    # Ray's register of an earlier start would be restored, and refused if a listed checkpoint has
    # been pruned since. What counts is in the storage.
    if run.exists(_RAY_SNAPSHOT):
        run.delete_file(_RAY_SNAPSHOT)
    parent, _, name = run.path.rstrip("/").rpartition("/")
    given = WorkerSettings(
        config=to_dict(config),
        folder=str(Path.cwd()),
        import_paths=import_paths(config),
        log_folder=f"{run.path}/{LOGS}" if run.is_local else None,
        board=board,
        look_every_s=0.0 if os.environ.get(PREEMPTION_WATCHER) == "0" else _LOOK_EVERY_S,
        failpoints=(os.environ.get(VARIABLE, ""), os.environ.get(FOLDER_VARIABLE, "")),
    )
    return TorchTrainer(
        train_on_worker,
        train_loop_config={"given": given},
        scaling_config=ScalingConfig(
            num_workers=layout.workers,
            use_gpu=layout.use_gpu,
            resources_per_worker=dict(layout.per_worker),
            placement_strategy=config.scaling.placement,
            elastic_resize_monitor_interval_s=config.scaling.resize_s,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=run.fs,
            # Ray replaces workers whatever happens, and counts none of it; the driver judges.
            failure_config=FailureConfig(
                max_failures=-1,
                max_preemption_failures=config.scaling.max_preemptions,
                controller_failure_limit=-1,
            ),
            callbacks=[Witness(board)],
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        torch_config=TorchConfig(backend=layout.backend),
    )


def _given_up(layout: Layout, cause: str, raised: list[BaseException]) -> errors.RaytrainError:
    """Why Ray Train has ended without an outcome."""
    why = str(raised[0]) if raised else "no worker said why"
    if "interrupted by node preemption" in why:
        why = f"nodes were taken away more often than scaling.max_preemptions allows: {why}"
    return errors.RetriesExhausted(f"{cause or why} {KEPT}")


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to `handler`, where signals can be handled at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
