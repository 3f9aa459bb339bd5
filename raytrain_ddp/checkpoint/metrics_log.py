"""The log of a run: one record per line.

The log is part of each checkpoint, so it is never ahead of or behind the weights. `metrics.jsonl`
and the records of its loggers are readable copies, rewritten when a run is resumed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.checkpoint.background_writer import BackgroundWriter
from raytrain_ddp.checkpoint.run_folder import METRICS_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.trackers import Open
from raytrain_ddp.events import Event, LogRecord, Note
from raytrain_ddp.records import json_of, to_record


class Log:
    """All records of a run, the same on all ranks. On rank 0 they have copies: in the run's folder
    and in the loggers.

    A full disk or a failed service does not end the training: the copies are then out of date until
    `publish` rewrites them.

    Args:
        openers: open the loggers, by name; called for the first record of a start, not before.
        show: receives each record and other events, also from the committing thread.

    Attributes:
        doing: returns the context in which the training thread is "writing" or waits for a
            "checkpoint"; see `Clock.also`.
    """

    def __init__(
        self, run: Storage, openers: Mapping[str, Open], show: Callable[[Event], None]
    ) -> None:
        self.records: list[LogRecord] = []
        self.show, self._run, self._openers = show, run, openers
        self.doing: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self._file: IO[str] | None = None
        self._writers: list[BackgroundWriter] = []
        self._lock = threading.Lock()  # `publish` is called by the committing thread

    def restore(self, records: Sequence[LogRecord], has_copies: bool = True) -> None:
        """Starts the log with these records, at the start or in another generation.

        Args:
            has_copies: whether this process writes the copies.
        """
        with self._lock:
            self._close_file()
            self.records[:] = records
        if not has_copies:
            return
        self._writers = self._writers or [
            BackgroundWriter(name, opened, self.records, self.show)
            for name, opened in self._openers.items()
        ]
        try:
            self.publish()
        except OSError as error:
            self._behind(error)

    def add(self, record: LogRecord) -> None:
        """Adds a record, the same on all ranks, and shows it. It is cheap."""
        with self.doing("writing"):
            self._append(record)
            self.show(record)

    def tell(self, event: Event) -> None:
        """Shows an event that is not part of the log."""
        with self.doing("writing"):
            self.show(event)

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; a note says where, or that it failed."""
        with self.doing("writing"):
            try:
                self._run.write_atomic(name, json.dumps(document, indent=1).encode())
                self.show(Note(f"{name} is in {self._run}."))
            except OSError as error:
                self.show(Note(f"{name} cannot be written: {error}"))

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

    def close(self, failed: bool = True) -> None:
        """Ends the copies, which a later `restore` continues. Waits for a limited time until
        everything is sent.

        Args:
            failed: whether the loggers mark the run as failed.
        """
        self._close_file()
        for writer in self._writers:
            writer.close(failed)
        self._writers = []

    def _append(self, record: LogRecord) -> None:
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

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # unwritten lines are still in the records
                self._file.close()
            self._file = None

    def _behind(self, error: OSError) -> None:
        text = f"{METRICS_FILE} cannot be written ({error}): the next checkpoint rewrites it."
        self.show(Note(text))


def write_log(run: Storage, records: Iterable[Mapping[str, Any]]) -> None:
    """Rewrites metrics.jsonl; raises OSError."""
    run.write_atomic(METRICS_FILE, "".join(f"{json_of(each)}\n" for each in records).encode())
