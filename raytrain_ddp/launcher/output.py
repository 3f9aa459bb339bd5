"""Forwards the scripts' output to the console and to files, and remembers the last lines."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from string import Template
from typing import BinaryIO

from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.run_options import RunFlags

_LAST = 30
_POLL_S, _HURRY_S = 0.1, 2.0
_REDRAW_S = 1.0  # how often a progress bar (carriage returns, no line ends) is shown
_MAX_LINE_BYTES = 1 << 20  # a longer line is shown in pieces
_STREAMS = ("stdout", "stderr")


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
        self._folder = folder
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._open = ExitStack()
        self._lines: dict[tuple[int, str], _Lines] = {}
        self._last: dict[int, deque[str]] = {}
        self._abandoned_at = float("inf")

    def __enter__(self) -> Output:
        for worker in self._workers if self._folder is not None else ():
            for stream in _STREAMS:  # also of those that never print anything
                self._save(worker.rank, stream, b"")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._open.close()
        for (rank, stream), lines in self._lines.items() if kind is None else ():
            self._say(rank, stream, lines.rest())

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """Handles data that a rank wrote to stdout or stderr.

        Raises:
            OSError: the reader of the console is gone.
        """
        self._save(rank, stream, data)
        lines = self._lines.setdefault((rank, stream), _Lines())
        self._say(rank, stream, lines.take(data))

    def last(self, rank: int) -> Sequence[str]:
        """The last lines of a rank."""
        return list(self._last.get(rank, ()))

    def _say(self, rank: int, stream: str, lines: Sequence[bytes]) -> None:
        drawn = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)  # by a terminal
        texts = [line.decode(errors="replace") for line in drawn]
        self._last.setdefault(rank, deque(maxlen=_LAST)).extend(texts[-_LAST:])
        worker = self._workers[rank]
        if texts and self._flags.shown(rank, worker.local_rank, stream):
            prefix = Template(self._flags.log_line_prefix_template).safe_substitute(
                role_name=self._flags.role,
                rank=rank,
                local_rank=worker.local_rank,
                hostname=worker.seat.host,
            )
            shown = "".join(f"{prefix}{text}\n" for text in texts)
            self._show(1 + _STREAMS.index(stream), shown.encode(errors="replace"))

    def _show(self, fd: int, data: bytes) -> None:
        """Writes to the console, unless it is blocked and the user wants to stop."""
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
                file = path.open("wb")
                self._files[rank, stream] = self._open.enter_context(file)
            self._files[rank, stream].write(data)
            self._files[rank, stream].flush()
        except OSError as error:  # not a reason to end the scripts
            text = f"run: cannot write to {self._folder}, so no more output is saved: {error}\n"
            self._show(2, text.encode(errors="replace"))
            self._folder = None


class _Lines:
    """Splits a stream into lines. Of a progress bar, only an occasional line is shown."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []  # of an incomplete line
        self._kept_bytes = 0
        self._drawn_at = float("-inf")

    def take(self, data: bytes) -> list[bytes]:
        """The lines that these data complete."""
        now = time.monotonic()
        whole, newline, rest = data.rpartition(b"\n")
        lines = b"".join([*self._taken(), whole]).split(b"\n") if newline else []
        if b"\r" in rest:
            text = b"".join([*self._taken(), rest])
            bar = text.rstrip(b"\r")
            shown, _, latest = bar.rpartition(b"\r")
            rest = latest + text[len(bar) :]  # earlier text is overwritten
            if shown and now - self._drawn_at > _REDRAW_S:
                lines.append(shown)
        self._kept.append(rest)
        self._kept_bytes += len(rest)
        if self._kept_bytes > _MAX_LINE_BYTES:
            lines += self.rest()
        if lines:
            self._drawn_at = now
        return lines

    def rest(self) -> list[bytes]:
        """The incomplete last line, at the end of the stream."""
        text = b"".join(self._taken())
        return [text] if text else []

    def _taken(self) -> list[bytes]:
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        return kept
