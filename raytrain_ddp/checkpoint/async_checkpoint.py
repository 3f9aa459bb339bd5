"""Commits snapshots as checkpoints in a background thread, one at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TypeVar

from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.events import CheckpointFailed, Note
from raytrain_ddp.messages import Event
from raytrain_ddp.retries import with_backoff

T = TypeVar("T")

_LATELY_S = 60.0
_SAID_S = 1.0
_HANGS_S = 30.0


class AsyncCheckpointer:
    """Commits snapshots in the background, at most one at a time.

    A failed commit does not end the training; `max_failed` in a row do, and the final commit must
    not fail. Errors other than the storage's end the training at its next step.

    Args:
        commit: turns a snapshot into a checkpoint; also gets the number of the attempt.
        max_failed: this many failures in a row end the training.
        tell: receives notes and events, also from this thread.
        sleep: waits the given seconds; returns False if the wait was interrupted.
    """

    def __init__(
        self,
        commit: Callable[[Snapshot, int], T],
        max_failed: int,
        tell: Callable[[Event], None],
        sleep: Callable[[float], bool],
    ) -> None:
        self._commit, self._max_failed, self._tell, self.sleep = commit, max_failed, tell, sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="committer")
        self._under_way: Future[None] | None = None
        self._step = 0  # of the snapshot being committed
        self._since = 0.0
        self._in_a_row = 0
        self._failure: CheckpointError | None = None  # of the latest commit
        self._failed_at = -math.inf  # time of the latest attempt, if it failed
        self._problem: BaseException | None = None
        self._longest_wait_s = _SAID_S
        self._postponed = False

    def submit(self, snapshot: Snapshot) -> Future[None]:
        """Commits a snapshot once the previous commit is done; the future never raises.

        The snapshot's memory is in use until the future is done.
        """
        self.wait()
        self._step, self._since = snapshot.manifest.step, time.monotonic()
        self._under_way = self._thread.submit(self._attempt, snapshot)
        return self._under_way

    @property
    def fails(self) -> bool:
        """Whether the latest write failed, less than a minute ago."""
        return time.monotonic() - self._failed_at < _LATELY_S

    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def step(self) -> int | None:
        """The step of the snapshot that is being committed."""
        return self._step if self.is_busy() else None

    def postpones(self) -> bool:
        """Whether a checkpoint that can wait must wait for the current one; reported once for
        each."""
        if self.is_busy() and not self._postponed:
            self._postponed = True
            spent_s = time.monotonic() - self._since
            self._note(
                f"the checkpoint of step {self._step} is still being written ({spent_s:.0f} s so "
                "far): the next one that is due by time follows when it is done. The storage is "
                "slow."
            )
        return self.is_busy()

    def wait(self) -> None:
        """Waits until no commit is running; reports a long wait, also while it lasts."""
        waited_s = self._wait()
        if waited_s > self._longest_wait_s:
            self._longest_wait_s = 2 * waited_s  # do not repeat the same note
            self._note(
                f"training waited {waited_s:.1f} s until the checkpoint of step {self._step} was "
                "written: checkpoints are due faster than the storage writes them."
            )

    def require(self) -> None:
        """Raises the error that ends the training: too many failures in a row, or another
        writer."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed."""
        self.wait()
        self.require()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Waits until no commit is running, and ends the thread."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _wait(self) -> float:
        """Returns the seconds waited."""
        started, report_at_s = time.monotonic(), _HANGS_S
        while self._under_way is not None:
            waited_s = time.monotonic() - started
            if wait_for([self._under_way], report_at_s - waited_s).done:
                break
            self._note(
                f"training waits for the checkpoint of step {self._step}, which has been written "
                f"for {time.monotonic() - self._since:.0f} s: the storage does not respond."
            )
            report_at_s *= 2
        return time.monotonic() - started

    def _attempt(self, snapshot: Snapshot) -> None:
        """Never raises: Ray would treat an error in this thread as the end of the training."""

        def pause(wait_s: float, error: OSError) -> bool:
            self._failed_at = time.monotonic()
            self._note(
                f"the checkpoint of step {snapshot.manifest.step} could not be written ({error}): "
                f"retrying in {wait_s:.1f} s."
            )
            return self.sleep(wait_s)

        try:
            try:
                with_backoff(lambda number: self._commit(snapshot, number), pause)
                self._in_a_row, self._failure, self._failed_at = 0, None, -math.inf
            except OSError as error:
                self._failed(snapshot.manifest.step, error)
        except BaseException as error:  # including errors of `tell`
            self._problem = error

    def _failed(self, step: int, error: OSError) -> None:
        self._in_a_row, self._failed_at = self._in_a_row + 1, time.monotonic()
        self._failure = CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}. Free space or fix the "
            "storage, then run the same command again: the run continues after the newest "
            "checkpoint there, if any."
        )
        if self._in_a_row >= self._max_failed:
            self._problem = self._failure
        self._tell(CheckpointFailed(step=step, message=str(error), in_a_row=self._in_a_row))
        if self._in_a_row < self._max_failed:
            self._note(
                f"the checkpoint of step {step} could not be written ({error}). Training continues "
                f"unless checkpoint.max_failed = {self._max_failed} fail in a row; this was number "
                f"{self._in_a_row}."
            )

    def _note(self, text: str) -> None:
        self._tell(Note(text))
