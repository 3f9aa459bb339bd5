"""Redirects what Ray prints in the driver to a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage


@contextmanager
def ray_output_to_file(run: Storage) -> Iterator[None]:
    """Redirects standard output and error of this process to the run's logs/driver.log.

    A display created before keeps the terminal, as it writes to the stream itself.
    """
    path = Path(run.path) / LOGS / "driver.log" if run.is_local else Path("/dev/null")
    with _LazyFile(path) as log, redirect_stdout(log), redirect_stderr(log):
        yield


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
