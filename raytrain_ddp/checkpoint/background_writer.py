"""Sends log records to a service that may not respond, in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from raytrain_ddp.checkpoint.trackers import Logger, Open
from raytrain_ddp.events import LogRecord, Note
from raytrain_ddp.messages import Event

_LAST_S = 30.0  # how long the end of a run waits for a service
_MOST = 200  # characters of an error message


class _Item(NamedTuple):
    """A record, or None: try again if the service had failed by then. `known`: the number of
    records at that time."""

    known: int
    record: LogRecord | None
    said_s: float


class BackgroundWriter:
    """Opens a service at the first record, and sends it each one; training never waits for it.

    W&B takes 90 s to notice that its server does not respond, MLflow four minutes. A service that
    has failed is opened again on request, with all records.

    Args:
        name: the name of the service.
        records: the records of the log; the list keeps growing.
        tell: receives a note when the service has failed, from another thread.
    """

    def __init__(
        self, name: str, opened: Open, records: Sequence[LogRecord], tell: Callable[[Event], None]
    ) -> None:
        self._name, self._open, self._records, self._tell = name, opened, records, tell
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._logger: Logger | None = None
        self._failed_s, self._reason = -1.0, ""
        self._thread: threading.Thread | None = None
        self._run_failed = False

    def add(self, record: LogRecord) -> None:
        """Sends the newest of the records; the service is opened for the first one."""
        self._queue.put(_Item(len(self._records), record, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def again(self) -> None:
        """Tries again if the service has failed."""
        if self._thread is not None:
            self._queue.put(_Item(len(self._records), None, time.monotonic()))

    def close(self, failed: bool) -> None:
        """Waits until everything is sent, but not forever; `failed`: see `Logger.close`."""
        if self._thread is None:
            return
        self._run_failed = failed
        self._queue.put(None)
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            within = f"within {_LAST_S:.0f} s: records may be missing there."
            self._note(f"{self._name} did not accept all records {within}")
        self._tell = lambda _: None

    def _work(self) -> None:
        first = True
        while (item := self._queue.get()) is not None:
            if self._logger is not None:
                if item.record is not None:
                    self._try(self._logger.add, item.record)
            elif first or (item.record is None and item.said_s > self._failed_s):
                first = False
                self._try(self._begin, item.known)
        self._drop()

    def _begin(self, known: int) -> None:
        self._logger = self._open(self._records[:known])
        self._reason = ""

    def _try(self, act: Callable[..., None], *given: object) -> None:
        try:
            act(*given)
        except Exception as error:  # libraries raise any type
            reason = " ".join(str(error).split()) or type(error).__name__
            self._drop()
            self._failed_s = time.monotonic()
            if reason != self._reason:  # reported once, however often it is retried
                self._reason = reason
                short = reason if len(reason) <= _MOST else f"{reason[:_MOST]} ..."
                text = f"{self._name} has failed ({short}): "
                self._note(f"{text}it is retried with each checkpoint.")

    def _drop(self) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            with suppress(Exception):
                logger.close(self._run_failed)

    def _note(self, text: str) -> None:
        with suppress(Exception):
            self._tell(Note(text))
