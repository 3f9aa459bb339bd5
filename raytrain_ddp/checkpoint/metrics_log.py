"""The log of a run: one record per line.

The log is part of each checkpoint, so it is never ahead of or behind the weights. `metrics.jsonl`
and the records of its loggers are readable copies, rewritten when a run is resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.checkpoint.background_writer import BackgroundWriter
from raytrain_ddp.checkpoint.run_folder import METRICS_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.trackers import Open
from raytrain_ddp.events import LogRecord, Note
from raytrain_ddp.messages import Event
from raytrain_ddp.records import json_of, to_record


class MetricsLog:
    """All records of a run, and their copies: in the run's folder and in the loggers.

    A full disk or a failed service does not end the training: the copies are then out of date until
    `publish` rewrites them.

    Args:
        openers: open the loggers, by name; called for the first record of a start, not before.
        tell: receives a note when the copies cannot be written.
    """

    def __init__(
        self, run: Storage, openers: Mapping[str, Open], tell: Callable[[Event], None]
    ) -> None:
        self.records: list[LogRecord] = []
        self._run, self._tell = run, tell
        self._file: IO[str] | None = None
        self._writers = [
            BackgroundWriter(name, opened, self.records, tell) for name, opened in openers.items()
        ]
        self._lock = threading.Lock()  # `publish` is called by the committing thread
        self._failed = True

    def restore(self, records: Sequence[LogRecord]) -> None:
        """Starts the log with these records, at the start or in another generation."""
        with self._lock:
            self._close_file()
            self.records[:] = records
        try:
            self.publish()
        except OSError as error:
            self._behind(error)

    def add(self, record: LogRecord) -> None:
        """Appends one record."""
        with self._lock:
            self.records.append(record)
            for writer in self._writers:
                writer.add(record)
            if self._file is None:
                return
            try:
                self._file.write(f"{json_of(to_record(record))}\n")
                return
            except OSError as error:
                problem = error
                self._close_file()
        self._behind(problem)

    def publish(self) -> None:
        """Rewrites the copies that are not written record by record; raises OSError."""
        with self._lock:
            for writer in self._writers:
                writer.again()
        if not self._run.is_local:  # may take long and needs no lock
            write_log(self._run, map(to_record, list(self.records)))
            return
        with self._lock:
            if self._file is not None:
                return
            write_log(self._run, map(to_record, self.records))
            path = Path(self._run.path) / METRICS_FILE
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def finish(self) -> None:
        """Marks the run as finished; otherwise, closing the log marks it as failed."""
        self._failed = False

    def close(self) -> None:
        """Waits for a limited time until everything is sent."""
        self._close_file()
        for writer in self._writers:
            writer.close(self._failed)

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # unwritten lines are still in the records
                self._file.close()
            self._file = None

    def _behind(self, error: OSError) -> None:
        text = f"{METRICS_FILE} cannot be written ({error}): the next checkpoint rewrites it."
        self._tell(Note(text))


def write_log(run: Storage, records: Iterable[Mapping[str, Any]]) -> None:
    """Rewrites metrics.jsonl; raises OSError."""
    run.write_atomic(METRICS_FILE, "".join(f"{json_of(each)}\n" for each in records).encode())
