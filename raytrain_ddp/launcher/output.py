"""Forwards the scripts' output to the console and to files, and remembers the last lines."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from raytrain_ddp.launcher.tracebacks import PrintedTraceback, TracebackFinder

_LAST = 20
_BEHIND_BYTES = 1 << 17  # not yet written to the console
_HURRY_S = 2.0
_REDRAW_S = 1.0  # how often a progress bar (carriage returns, no line ends) is shown
_LONGEST_BYTES = 1 << 20  # of a line; a longer one is shown in pieces
STREAMS = ("stdout", "stderr")

Shown = Callable[[int, str], bool]


class Output:
    """The output of one attempt. On exit it is written completely, even if the console is slow.

    Args:
        shown: whether a rank's stream (``stdout``, ``stderr``) goes to the console.
        folder: of the files RANK/stdout.log and RANK/stderr.log, or None. They contain exactly the
            bytes that the scripts wrote.
        hurried: whether the user wants to stop, so that a blocked console is abandoned.
        prefix: printed before each line of a rank on the console.
    """

    def __init__(
        self,
        shown: Shown,
        folder: Path | None,
        hurried: Callable[[], object] = lambda: False,
        prefix: Callable[[int], str] = lambda rank: f"[rank {rank}] ",
    ) -> None:
        self._shown, self._folder, self._hurried = shown, folder, hurried
        self._prefix = prefix
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._open = ExitStack()
        self._lines: dict[tuple[int, str], _Lines] = {}
        self._last: dict[int, deque[str]] = {}
        self._watches: dict[int, TracebackFinder] = {}
        # Written in a thread, so that a slow terminal does not block reading from the ranks.
        self._texts: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._put_bytes = self._written_bytes = 0
        self._broken: OSError | None = None
        self._console = threading.Thread(target=self._write, name="console", daemon=True)

    def __enter__(self) -> Output:
        self._console.start()
        return self

    def __exit__(self, *_: object) -> None:
        for (rank, stream), lines in self._lines.items():
            self._say(rank, stream, lines.rest(), lines.at)
        self._texts.put(None)
        deadline = float("inf")
        while self._console.is_alive() and time.monotonic() < deadline:
            self._console.join(0.1)
            if self._hurried():
                deadline = min(deadline, time.monotonic() + _HURRY_S)
        self._open.close()

    @property
    def behind(self) -> bool:
        """Whether the console is so far behind that no more output should be requested. If its
        reader is gone, `take` reports it."""
        return self._broken is None and self._put_bytes - self._written_bytes > _BEHIND_BYTES

    def take(self, rank: int, stream: str, data: bytes, at: float) -> None:
        """Handles data that a rank wrote to stdout or stderr, at time `at` of its machine.

        Raises:
            OSError: the reader of the console is gone.
        """
        if self._broken is not None:
            raise self._broken
        if self._folder is not None:
            self._write_file(rank, stream, data)
        lines = self._lines.setdefault((rank, stream), _Lines())
        self._say(rank, stream, lines.take(data, at), at)

    def open_files(self, ranks: Sequence[int]) -> None:
        """Creates the files of these ranks, even if they never print anything."""
        for rank in ranks if self._folder is not None else ():
            for stream in STREAMS:
                self._file(rank, stream)

    def last(self, rank: int) -> Sequence[str]:
        """The last lines of a rank."""
        return list(self._last.get(rank, ()))

    def raised(self, rank: int) -> PrintedTraceback | None:
        """The traceback that best explains how a rank ended, if any."""
        watch = self._watches.get(rank)
        return watch.raised if watch is not None else None

    def _say(self, rank: int, stream: str, lines: Sequence[bytes], at: float) -> None:
        drawn = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)  # by a terminal
        texts = [line.decode(errors="replace") for line in drawn]
        watch = self._watches.setdefault(rank, TracebackFinder())
        for text in texts:
            watch.line(stream, text, at)
        self._last.setdefault(rank, deque(maxlen=_LAST)).extend(texts[-_LAST:])
        if texts and self._shown(rank, stream):
            prefix = self._prefix(rank)
            shown = "".join(f"{prefix}{text}\n" for text in texts).encode(errors="replace")
            self._put_bytes += len(shown)
            self._texts.put((1 + STREAMS.index(stream), shown))

    def _write(self) -> None:
        while (text := self._texts.get()) is not None:
            rest = text[1]
            try:
                while rest:  # not through sys.stdout, whose lock this would hold at exit
                    rest = rest[os.write(text[0], rest) :]
            except OSError as error:
                self._broken = error
                return
            self._written_bytes += len(text[1])

    def _write_file(self, rank: int, stream: str, data: bytes) -> None:
        try:
            file = self._file(rank, stream)
            file.write(data)
            file.flush()
        except OSError as error:  # not a reason to end the scripts
            text = f"run: cannot write to {self._folder}, so no more output is saved: {error}\n"
            self._texts.put((2, text.encode(errors="replace")))
            self._folder = None

    def _file(self, rank: int, stream: str) -> BinaryIO:
        file = self._files.get((rank, stream))
        if file is None:
            assert self._folder is not None
            folder = self._folder / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{stream}.log"
            file = self._files[rank, stream] = self._open.enter_context(path.open("wb"))
        return file


class _Lines:
    """Splits a stream into lines. Of a progress bar, only an occasional line is shown."""

    def __init__(self) -> None:
        self.at = 0.0
        self._kept: list[bytes] = []  # of an incomplete line
        self._kept_bytes = 0
        self._drawn_at = float("-inf")

    def take(self, data: bytes, at: float) -> list[bytes]:
        """The lines that these data complete."""
        self.at = at
        whole, newline, rest = data.rpartition(b"\n")
        lines = b"".join([*self._taken(), whole]).split(b"\n") if newline else []
        if b"\r" in rest:
            text = b"".join([*self._taken(), rest])
            bar = text.rstrip(b"\r")
            shown, _, now = bar.rpartition(b"\r")
            rest = now + text[len(bar) :]  # earlier text is overwritten
            if shown and at - self._drawn_at > _REDRAW_S:
                lines.append(shown)
        self._kept.append(rest)
        self._kept_bytes += len(rest)
        if self._kept_bytes > _LONGEST_BYTES:
            lines += self.rest()
        if lines:
            self._drawn_at = at
        return lines

    def rest(self) -> list[bytes]:
        """The incomplete last line, at the end of the stream."""
        text = b"".join(self._taken())
        return [text] if text else []

    def _taken(self) -> list[bytes]:
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        return kept
