"""The log of a run: one record a line.

The log is part of each checkpoint, and so is never ahead of or behind the weights; `metrics.jsonl`
and the TensorBoard events are its readable copies, made anew when a run is resumed.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.checkpoint.layout import METRICS_FILE, TENSORBOARD
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.training.session import Record


class Logbook:
    """All records of a run, and their copies in its folder.

    A disk that is full ends no training: the copies are then behind until `publish` has made them
    anew.

    Args:
        tell: is given a note when the copies cannot be written.
    """

    def __init__(self, run: Storage, tensorboard: bool, tell: Callable[[Record], None]) -> None:
        self.records: list[Record] = []
        self._run, self._tell = run, tell
        self._tensorboard = tensorboard and run.is_local
        self._file: IO[str] | None = None
        self._writer: Any = None
        self._had_events = False  # in this start
        self._lock = threading.Lock()  # the thread that commits publishes

    def restore(self, records: Sequence[Record]) -> None:
        """Begins the log with these records; called once, before the first `add`."""
        self.records = list(records)
        try:
            self.publish()
        except OSError as error:
            self._behind(error)

    def add(self, record: Record) -> None:
        """Appends one record."""
        with self._lock:
            self.records.append(record)
            if self._file is None:
                return
            try:
                self._file.write(_line(record))
                if self._writer is not None:
                    self._write_event(record)
                elif self._tensorboard:
                    self._renew_events()
                return
            except OSError as error:
                problem = error
                self.close()
        self._behind(problem)

    def publish(self) -> None:
        """Makes the copies anew where they are not written record by record; raises OSError."""
        if not self._run.is_local:  # may take long, and needs no lock
            self._write(list(self.records))
            return
        with self._lock:
            if self._file is not None:
                return
            self._write(self.records)
            if self._had_events:
                self._renew_events()
            path = Path(self._run.path) / METRICS_FILE
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        for stream in filter(None, (self._file, self._writer)):
            with suppress(OSError):  # what is not written yet is in the records
                stream.close()
        self._file = self._writer = None

    def _write(self, records: Sequence[Record]) -> None:
        self._run.write_atomic(METRICS_FILE, "".join(map(_line, records)).encode())

    def _behind(self, error: OSError) -> None:
        text = f"{METRICS_FILE} cannot be written ({error}): the next checkpoint renews it."
        self._tell({"kind": "note", "text": text})

    def _renew_events(self) -> None:
        """Only from the first record on: the import takes long, and the start shall be short."""
        from torch.utils.tensorboard import SummaryWriter

        self._had_events = True
        folder = Path(self._run.path) / TENSORBOARD
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        for record in self.records:
            self._write_event(record)

    def _write_event(self, record: Record) -> None:
        values = record["metrics"] if record["kind"] == "eval" else record
        for name, value in values.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])


def _line(record: Record) -> str:
    """JSON knows no number that is not finite: null, which `read_history` gives back as nan."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
