"""Forwards the scripts' output to the console and to files, and remembers the last lines."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import BinaryIO

from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.run_options import RunFlags

_LAST = 30
_POLL_S, _HURRY_S = 0.1, 2.0
_REDRAW_S = 1.0
_MAX_LINE_BYTES = 1 << 16  # a longer line is shown in pieces
_FDS = {"stdout": 1, "stderr": 2}


def tell(text: str) -> None:
    """Shows a line of `run` itself."""
    print(f"run: {text}", file=sys.stderr, flush=True)


class Output:
    """The output of one attempt. It waits for a slow console, so that the scripts do, too.

    Args:
        folder: of the files RANK/stdout.log and RANK/stderr.log, or None. They contain exactly the
            bytes that the scripts wrote.
        hurried: whether the user wants to stop, so that a blocked console is abandoned.
    """

    def __init__(
        self,
        flags: RunFlags,
        workers: Sequence[Worker],
        folder: Path | None,
        hurried: Callable[[], object] = lambda: False,
    ) -> None:
        self._flags, self._workers, self._hurried = flags, workers, hurried
        self._abandoned_at = float("inf")
        self._last: list[deque[str]] = [deque(maxlen=_LAST) for _ in workers]
        self._lines = {(w.rank, stream): _Lines() for w in workers for stream in _FDS}
        self._folder, self._files = folder, dict[tuple[int, str], BinaryIO]()
        for rank, stream in self._lines:
            self._save(rank, stream, b"")  # also of those that never print anything

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files.values():
            file.close()
        for (rank, stream), lines in self._lines.items():
            if kind is None and lines.rest:
                self._say(rank, stream, [lines.rest])

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """Handles data that a rank wrote to stdout or stderr.

        Raises:
            OSError: the reader of the console is gone.
        """
        self._save(rank, stream, data)
        self._say(rank, stream, self._lines[rank, stream].take(data))

    def last(self, rank: int) -> Sequence[str]:
        """The last lines of a rank."""
        return [*self._last[rank]]

    def _say(self, rank: int, stream: str, lines: Sequence[bytes]) -> None:
        drawn = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)  # by a terminal
        texts = [line.decode(errors="replace") for line in drawn]
        self._last[rank].extend(texts)
        worker, flags = self._workers[rank], self._flags
        if flags.shown(rank, worker.local_rank, stream):
            prefix = Template(flags.log_line_prefix_template).safe_substitute(
                role_name=flags.role,
                rank=rank,
                local_rank=worker.local_rank,
                hostname=worker.seat.host,
            )
            self._show(_FDS[stream], "".join(f"{prefix}{text}\n" for text in texts))

    def _show(self, fd: int, text: str) -> None:
        """Writes to the console, unless it is blocked and the user wants to stop."""
        data = text.encode(errors="replace")
        while data:
            if self._hurried():
                self._abandoned_at = min(self._abandoned_at, time.monotonic() + _HURRY_S)
            is_late = time.monotonic() > self._abandoned_at
            if select.select([], [fd], [], 0 if is_late else _POLL_S)[1]:
                data = data[os.write(fd, data[: select.PIPE_BUF]) :]  # does not block
            elif is_late:
                return

    def _save(self, rank: int, stream: str, data: bytes) -> None:
        if self._folder is None:
            return
        try:
            if (rank, stream) not in self._files:
                path = self._folder / str(rank) / f"{stream}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[rank, stream] = path.open("wb")
            self._files[rank, stream].write(data)
            self._files[rank, stream].flush()
        except OSError as error:  # not a reason to end the scripts
            where, self._folder = self._folder, None
            self._show(2, f"run: cannot write to {where}, so no more output is saved: {error}\n")


class _Lines:
    """Splits a stream into lines. Of a progress bar (carriage returns, no line ends), only an
    occasional drawing is shown."""

    def __init__(self) -> None:
        self.rest = b""  # an incomplete line
        self._drawn_at = float("-inf")

    def take(self, data: bytes) -> list[bytes]:
        """The lines that these data complete."""
        now = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        bar = self.rest.rstrip(b"\r")
        shown, drawn, latest = bar.rpartition(b"\r")
        if drawn:  # earlier text is overwritten
            self.rest = latest + self.rest[len(bar) :]
            lines += [shown] if shown and now - self._drawn_at > _REDRAW_S else []
        elif len(self.rest) > _MAX_LINE_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        self._drawn_at = now if lines else self._drawn_at
        return lines
