"""Redirects what Ray prints in the driver to a file; what other threads print is left alone."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import TextIO

from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage


@contextmanager
def ray_output_to_file(run: Storage) -> Iterator[None]:
    """Redirects standard output and error of this thread, and of those that Ray starts, to the
    run's logs/driver.log.

    A display created before keeps the terminal, as it writes to the stream itself.
    """
    path = Path(run.path) / LOGS / "driver.log" if run.is_local else Path("/dev/null")
    own = threading.current_thread()
    others = {t for t in threading.enumerate() if t is not own and not t.name.startswith("ray_")}
    with (
        _LazyFile(path) as log,
        redirect_stdout(_ByThread(log, sys.stdout, others)),
        redirect_stderr(_ByThread(log, sys.stderr, others)),
    ):
        yield


class _ByThread(io.TextIOBase):
    """Passes on what these threads write to the stream that it replaces, and the rest to a log."""

    def __init__(self, log: _LazyFile, replaced: TextIO, others: Collection[Thread]) -> None:
        self._log, self._replaced, self._others = log, replaced, others

    def write(self, text: str) -> int:
        is_other = threading.current_thread() in self._others
        return (self._replaced if is_other else self._log).write(text)

    def flush(self) -> None:
        if threading.current_thread() in self._others:
            self._replaced.flush()


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
