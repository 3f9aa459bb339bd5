"""Where the scripts' lines go: the console, files, and the memory of the last ones."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

_LAST = 20
_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """The output of one attempt.

    Args:
        shown: whether a rank's lines go to the console.
        folder: of the files RANK/stdout.log and RANK/stderr.log, or None.
    """

    def __init__(self, shown: Callable[[int], bool], folder: Path | None) -> None:
        self._shown, self._folder = shown, folder
        self._files: dict[tuple[int, str], TextIO] = {}
        self._open = ExitStack()
        self._last: dict[int, deque[str]] = {}
        self._raised_at: dict[int, float] = {}

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def line(self, rank: int, stream: str, text: str, at: float) -> None:
        """Takes one line of a rank's stdout or stderr, printed at time `at`."""
        self._last.setdefault(rank, deque(maxlen=_LAST)).append(text)
        if stream == "stderr" and text.startswith(_TRACEBACK):
            self._raised_at[rank] = at
        if self._shown(rank):
            console = sys.stdout if stream == "stdout" else sys.stderr
            print(f"[rank {rank}] {text}", file=console, flush=True)
        if self._folder is not None:
            print(text, file=self._file(rank, stream), flush=True)

    def last(self, rank: int) -> Sequence[str]:
        """A rank's last lines; from its last traceback on, if there is one in them."""
        lines = list(self._last.get(rank, ()))
        starts = [i for i, text in enumerate(lines) if text.startswith(_TRACEBACK)]
        return lines[starts[-1] :] if starts else lines

    def raised_at(self, rank: int) -> float | None:
        """When the last traceback of a rank began."""
        return self._raised_at.get(rank)

    def _file(self, rank: int, stream: str) -> TextIO:
        file = self._files.get((rank, stream))
        if file is None:
            assert self._folder is not None
            folder = self._folder / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            file = self._open.enter_context((folder / f"{stream}.log").open("w", encoding="utf-8"))
            self._files[rank, stream] = file
        return file
