"""A block that is redrawn in place, even if the terminal becomes narrower."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

BREAKING = (  # set by terminals that rewrap lines when they become narrower; xterm truncates them
    *("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "KONSOLE_VERSION", "WT_SESSION", "TERM_PROGRAM"),
    "ALACRITTY_WINDOW_ID",
)


class RedrawnBlock:
    """Draws the block; first erases rows of the previous one that a narrower terminal has wrapped
    and that rich would miss."""

    def __init__(self, block: Callable[[], Text]) -> None:
        self._block = block
        self._widths: list[int] = []  # widths of the lines drawn last
        self._breaks = any(name in os.environ for name in BREAKING)

    def is_broken(self, width: int) -> bool:
        return self._breaks and any(line > width for line in self._widths)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        if self.is_broken(options.max_width):
            rows = sum(max(1, -(-line // options.max_width)) for line in self._widths)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
            yield Control(*up * (rows - len(self._widths)))
        text = self._block()
        self._widths = [min(cell_len(line), options.max_width) for line in text.plain.split("\n")]
        yield text


class LastingStream:
    """A stream that discards output once its reader is gone: the terminal was closed, or Ctrl-C
    also ended ``| tee``. The run continues to its checkpoint."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._surviving():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError):  # buffered output would fail again when Python exits
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
