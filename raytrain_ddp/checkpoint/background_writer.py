"""Sends log records to a service that may not respond, in a background thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from raytrain_ddp.checkpoint.trackers import Logger, Open
from raytrain_ddp.events import Event, LogRecord, Note

_LAST_S = 30.0  # how long the end of a run waits for a service
_MOST = 200  # characters of an error message


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
        # The number of records, the newest or None (try again if it has failed), and when.
        self._queue: SimpleQueue[tuple[int, LogRecord | None, float] | None] = SimpleQueue()
        self._logger: Logger | None = None
        self._failed_s, self._reason = -math.inf, ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._run_failed = False

    def add(self, record: LogRecord) -> None:
        """Sends the newest of the records; the service is opened for the first one."""
        self._queue.put((len(self._records), record, time.monotonic()))
        if not self._thread.ident:
            self._thread.start()

    def again(self) -> None:
        """Tries again if the service has failed."""
        if self._thread.ident:
            self._queue.put((len(self._records), None, time.monotonic()))

    def close(self, failed: bool) -> None:
        """Waits until everything is sent, but not forever; `failed`: see `Logger.close`."""
        if not self._thread.ident:
            return
        self._run_failed = failed
        self._queue.put(None)
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            within = f"within {_LAST_S:.0f} s: records may be missing there."
            self._note(f"{self._name} did not accept all records {within}")
        self._tell = lambda _: None

    def _work(self) -> None:
        is_tried = False
        while (item := self._queue.get()) is not None:
            known, record, asked_s = item
            try:
                if self._logger is not None:
                    if record is not None:
                        self._logger.add(record)
                elif not is_tried or (record is None and asked_s > self._failed_s):
                    is_tried = True
                    self._logger, self._reason = self._open(self._records[:known]), ""
            except Exception as error:  # libraries raise any type
                self._failed(" ".join(str(error).split()) or type(error).__name__)
        self._drop()

    def _failed(self, reason: str) -> None:
        self._drop()
        self._failed_s = time.monotonic()
        if reason != self._reason:  # reported once, however often it is retried
            self._reason = reason
            short = reason if len(reason) <= _MOST else f"{reason[:_MOST]} ..."
            text = f"{self._name} has failed ({short}): it is retried with each checkpoint."
            self._note(text)

    def _drop(self) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            with suppress(Exception):
                logger.close(self._run_failed)

    def _note(self, text: str) -> None:
        with suppress(Exception):
            self._tell(Note(text))
