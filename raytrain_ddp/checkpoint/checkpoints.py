"""The checkpoints of a run: claimed by one process, due by time, committed in the background."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

from raytrain_ddp import events
from raytrain_ddp.checkpoint.checkpoint_interval import Life, SaveTimer
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, require_none_lost, run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot, encode, loss_of
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore, Verify
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, with_backoff

_LIFE = "life.json"
_LATELY_S = 60.0
_SAID_S = 1.0
_HANGS_S = 30.0


class Checkpoints:
    """The checkpoints of a run. Each rank has this object, but only rank 0 calls `begin`; without
    that, the other methods do nothing.

    Snapshots are committed in a background thread, one at a time. A failed commit does not end the
    training; `checkpoint.max_failed` in a row do, and the last commit must not fail. Errors other
    than the storage's end the training at its next step.

    Args:
        log: is published after each commit, and shows events, also from that thread.

    Attributes:
        attempt: the number of this start; 0: it has not begun.
    """

    def __init__(self, config: TrainConfig, log: Log) -> None:
        self._config, self._log, self._show = config, log, log.show
        self._run = run_storage(config)
        self.store = checkpoint_store(self._run)
        self.attempt, self._patient_until = 0, 0.0
        self._timer: SaveTimer | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread()  # commits a snapshot
        self._step, self._since = 0, 0.0  # of that snapshot
        self._in_a_row = 0
        self._failure: CheckpointError | None = None  # of the latest commit
        self._failed_at = -math.inf  # time of the latest attempt, if it failed
        self._problem: BaseException | None = None
        self._longest_wait_s = _SAID_S
        self._postponed = False

    # ------------------------------------------------------------------ the start

    def steps(self, outage_s: float = 0.0) -> list[int]:
        """The steps of all checkpoints, and of the one that is being committed.

        Args:
            outage_s: how long the storage may fail here and in `begin` together.

        Raises:
            OSError: the storage does not respond.
        """
        self._patient_until = max(self._patient_until, time.monotonic() + outage_s)
        now = [self._step] if self.is_saving() else []  # first: it may become one of the others
        names = with_backoff(lambda _: self.store.names(), self._pause, self._patience_s)
        return [*dict.fromkeys([*(name.step for name in names), *now])]

    def begin(
        self, rated_by: tuple[str, str], workers: int, verify: Verify = Checkpoint.verify
    ) -> Checkpoint | None:
        """The newest good checkpoint; from now on, earlier starts can commit nothing.

        Args:
            rated_by: the metric by which the best one is kept, and "max" or "min".
            workers: their number, which is written into the claim.
            verify: see `CheckpointStore.latest`.

        Raises:
            CheckpointError: there are only damaged ones, or all have disappeared.
            RunLockedError: another start is claiming the run.
            OSError: the storage does not respond or is full.
        """
        self._wait()  # for a commit of the previous generation
        host = {"host": socket.gethostname(), "pid": os.getpid(), "workers": workers}

        def found(_: int) -> Checkpoint | None:
            self._run.mkdir()
            newest = self.store.latest(self._note, verify)
            if newest is None:
                require_none_lost(self._config, self._run)
            self.attempt = self.store.claim(newest.name if newest else None, host)
            self.store.sweep()
            return newest

        newest = with_backoff(found, self._pause, self._patience_s)
        self._rated_by, self._life = rated_by, self._life_after(newest)
        self._timer = SaveTimer(self._config.checkpoint.every_s, self._life, self._show)
        return newest

    @property
    def _patience_s(self) -> float:
        return max(0.0, self._patient_until - time.monotonic())

    def _pause(self, wait_s: float, error: OSError) -> bool:
        """Waits before the storage is tried again; returns whether to, unless `close` is called."""
        self._note(f"{self._run}: {error} Retrying in {wait_s:.1f} s.")
        return not self._closing.wait(wait_s)

    def _life_after(self, newest: Checkpoint | None) -> Life:
        """An unreadable history does not end the run, as it affects only how often to save."""
        if newest is None or _LIFE not in newest.manifest.files:
            return Life(failures=self.attempt - 1)
        try:
            text = with_backoff(lambda _: newest.read(_LIFE), self._pause)
            return Life.after(json.loads(text), self.attempt)
        except (OSError, CheckpointError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            self._note(f"the failure history starts over: {_LIFE} cannot be read ({reason}).")
            return Life()

    # ------------------------------------------------------------------ during the training

    def time_to_save(self) -> bool:
        """Whether a checkpoint is due by time, and none is being committed; a note says so once.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """
        self._require()
        if self._timer is None or not self._timer.is_due():
            return False
        if self.is_saving() and not self._postponed:
            self._postponed = True
            spent_s = time.monotonic() - self._since
            self._note(
                f"the checkpoint of step {self._step} is still being written ({spent_s:.0f} s so "
                "far): the next one that is due by time follows when it is done. The storage is "
                "slow."
            )
        return not self.is_saving()

    def is_saving(self) -> bool:
        """Whether a snapshot is being committed, whose memory is in use."""
        return self._thread.is_alive()

    @property
    def fails(self) -> bool:
        """Whether the latest write failed, less than a minute ago."""
        return time.monotonic() - self._failed_at < _LATELY_S

    def drain(self) -> None:
        """Waits until no commit is running; reports a long wait, also while it lasts.

        Raises:
            CheckpointError, RunLockedError: see `time_to_save`.
        """
        with self._log.doing("checkpoint"):
            waited_s = self._wait()
        if waited_s > self._longest_wait_s:
            self._longest_wait_s = 2 * waited_s  # do not repeat the same note
            self._note(
                f"training waited {waited_s:.1f} s until the checkpoint of step {self._step} was "
                "written: checkpoints are due faster than the storage writes them."
            )
        self._require()

    def save(self, snapshot: Snapshot, stall_s: float = 0.0) -> None:
        """Commits a snapshot in the background, after the one that is being committed, if any.

        Args:
            stall_s: how long taking it has blocked the training.
        """
        self.drain()
        self._step, self._since = snapshot.manifest.step, time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="committer")
        self._thread.start()
        if self._timer is not None:
            self._timer.saved(stall_s)

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed."""
        self.drain()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Waits for the current commit, which is not retried if it fails, and ends the log's
        copies. `begin` may follow."""
        self._closing.set()
        with self._log.doing("checkpoint"):
            self._wait()
        self._closing.clear()
        self.attempt, self._timer = 0, None
        self._log.close()

    def _require(self) -> None:
        """Raises the error that ends the training: too many failures in a row, or another
        writer."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _wait(self) -> float:
        """Waits until no commit is running; returns the seconds waited."""
        started, report_at_s = time.monotonic(), _HANGS_S
        while self.is_saving():
            self._thread.join(max(0.0, report_at_s - (time.monotonic() - started)))
            if self.is_saving():
                self._note(
                    f"training waits for the checkpoint of step {self._step}, which has been "
                    f"written for {time.monotonic() - self._since:.0f} s: the storage does not "
                    "respond."
                )
                report_at_s *= 2
        return time.monotonic() - started

    def _note(self, text: str) -> None:
        self._show(events.Note(text))

    # ------------------------------------------------------------------ in the background

    def _work(self, snapshot: Snapshot) -> None:
        """Never raises: Ray would treat an error in this thread as the end of the training."""
        step = snapshot.manifest.step

        def pause(wait_s: float, error: OSError) -> bool:
            self._failed_at = time.monotonic()
            self._note(
                f"the checkpoint of step {step} could not be written ({error}): retrying in "
                f"{wait_s:.1f} s."
            )
            return not self._closing.wait(wait_s)

        try:
            try:
                with_backoff(lambda number: self._commit(snapshot, number), pause)
                self._in_a_row, self._failure, self._failed_at = 0, None, -math.inf
            except OSError as error:
                self._failed(step, error)
        except BaseException as error:  # including errors of `show`
            self._problem = error

    def _commit(self, snapshot: Snapshot, number: int) -> None:
        """Commits a checkpoint, then removes old ones; `number` counts the attempts, from 0."""
        assert self._timer is not None  # it has begun
        started = time.monotonic()
        manifest = replace(snapshot.manifest, attempt=self.attempt)
        name = CheckpointName(manifest.step, manifest.attempt)
        if number and name in self.store.names():  # the commit succeeded, but its reply was lost
            checkpoint = self.store.open(name)
        else:
            life = self._life.document(self.attempt, self._timer.lived_s(), snapshot.last)
            documents = {**snapshot.documents, _LIFE: life}
            files = encode(replace(snapshot, documents=documents))
            checkpoint = self.store.commit(manifest, files)
        seconds, size_bytes = time.monotonic() - started, checkpoint.manifest.size_bytes
        self._timer.committed(seconds)
        self._show(events.Checkpoint(manifest.step, str(name), seconds, size_bytes, number + 1))
        try:  # this may wait until the next commit if the storage fails
            best = best_among(self.store, *self._rated_by)
            self.store.prune(self._config.checkpoint.keep_last, best)
            self._log.publish()
        except OSError as error:
            self._note(f"old checkpoints or the log could not be updated in {self._run}: {error}")

    def _failed(self, step: int, error: OSError) -> None:
        self._in_a_row, self._failed_at = self._in_a_row + 1, time.monotonic()
        most = self._config.checkpoint.max_failed
        self._failure = CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}. Free space or fix the "
            "storage, then run the same command again: the run continues after the newest "
            "checkpoint there, if any."
        )
        if self._in_a_row >= most:
            self._problem = self._failure
        self._show(events.CheckpointFailed(step=step, message=str(error), in_a_row=self._in_a_row))
        if self._in_a_row < most:
            self._note(
                f"the checkpoint of step {step} could not be written ({error}). Training continues "
                f"unless checkpoint.max_failed = {most} fail in a row; this was number "
                f"{self._in_a_row}."
            )


def best_among(store: CheckpointStore, monitor: str, goal: str) -> CheckpointName | None:
    """Returns the checkpoint that is best by a metric in its manifest, if any has it; of equal
    ones, the one with the lower loss, then the earliest."""
    rated = []
    for name in store.names():
        with suppress(CheckpointError, FileNotFoundError):  # `latest` reports damaged ones
            metrics = store.open(name).manifest.metrics
            value = metrics.get(monitor, math.nan)
            if not math.isnan(value):
                value = value if goal == "max" else -value
                rated.append((value, -loss_of(metrics), -name.step, name))
    return max(rated, key=lambda each: each[:3])[-1] if rated else None
