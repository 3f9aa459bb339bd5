"""The log of a run: one record a line.

The log is part of each checkpoint, and so is never ahead of or behind the weights; `metrics.jsonl`
and what its loggers keep are its readable copies, made anew when a run is resumed.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.checkpoint.run_folder import METRICS_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.events import LogRecord, Note
from raytrain_ddp.messages import Event
from raytrain_ddp.records import to_record
from raytrain_ddp.training.background_writer import BackgroundWriter
from raytrain_ddp.training.trackers import Open


class MetricsLog:
    """All records of a run, and their copies: in its folder, and where `openers` lead.

    A disk that is full, or a service that fails, ends no training: the copies are then behind until
    `publish` has made them anew.

    Args:
        openers: by name; they are called for the first record of a start, not before.
        tell: is given a note when the copies cannot be written.
    """

    def __init__(
        self, run: Storage, openers: Mapping[str, Open], tell: Callable[[Event], None]
    ) -> None:
        self.records: list[LogRecord] = []
        self._run, self._tell = run, tell
        self._file: IO[str] | None = None
        self._couriers = [
            BackgroundWriter(name, opened, self.records, tell) for name, opened in openers.items()
        ]
        self._lock = threading.Lock()  # the thread that commits publishes
        self._failed = True

    def restore(self, records: Sequence[LogRecord]) -> None:
        """Begins the log with these records; called once, before the first `add`."""
        self.records[:] = records
        try:
            self.publish()
        except OSError as error:
            self._behind(error)

    def add(self, record: LogRecord) -> None:
        """Appends one record."""
        with self._lock:
            self.records.append(record)
            for courier in self._couriers:
                courier.add(record)
            if self._file is None:
                return
            try:
                self._file.write(_line(record))
                return
            except OSError as error:
                problem = error
                self._close_file()
        self._behind(problem)

    def publish(self) -> None:
        """Makes the copies anew where they are not written record by record; raises OSError."""
        with self._lock:
            for courier in self._couriers:
                courier.again()
        if not self._run.is_local:  # may take long, and needs no lock
            self._write(list(self.records))
            return
        with self._lock:
            if self._file is not None:
                return
            self._write(self.records)
            path = Path(self._run.path) / METRICS_FILE
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def finish(self) -> None:
        """The run has come to its end; else, when the log is closed, it has failed."""
        self._failed = False

    def close(self) -> None:
        """Waits until all has arrived, for a while."""
        self._close_file()
        for courier in self._couriers:
            courier.close(self._failed)

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what is not written yet is in the records
                self._file.close()
            self._file = None

    def _write(self, records: Sequence[LogRecord]) -> None:
        write_log(self._run, records)

    def _behind(self, error: OSError) -> None:
        text = f"{METRICS_FILE} cannot be written ({error}): the next checkpoint renews it."
        self._tell(Note(text))


def write_log(run: Storage, records: Sequence[LogRecord]) -> None:
    """Makes metrics.jsonl anew; raises OSError."""
    run.write_atomic(METRICS_FILE, "".join(map(_line, records)).encode())


def _line(record: LogRecord) -> str:
    """JSON knows no number that is not finite: null, which `read_history` gives back as nan."""
    try:
        return json.dumps(to_record(record), allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(to_record(record)), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
