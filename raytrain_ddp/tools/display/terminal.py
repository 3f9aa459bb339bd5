"""What commands print on: lasting lines, and below them a block that is drawn again and again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.text import Text

from raytrain_ddp.formatting import format_seconds

_WIDTHS = 20, 1000
_NOTEBOOK_WIDTH = 100  # characters; a cell's output is usually wide enough
_ANY_WIDTH = 10**6


def terminal(**options: Any) -> Console:
    """Returns a rich console with a usable width, whatever COLUMNS or a tiny terminal says: with 0
    columns, rich would print nothing.

    Args:
        options: arguments of `Console`.
    """
    console = Console(**options)
    width = min(max(console.width or 80, _WIDTHS[0]), _WIDTHS[1])
    if width != console.width:
        console.width = width
    return console


class Screen:
    """Prints lines that last, and shows a block below them on a terminal and in a notebook.

    Elsewhere there is no block, and each line starts with the time that has passed.

    Args:
        block: what is shown now; also called by rich's thread, several times a second.
        console: default: standard output.
        live: whether to show the block. Default: on a capable terminal, and in a notebook.
        clock: seconds.
    """

    def __init__(
        self,
        block: Callable[[], RenderableType],
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_notebook = console is None and live is None and in_notebook()
        if is_notebook:
            console = Console(force_terminal=True, force_jupyter=False, width=_NOTEBOOK_WIDTH)
        self.console = console = console or terminal(file=sys.stdout)
        console.file = cast(IO[str], LastingStream(console.file))
        if live is None:  # isatty besides: FORCE_COLOR makes rich take a pipe for a terminal
            utf = console.encoding.startswith("utf")
            live = is_notebook or (utf and console.is_interactive and console.file.isatty())
        self.is_live, self._clock, self._began = live, clock, clock()
        drawn = _Block(block)
        self._live: Live = NotebookLive(drawn) if is_notebook else _terminal_live(drawn, console)

    def __enter__(self) -> Screen:
        if self.is_live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def waited_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._began

    def print(self, *parts: Text, copied: bool = False) -> None:
        """Prints a line, two spaces between its parts; a live one breaks between them first.

        Args:
            copied: a part may be copied, as a path or a command: no time in front, and parts are
                never broken.
        """
        text = _flow(parts, self.console.width if self.is_live else _ANY_WIDTH)
        if not self.is_live:  # no style: no control codes, not even where FORCE_COLOR is set
            since = "" if copied else f"{format_seconds(self.waited_s):>7}  "
            encoding = self.console.encoding
            text = Text((since + text.plain).encode(encoding, "replace").decode(encoding))
        self.console.print(text, soft_wrap=copied or not self.is_live, highlight=False)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, VS Code, Colab)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookLive(Live):
    """A rich Live whose block is an output of the cell, which is updated and at the end empty.

    rich's own needs ipywidgets, and takes lines that are printed during an update into its block.
    """

    def __init__(self, block: RenderableType) -> None:
        self._output: Any = None
        super().__init__(
            block, console=Console(quiet=True, force_jupyter=False), refresh_per_second=2
        )

    def refresh(self) -> None:
        from IPython.display import display

        shown = self.get_renderable() if self.is_started else Text("")
        if self._output is None:
            self._output = display(shown, display_id=True)
        else:
            self._output.update(shown)


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


class _Block(JupyterMixin):
    """Calls a function for what to draw."""

    def __init__(self, block: Callable[[], RenderableType]) -> None:
        self._block = block

    def __rich__(self) -> RenderableType:
        return self._block()


def _terminal_live(block: RenderableType, console: Console) -> Live:
    return Live(block, console=console, refresh_per_second=8, transient=True)


def _flow(parts: Sequence[Text], width: int, indent: int = 4) -> Text:
    """The parts, two spaces between them, in as many lines as they need."""
    out, column = Text(), 0
    for part in parts:
        fits = column + 2 + part.cell_len <= width
        gap = "" if not column else "  " if fits else "\n" + " " * indent
        column = part.cell_len + (column + len(gap) if fits or not column else indent)
        out.append(gap).append_text(part)
    return out
