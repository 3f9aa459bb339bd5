"""Where the scripts' lines go: the console, files, and the memory of the last ones."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

_LAST = 20
_BEHIND = 2_000  # lines that the console has not taken
_HURRY_S = 2.0
_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """The output of one attempt. At its end all is written, also where the console is slow.

    Args:
        shown: whether a rank's lines go to the console.
        folder: of the files RANK/stdout.log and RANK/stderr.log, or None.
        hurried: whether somebody wants it to end, so that a console that stands still is left.
    """

    def __init__(
        self,
        shown: Callable[[int], bool],
        folder: Path | None,
        hurried: Callable[[], object] = lambda: False,
    ) -> None:
        self._shown, self._folder, self._hurried = shown, folder, hurried
        self._files: dict[tuple[int, str], TextIO] = {}
        self._open = ExitStack()
        self._last: dict[int, deque[tuple[str, str]]] = {}
        self._raised_at: dict[int, float] = {}
        # Written by a thread: whoever listens to the ranks does not wait for a terminal.
        self._lines: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._broken: OSError | None = None
        self._console = threading.Thread(target=self._write, name="console", daemon=True)

    def __enter__(self) -> Output:
        self._console.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        deadline = float("inf")
        while self._console.is_alive() and time.monotonic() < deadline:
            self._console.join(0.1)
            if self._hurried():
                deadline = min(deadline, time.monotonic() + _HURRY_S)
        self._open.close()

    @property
    def behind(self) -> bool:
        """Whether the console has so much to write that no more lines should be asked for."""
        return self._lines.qsize() > _BEHIND

    def line(self, rank: int, stream: str, text: str, at: float) -> None:
        """Takes one line of a rank's stdout or stderr, printed at time `at` of its machine.

        Raises:
            OSError: nobody reads the console any more.
        """
        if self._broken is not None:
            raise self._broken
        self._last.setdefault(rank, deque(maxlen=_LAST)).append((stream, text))
        if stream == "stderr" and text.startswith(_TRACEBACK):
            self._raised_at[rank] = at
        if self._shown(rank):
            self._lines.put((1 if stream == "stdout" else 2, f"[rank {rank}] {text}\n"))
        if self._folder is not None:
            print(text, file=self._file(rank, stream), flush=True)

    def last(self, rank: int) -> Sequence[str]:
        """A rank's last lines; of stderr from its last traceback on, if there is one in them."""
        lines = list(self._last.get(rank, ()))
        starts = [i for i, (_, text) in enumerate(lines) if text.startswith(_TRACEBACK)]
        if not starts:
            return [text for _, text in lines]
        # What stdout said before it may come after it: these are two streams.
        return [text for stream, text in lines[starts[-1] :] if stream == "stderr"]

    def raised_at(self, rank: int) -> float | None:
        """When the last traceback of a rank began."""
        return self._raised_at.get(rank)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = line[1].encode(errors="replace")
            try:
                while rest:  # not through sys.stdout, which would wait for this at the very end
                    rest = rest[os.write(line[0], rest) :]
            except OSError as error:
                self._broken = error
                return

    def _file(self, rank: int, stream: str) -> TextIO:
        file = self._files.get((rank, stream))
        if file is None:
            assert self._folder is not None
            folder = self._folder / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            file = self._open.enter_context((folder / f"{stream}.log").open("w", encoding="utf-8"))
            self._files[rank, stream] = file
        return file
