"""Redirects what Ray prints in the driver to a file; what other threads print is left alone."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import TextIO

from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage


@contextmanager
def ray_output_to_file(run: Storage) -> Iterator[None]:
    """Redirects standard output and error of this thread, and of Ray's, to the run's
    logs/driver.log.

    A display created before keeps the terminal, as it writes to the stream itself.
    """
    path = Path(run.path) / LOGS / "driver.log" if run.is_local else Path("/dev/null")
    own = threading.current_thread()
    with (
        _LazyFile(path) as log,
        redirect_stdout(_ByThread(log, sys.stdout, own)),
        redirect_stderr(_ByThread(log, sys.stderr, own)),
    ):
        yield


class _ByThread(io.TextIOBase):
    """Writes what one thread and Ray's write to a log, and the rest to the stream it replaces."""

    def __init__(self, log: _LazyFile, replaced: TextIO, own: Thread) -> None:
        self._log, self._replaced, self._own = log, replaced, own

    def write(self, text: str) -> int:
        return (self._log if self._is_logged() else self._replaced).write(text)

    def flush(self) -> None:
        if not self._is_logged():
            self._replaced.flush()

    def _is_logged(self) -> bool:
        thread = threading.current_thread()
        return thread is self._own or thread.name.startswith(("ray_", "ray-"))


class _LazyFile(io.TextIOBase):
    """A text file created at the first write; write errors, such as a full disk, are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.TextIOWrapper | None = None

    def write(self, text: str) -> int:
        if self.closed:
            return len(text)
        with suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(text)
        return len(text)

    def close(self) -> None:
        super().close()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
