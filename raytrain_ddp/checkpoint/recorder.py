"""Writes a run's log, checkpoints and other files, on rank 0."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raytrain_ddp import events
from raytrain_ddp.checkpoint.async_checkpoint import AsyncCheckpointer
from raytrain_ddp.checkpoint.checkpoint_interval import Life, SaveTimer
from raytrain_ddp.checkpoint.metrics_log import MetricsLog
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, require_none_lost, run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot, encode, loss_of
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore, Verify
from raytrain_ddp.checkpoint.trackers import openers
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.messages import Event
from raytrain_ddp.retries import with_backoff

_LIFE = "life.json"


class Recorder:
    """The log, the checkpoints and their timer; call `begin` first.

    Args:
        tell: receives events for the display, also from the committing thread.

    Attributes:
        attempt: the number of this start, after `begin`.
        timer: the timer of this start's checkpoints, after `begin`.
    """

    def __init__(
        self, config: TrainConfig, workers: int, best: Best, tell: Callable[[Event], None]
    ) -> None:
        self._config, self._workers, self._best = config, workers, best
        self._listener = tell
        self._run = run_storage(config)
        self.store = checkpoint_store(self._run)
        self.log = MetricsLog(self._run, openers(config), self._tell)
        self._closing = threading.Event()
        max_failed = config.checkpoint.max_failed
        self.committer = AsyncCheckpointer(self._commit, max_failed, self._tell, self._wait)
        self.attempt, self._patient_until = 0, 0.0

    def steps(self, outage_s: float = 0.0) -> list[int]:
        """The steps of all checkpoints, and of the one that is being committed.

        Args:
            outage_s: how long the storage may fail here and in `begin` together.

        Raises:
            OSError: the storage does not respond.
        """
        self._patient_until = max(self._patient_until, time.monotonic() + outage_s)
        now = self.committer.step()  # first: it may become one of the others
        names = with_backoff(lambda _: self.store.names(), self._trying_again, self._patience_s)
        steps = [name.step for name in names]
        return steps if now is None or now in steps else [*steps, now]

    def begin(self, verify: Verify = Checkpoint.verify) -> Checkpoint | None:
        """The newest good checkpoint; from now on, earlier starts can commit nothing.

        Args:
            verify: see `CheckpointStore.latest`.

        Raises:
            CheckpointError: there are only damaged ones, or all have disappeared.
            RunLockedError: another start is claiming the run.
            OSError: the storage does not respond or is full.
        """
        self.committer.wait()  # for a commit of the previous generation
        host = {"host": socket.gethostname(), "pid": os.getpid(), "workers": self._workers}

        def found(_: int) -> Checkpoint | None:
            self._run.mkdir()
            newest = self.store.latest(self._note, verify)
            if newest is None:
                require_none_lost(self._config, self._run)
            self.attempt = self.store.claim(newest.name if newest else None, host)
            self.store.sweep()
            return newest

        newest = with_backoff(found, self._trying_again, self._patience_s)
        self._life = self._life_after(newest)
        self.timer = SaveTimer(self._config.checkpoint.every_s, self._life, self._tell)
        return newest

    @property
    def _patience_s(self) -> float:
        return max(0.0, self._patient_until - time.monotonic())

    def time_to_save(self) -> bool:
        """Whether a checkpoint is due by time, and none is being committed.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """
        self.committer.require()
        return self.timer.is_due() and not self.committer.postpones()

    def drain(self) -> None:
        """Waits until no commit is running."""
        self.committer.wait()
        self.committer.require()

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed."""
        self.committer.finish()
        self.log.finish()

    def may_go_on(self) -> bool:
        """Whether it may continue in the next generation. If nothing has begun, it may not, and
        `close` must be called."""
        return self.attempt > 0

    def resume(self, workers: int, tell: Callable[[Event], None]) -> None:
        """Continues in the next generation; from now on, `tell` receives the events."""
        self._workers, self._listener = workers, tell

    def close(self) -> None:
        """Waits for the current commit; it is not retried if it fails."""
        self._closing.set()
        self.committer.close()
        self.log.close()

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; a note says where, or that it failed."""
        try:
            self._run.write_atomic(name, json.dumps(document, indent=1).encode())
            self._note(f"{name} is in {self._run}.")
        except OSError as error:
            self._note(f"{name} cannot be written: {error}")

    def _life_after(self, newest: Checkpoint | None) -> Life:
        """An unreadable history does not end the run, as it affects only how often to save."""
        if newest is None or _LIFE not in newest.manifest.files:
            return Life(failures=self.attempt - 1)
        try:
            text = with_backoff(lambda _: newest.read(_LIFE), self._trying_again)
            return Life.after(json.loads(text), self.attempt)
        except (OSError, CheckpointError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            self._note(f"the failure history starts over: {_LIFE} cannot be read ({reason}).")
            return Life()

    def _commit(self, snapshot: Snapshot, number: int) -> None:
        """Commits a checkpoint, then removes old ones; `number` counts the attempts, from 0."""
        started = time.monotonic()
        manifest = replace(snapshot.manifest, attempt=self.attempt)
        name = CheckpointName(manifest.step, manifest.attempt)
        if number and name in self.store.names():  # the commit succeeded, but its reply was lost
            checkpoint = self.store.open(name)
        else:
            life = self._life.document(self.attempt, self.timer.lived_s(), snapshot.last)
            documents = {**snapshot.documents, _LIFE: life}
            files = encode(replace(snapshot, documents=documents))
            checkpoint = self.store.commit(manifest, files)
        seconds = time.monotonic() - started
        self.timer.committed(seconds)
        self._tell(
            events.Checkpoint(
                step=manifest.step,
                name=str(name),
                seconds=seconds,
                size_bytes=checkpoint.manifest.size_bytes,
                tries=number + 1,
            )
        )
        self._tidy()

    def _tidy(self) -> None:
        """Work that may wait until the next commit if the storage fails."""
        try:
            self.store.prune(self._config.checkpoint.keep_last, self._best.among(self.store))
            self.log.publish()
        except OSError as error:
            self._note(f"old checkpoints or the log could not be updated in {self._run}: {error}")

    def _trying_again(self, wait_s: float, error: OSError) -> bool:
        self._note(f"{self._run}: {error} Retrying in {wait_s:.1f} s.")
        return self._wait(wait_s)

    def _wait(self, seconds: float) -> bool:
        """Returns whether to go on: True unless `close` was called."""
        return not self._closing.wait(seconds)

    def _tell(self, event: Event) -> None:
        self._listener(event)

    def _note(self, text: str) -> None:
        self._tell(events.Note(text))


class Best:
    """Finds the best checkpoint by a metric from the manifests, without state of its own."""

    def __init__(self, monitor: str, goal: str) -> None:
        self.monitor, self.goal, self._sign = monitor, goal, 1 if goal == "max" else -1

    def among(self, store: CheckpointStore) -> CheckpointName | None:
        """Returns the best evaluated checkpoint; of equal ones, the one with the lower loss, then
        the earliest."""
        rated = []
        for name in store.names():
            with suppress(CheckpointError, FileNotFoundError):  # `latest` reports damaged ones
                metrics = store.open(name).manifest.metrics
                value = metrics.get(self.monitor, math.nan)
                if not math.isnan(value):
                    rated.append((self._sign * value, -loss_of(metrics), -name.step, name))
        return max(rated, key=lambda each: each[:3])[-1] if rated else None
