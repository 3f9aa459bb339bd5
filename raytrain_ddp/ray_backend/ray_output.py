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
        redirect_stdout(_ByThread(path, sys.stdout, own)),
        redirect_stderr(_ByThread(path, sys.stderr, own)),
    ):
        yield


class _ByThread(io.TextIOBase):
    """Appends what one thread and Ray's write to a file, created then, and passes the rest to the
    stream it replaces. Errors of the file, such as a full disk, are ignored."""

    def __init__(self, path: Path, replaced: TextIO, own: Thread) -> None:
        self._path, self._replaced, self._own = path, replaced, own

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread is not self._own and not thread.name.startswith(("ray_", "ray-")):
            return self._replaced.write(text)
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        return len(text)

    def flush(self) -> None:
        if threading.current_thread() is not self._own:
            self._replaced.flush()
