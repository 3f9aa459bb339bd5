"""Brings the records of a log to a place that may not answer, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from raytrain_ddp.events import LogRecord, Note
from raytrain_ddp.messages import Event
from raytrain_ddp.training.trackers import Logger, Open

_LAST_S = 30.0  # that the end of a run waits for a place
_MOST = 200  # letters of a reason


class _Word(NamedTuple):
    """A record, or without one: try again, if the place had failed by then. `known`: how many
    records there were."""

    known: int
    record: LogRecord | None
    said_s: float


class BackgroundWriter:
    """Opens a place for the first record, and hands it each one; the training waits for nothing.

    W&B needs 90 s to find that its server does not answer, MLflow four minutes. A place that has
    failed is opened anew, with all records, when that is asked for.

    Args:
        name: of the place.
        records: those of the log, also as it grows.
        tell: is given a note when the place has failed, from another thread.
    """

    def __init__(
        self,
        name: str,
        opened: Open,
        records: Sequence[LogRecord],
        tell: Callable[[Event], None],
    ) -> None:
        self._name, self._open, self._records, self._tell = name, opened, records, tell
        self._words: SimpleQueue[_Word | None] = SimpleQueue()
        self._logger: Logger | None = None
        self._failed_s, self._reason = -1.0, ""
        self._thread: threading.Thread | None = None
        self._run_failed = False

    def add(self, record: LogRecord) -> None:
        """The newest of the records; not before there is one is the place opened."""
        self._words.put(_Word(len(self._records), record, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def again(self) -> None:
        """If the place has failed, it is tried again."""
        if self._thread is not None:
            self._words.put(_Word(len(self._records), None, time.monotonic()))

    def close(self, failed: bool) -> None:
        """Waits until all has arrived, but not for ever; `failed`: see `Logger.close`."""
        if self._thread is None:
            return
        self._run_failed = failed
        self._words.put(None)
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            within = f"within {_LAST_S:.0f} s: some may be missing there."
            self._note(f"{self._name} has not taken in all {within}")
        self._tell = lambda _: None

    def _work(self) -> None:
        first = True
        while (word := self._words.get()) is not None:
            if self._logger is not None:
                if word.record is not None:
                    self._try(self._logger.add, word.record)
            elif first or (word.record is None and word.said_s > self._failed_s):
                first = False
                self._try(self._begin, word.known)
        self._drop()

    def _begin(self, known: int) -> None:
        self._logger = self._open(self._records[:known])
        self._reason = ""

    def _try(self, act: Callable[..., None], *given: object) -> None:
        try:
            act(*given)
        except Exception as error:  # of any library
            reason = " ".join(str(error).split()) or type(error).__name__
            self._drop()
            self._failed_s = time.monotonic()
            if reason != self._reason:  # told once, however often it is tried
                self._reason = reason
                short = reason if len(reason) <= _MOST else f"{reason[:_MOST]} ..."
                text = f"{self._name} has failed ({short}): "
                self._note(f"{text}it is tried again with each checkpoint.")

    def _drop(self) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            with suppress(Exception):
                logger.close(self._run_failed)

    def _note(self, text: str) -> None:
        with suppress(Exception):
            self._tell(Note(text))
