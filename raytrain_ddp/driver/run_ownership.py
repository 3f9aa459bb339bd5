"""Holds a run while a command works on it: the lease, the name of a new run, its event log.

The log, ``events.jsonl``, is the history of the run:

    {"kind": "plan", "time": "2026-11-20T18:05:31Z", "start_step": 40, "world_size": 3, ...}
    {"kind": "checkpoint", "time": ..., "step": 60, "seconds": 0.2, "size_bytes": 1234}

metrics.jsonl does not depend on failures; this file does. It also proves, if all checkpoints
disappear, that there were some. A run that is refused before it begins leaves no file.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    checkpoint_store,
    read_history,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.driver.run_naming import (
    NamedRun,
    after_refusal,
    begun_from,
    claimed,
    new_code_note,
)
from raytrain_ddp.errors import RaytrainError, RunLockedError, status_of
from raytrain_ddp.events import STORED_EVENTS, End, Event, Note
from raytrain_ddp.ray_backend.failure_causes import failure_event, is_own_exit
from raytrain_ddp.records import event_line
from raytrain_ddp.signals import handling

Show = Callable[[Event], None]

_WRITE_S = 1.0  # time that a caller waits for the storage; slower writes continue in the background
_LAST_S = 30.0  # time that the end of a run waits for the storage


@contextmanager
def driven(run: NamedRun, show: Show) -> Iterator[tuple[NamedRun, Show]]:
    """Holds the lease of the run unless it is complete; yields the run and the receiver of its
    events.

    Yields another run if this one is new and another command took its name in the meantime.

    Raises:
        RunLockedError: like `owned`.
    """
    with ExitStack() as stack:
        tell = show
        while not run.is_complete:
            try:
                tell = stack.enter_context(owned(run, show))
                break
            except RunLockedError:
                other = after_refusal(run)
                if other is None:
                    raise
                run = other
        for text in filter(None, (run.note, new_code_note(run))):
            tell(Note(text))
        if run.branch is not None and run.manifest is None:
            run = begun_from(run, run.branch)
            tell(Note(f"run {run.config.name} {run.branch}"))
        yield run, tell


@contextmanager
def owned(run: NamedRun, show: Show) -> Iterator[Show]:
    """Holds the run's lease, and keeps its event log; yields the receiver of events.

    If a run is refused before it begins, its folder is removed.

    Raises:
        RunLockedError: another process trains this run; also raised by the yielded function, if
            another process has taken the run over because this one was suspended for too long.
    """

    def note(text: str) -> None:
        show(Note(text))

    folder = run.folder
    with (
        _sigterm_as_ctrl_c(),
        _no_empty_folders(folder),
        Lease.take(folder, note) as lease,
        claimed(run),
        EventLog(folder, show) as event_log,
    ):
        with suppress(OSError):
            folder.sweep()

        def tell(event: Event) -> None:
            lease.require()
            event_log(event)

        try:
            yield tell
        except RaytrainError as error:
            cause: dict[str, Any] = {k: v for k, v in error.cause.items() if v is not None}
            event_log(End(status_of(error), message=str(error), **cause))
            raise
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args and isinstance(stop.args[0], int) else 2
            event_log(End(128 + number))
            if folder.is_local:  # others may be why it is stopped
                for newest in checkpoint_store(folder).names()[:1]:
                    note(f"run the same command again to continue after step {newest.step}.")
            raise
        except (Exception, SystemExit) as error:  # of the user's code, in this process
            if not isinstance(error, SystemExit) or is_own_exit(error):
                event_log(failure_event(error))
            raise


def require_free(run: Storage) -> None:
    """Takes the lease of a run, and gives it back; leaves nothing behind.

    Raises:
        RunLockedError, PreflightError: like `Lease.take`.
    """
    with _no_empty_folders(run), Lease.take(run, lambda _: None):
        pass


def _sigterm_as_ctrl_c() -> AbstractContextManager[None]:
    """Treats SIGTERM like Ctrl-C until a session handles both, so the lease is given back."""

    def stop(number: int, _: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    is_unhandled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return handling([signal.SIGTERM] if is_unhandled else [], stop)


@contextmanager
def _no_empty_folders(run: Storage) -> Iterator[None]:
    """Removes folders that are created for the run in this context, if they stay empty."""
    above = [Path(run.path), *Path(run.path).parents] if run.is_local else []
    made = [folder for folder in above if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # stops at the first one that is not empty
            for folder in made:
                folder.rmdir()


class EventLog:
    """Records the events of a run, and forwards all of them; thread-safe.

    A thread does the writing, so slow storage does not delay events. Events are held back until the
    run has a config.toml. A log that cannot be written does not end the run.
    """

    def __init__(self, run: Storage, show: Show) -> None:
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
