"""A run's files: the log and the checkpoints, written by rank 0.

The log is part of each checkpoint, and so is never ahead of or behind the weights; `metrics.jsonl`
and the TensorBoard events are its readable copies, made anew when a run is resumed.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.checkpoint.layout import METRICS_FILE, TENSORBOARD, checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.session import Record, Snapshot
from raytrain_ddp.training.state import encode


class Recorder:
    """Writes the log line by line, and commits snapshots.

    Args:
        tell: is given events for the display, also from the thread that commits.
    """

    def __init__(self, config: TrainConfig, best: Best, tell: Callable[[Record], None]) -> None:
        self._run = run_storage(config)
        self._run.mkdir()
        self.store = checkpoint_store(self._run)
        self.store.storage.mkdir()
        self._attempt = self.store.next_attempt()  # before leftovers go: they count, too
        self.store.sweep()
        self._keep_last, self._best, self._tell = config.checkpoint.keep_last, best, tell
        self._records: list[Record] = []
        self._tensorboard = config.log.tensorboard and self._run.is_local
        self._file: IO[str] | None = None
        self._writer: Any = None
        self._idle = threading.Event()  # set: no commit is under way
        self._idle.set()
        self._error: BaseException | None = None

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def restore(self, records: Sequence[Record]) -> None:
        """Begins the log with these records; called once, before the first `log`."""
        self._records = list(records)
        self._publish()
        if self._run.is_local:
            path = Path(self._run.path)
            self._file = (path / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self._run.path) / TENSORBOARD
            shutil.rmtree(folder, ignore_errors=True)
            self._writer = SummaryWriter(str(folder))
            for record in self._records:
                self._write_event(record)

    def log(self, record: Record) -> None:
        """Appends one record."""
        self._records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
        if self._writer is not None:
            self._write_event(record)

    def begin(self) -> None:
        """Says that a commit will come, from this thread or another; `drain` waits for it."""
        self._idle.clear()

    def call_off(self) -> None:
        """Says that the commit will not come after all."""
        self._idle.set()

    def commit(self, snapshot: Snapshot) -> Checkpoint:
        """Makes a checkpoint, then removes those that need not be kept."""
        started = time.monotonic()
        try:
            manifest = replace(snapshot.manifest, attempt=self._attempt)
            checkpoint = self.store.commit(manifest, encode(snapshot))
            self.store.prune(self._keep_last, self._best.among(self.store))
            if not self._run.is_local:
                self._publish()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._idle.set()
        size = sum(entry.size_bytes for entry in checkpoint.manifest.files.values())
        self._tell(
            {
                "kind": "checkpoint",
                "step": manifest.step,
                "name": str(checkpoint.name),
                "seconds": time.monotonic() - started,
                "size_bytes": size,
            }
        )
        return checkpoint

    def drain(self) -> None:
        """Waits until no commit is under way; raises what the last one raised, once."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._idle.wait()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def _publish(self) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in self._records)
        self._run.write_atomic(METRICS_FILE, lines.encode())

    def _write_event(self, record: Record) -> None:
        values = record["metrics"] if record["kind"] == "eval" else record
        for name, value in values.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])


class Best:
    """Which checkpoint is the best by a metric; read off the manifests, so that nothing is kept."""

    def __init__(self, monitor: str, goal: str) -> None:
        self.monitor, self._sign = monitor, 1 if goal == "max" else -1

    def among(self, store: CheckpointStore) -> CheckpointName | None:
        """The best checkpoint that was made right after an evaluation; the earliest of equals."""
        rated = []
        for name in store.names():
            with suppress(CheckpointError, FileNotFoundError):  # `latest` tells of damaged ones
                value = store.open(name).manifest.metrics.get(self.monitor, math.nan)
                if not math.isnan(value):
                    rated.append((self._sign * value, name))
        return max(rated, key=lambda pair: (pair[0], -pair[1].step))[1] if rated else None
