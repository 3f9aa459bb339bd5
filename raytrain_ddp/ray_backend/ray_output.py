"""Redirects what Ray prints in the driver to a file; what other threads print is left alone."""

from __future__ import annotations

import io
import os
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
    own = threading.current_thread()
    with (
        _opened_log(run) as log,
        redirect_stdout(_ByThread(log, sys.stdout, own)),
        redirect_stderr(_ByThread(log, sys.stderr, own)),
    ):
        yield


def _opened_log(run: Storage) -> TextIO:
    if run.is_local:
        with suppress(OSError):
            folder = Path(run.path) / LOGS
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / "driver.log").open("a", encoding="utf-8", buffering=1)
    return open(os.devnull, "w", encoding="utf-8")


class _ByThread(io.TextIOBase):
    """Writes what one thread and Ray's write to a log, and the rest to the stream it replaces."""

    def __init__(self, log: TextIO, replaced: TextIO, own: Thread) -> None:
        self._log, self._replaced, self._own = log, replaced, own

    def write(self, text: str) -> int:
        if not self._is_logged():
            return self._replaced.write(text)
        with suppress(OSError, ValueError):  # a full disk; Ray's threads outlive the run
            self._log.write(text)
        return len(text)

    def flush(self) -> None:
        if not self._is_logged():
            self._replaced.flush()

    def _is_logged(self) -> bool:
        thread = threading.current_thread()
        return thread is self._own or thread.name.startswith(("ray_", "ray-"))
