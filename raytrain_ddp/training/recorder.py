"""What rank 0 writes of a run: the log, the checkpoints, and what is kept besides."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raytrain_ddp import events
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, require_none_lost, run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.messages import Event
from raytrain_ddp.training.async_checkpoint import AsyncCheckpointer, with_backoff
from raytrain_ddp.training.checkpoint_interval import Life, SaveTimer
from raytrain_ddp.training.metrics_log import MetricsLog
from raytrain_ddp.training.session import Snapshot
from raytrain_ddp.training.trackers import openers
from raytrain_ddp.training.train_state import encode, loss_of
from raytrain_ddp.training.world import World

_LIFE = "life.json"


class Recorder:
    """The log, the checkpoints and the clock by which they are made; `begin` comes first.

    Args:
        tell: is given events for the display, also from the thread that commits.
    """

    def __init__(
        self, config: TrainConfig, world: World, best: Best, tell: Callable[[Event], None]
    ) -> None:
        self._config, self._world, self._best, self._tell = config, world, best, tell
        self._run = run_storage(config)
        self.store = checkpoint_store(self._run)
        self.log = MetricsLog(self._run, openers(config), tell)
        self._closing = threading.Event()
        self.committer = AsyncCheckpointer(
            self._commit, config.checkpoint.max_failed, tell, lambda s: not self._closing.wait(s)
        )
        self._newest: Checkpoint | None = None

    def begin(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; from now on earlier starts can commit no more.

        Raises:
            CheckpointError: there are only damaged ones, or there were some and all are gone.
            RunLockedError: another start claims the run at this moment.
            OSError: the storage does not answer, or is full.
        """
        host = {"host": socket.gethostname(), "pid": os.getpid(), "workers": self._world.size}

        def found(_: int) -> Checkpoint | None:
            self._run.mkdir()
            newest = self.store.latest(on_damaged=self._note)
            if newest is None:
                require_none_lost(self._config, self._run)
            self._attempt = self.store.claim(newest.name if newest else None, host)
            self.store.sweep()
            return newest

        self._newest = newest = with_backoff(found, self._trying_again)
        self._life = self._life_after(newest)
        self._timer = SaveTimer(self._config.checkpoint.every_s, self._life, self._tell)
        return newest

    def time_to_save(self) -> bool:
        """Whether the clock asks for a checkpoint, and none is under way.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """
        self.committer.require()
        return self._timer.is_due() and not self.committer.postpones()

    def drain(self) -> None:
        """Waits until no commit is under way."""
        self.committer.wait()
        self.committer.require()

    def submit(self, snapshot: Snapshot) -> Future[None]:
        """Has a snapshot committed in the background; what it comes to never raises."""
        return self.committer.submit(snapshot)

    def saved(self, stall_s: float) -> None:
        """Notes for how long a checkpoint has stopped the training."""
        self._timer.saved(stall_s)

    def place(self) -> Storage:
        """Where the newest checkpoint is that is whole; the folder of all if there is none."""
        return self._newest.storage if self._newest is not None else self.store.storage

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed."""
        self.committer.finish()
        self.log.finish()

    def close(self) -> None:
        """Waits for the commit under way; it is not tried again if it fails."""
        self._closing.set()
        self.committer.close()
        self.log.close()

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; says where, or that it cannot be written."""
        try:
            self._run.write_atomic(name, json.dumps(document, indent=1).encode())
            self._note(f"{name} is kept in {self._run}.")
        except OSError as error:
            self._note(f"{name} cannot be written: {error}")

    def _life_after(self, newest: Checkpoint | None) -> Life:
        """It only decides how often to save: no reason to end a run, if it cannot be read."""
        if newest is None or _LIFE not in newest.manifest.files:
            return Life(failures=self._attempt - 1)
        try:
            text = with_backoff(lambda _: newest.read(_LIFE), self._trying_again)
            return Life.after(json.loads(text), self._attempt)
        except (OSError, CheckpointError, KeyError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            self._note(f"the age of the run begins anew: {_LIFE} cannot be read ({told}).")
            return Life()

    def _commit(self, snapshot: Snapshot, number: int) -> None:
        """Makes a checkpoint, then removes those that need not be kept; try `number`, from 0."""
        started = time.monotonic()
        manifest = replace(snapshot.manifest, attempt=self._attempt)
        name = CheckpointName(manifest.step, manifest.attempt)
        if number and name in self.store.names():  # its commit was done, only the answer was lost
            checkpoint = self.store.open(name)
        else:
            life = self._life.document(self._attempt, self._timer.lived_s(), snapshot.last)
            documents = {**snapshot.documents, _LIFE: life}
            files = encode(replace(snapshot, documents=documents))
            checkpoint = self.store.commit(manifest, files)
        self._newest = checkpoint
        seconds = time.monotonic() - started
        self._timer.committed(seconds)
        self._tell(
            events.Checkpoint(
                step=manifest.step,
                name=str(name),
                seconds=seconds,
                size_bytes=sum(e.size_bytes for e in checkpoint.manifest.files.values()),
                tries=number + 1,
            )
        )
        self._tidy()

    def _tidy(self) -> None:
        """What may wait until the next commit, if the storage fails."""
        try:
            self.store.prune(self._config.checkpoint.keep_last, self._best.among(self.store))
            self.log.publish()
        except OSError as error:
            self._note(f"old checkpoints or the log could not be renewed in {self._run}: {error}")

    def _trying_again(self, wait_s: float, error: OSError) -> bool:
        self._note(f"{self._run}: {error} Trying again in {wait_s:.1f} s.")
        return not self._closing.wait(wait_s)

    def _note(self, text: str) -> None:
        self._tell(events.Note(text))


class Best:
    """Which checkpoint is the best by a metric; read off the manifests, so that nothing is kept."""

    def __init__(self, monitor: str, goal: str) -> None:
        self.monitor, self._sign = monitor, 1 if goal == "max" else -1

    def among(self, store: CheckpointStore) -> CheckpointName | None:
        """The best checkpoint that was made right after an evaluation: of equal ones that with the
        lower loss, then the earliest."""
        rated = []
        for name in store.names():
            with suppress(CheckpointError, FileNotFoundError):  # `latest` tells of damaged ones
                metrics = store.open(name).manifest.metrics
                value = metrics.get(self.monitor, math.nan)
                if not math.isnan(value):
                    rated.append((self._sign * value, -loss_of(metrics), -name.step, name))
        return max(rated, key=lambda each: each[:3])[-1] if rated else None
