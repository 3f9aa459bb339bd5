"""Writes ``events.jsonl``, the history of a run, in the process that drives it.

    {"kind": "plan", "time": "2026-11-20T18:05:31Z", "start_step": 40, "world_size": 3, ...}
    {"kind": "checkpoint", "time": ..., "step": 60, "seconds": 0.2, "size_bytes": 1234}

metrics.jsonl does not depend on failures; this file does. It also proves, if all checkpoints
disappear, that there were some. A run that is refused before it begins leaves no file.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, EVENTS_FILE, read_history
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.events import STORED_EVENTS, Event
from raytrain_ddp.records import event_line

_WRITE_S = 1.0  # time that a caller waits for the storage; slower writes continue in the background
_LAST_S = 30.0  # time that the end of a run waits for the storage


class EventLog:
    """Records the events of a run, and forwards all of them; thread-safe.

    A thread does the writing, so slow storage does not delay events. Events are held back until the
    run has a config.toml. A log that cannot be written does not end the run.
    """

    def __init__(self, run: Storage, show: Callable[[Event], None]) -> None:
        self._run, self._show = run, show
        # None ends the writer thread.
        self._orders: SimpleQueue[tuple[str, threading.Event] | None] = SimpleQueue()
        self._written = threading.Event()  # of the newest order
        self._written.set()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()
        self._held: list[str] = []  # not written yet
        self._begun = False
        self._file: list[str] | None = None  # all of its lines, if it cannot be appended to

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._order("")
        self._orders.put(None)
        self._thread.join(_LAST_S)

    def __call__(self, event: Event) -> None:
        self._show(event)  # storage errors are shown before they are written to that storage
        if isinstance(event, STORED_EVENTS):
            self._order(event_line(event))

    def _order(self, line: str) -> None:
        """Queues a line for writing and waits briefly, but not if the storage is already late."""
        is_late = not self._written.is_set()
        self._written = written = threading.Event()
        self._orders.put((line, written))
        if not is_late:
            written.wait(_WRITE_S)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            line, written = order
            self._held += [line] if line else []
            self._write()
            written.set()

    def _write(self) -> None:
        with suppress(OSError):
            self._begun = self._begun or self._run.exists(CONFIG_FILE)
            if not self._begun:
                return
            if self._run.is_local:
                self._append("".join(self._held).encode())
                self._held = []
                return
            if self._file is None:
                before = read_history(self._run, EVENTS_FILE)
                self._file = [json.dumps(event) + "\n" for event in before]
            if self._held:  # an object store cannot append: the file is rewritten
                whole = [*self._file, *self._held]
                self._run.write_atomic(EVENTS_FILE, "".join(whole).encode())
                self._file, self._held = whole, []

    def _append(self, lines: bytes) -> None:
        if not lines:
            return
        with Path(self._run.path, EVENTS_FILE).open("ab+", buffering=0) as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            torn = file.read(1) not in (b"", b"\n")  # by a kill
            data = (b"\n" if torn else b"") + lines
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # all of them are written again later
                raise
