"""What commands print on: lasting lines, and below them a block that is drawn again and again.

For images that are worked on, a bar with their speed; elsewhere, occasional lines.
"""

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
from rich.progress import Progress, TextColumn
from rich.text import Text

from raytrain_ddp.tools.formatting import format_seconds

Tell = Callable[[int, int], None]
"""Called with images and bytes that were just finished; 0 bytes: by an earlier process."""

_MIB = 2**20
_LINE_EVERY_S = 10.0
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


@contextmanager
def shown(unit: str = "images", sized: bool = True) -> Iterator[Callable[[str, int], Tell]]:
    """Shows images, images/s, MiB/s and the remaining time, on standard error; on a terminal, until
    the end.

    Args:
        unit: what is counted. sized: bytes are shown.

    Yields:
        A function that starts a phase of the work, by its title and its number of images, and
        returns the function to report its progress to.
    """
    console = terminal(stderr=True)
    *bar, left = Progress.get_default_columns()
    speed = TextColumn("{task.fields[speed]}")
    bars = Progress(*bar, speed, left, console=console, disable=not console.is_terminal)
    with bars:
        yield lambda title, images: _Meter(bars, title, images, unit, sized).tell


class _Meter:
    def __init__(self, bars: Progress, title: str, images: int, unit: str, sized: bool) -> None:
        self._bars, self._task = bars, bars.add_task(title, total=images, speed="")
        self._title, self._images, self._unit, self._sized = title, images, unit, sized
        self._done = self._new = self._bytes = 0
        self._start = self._line = time.monotonic()

    def tell(self, images: int, size: int) -> None:
        self._done += images
        if size:  # work of an earlier process is reported without bytes
            self._new += images
            self._bytes += size
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        speed = f"{self._new / seconds:,.0f} {self._unit}/s"
        speed += f", {self._bytes / _MIB / seconds:,.1f} MiB/s" if self._sized else ""
        self._bars.update(self._task, completed=self._done, speed=speed)
        last = images > 0 and self._done == self._images
        if self._bars.disable and (last or now - self._line >= _LINE_EVERY_S):
            self._line = now
            minutes, rest = divmod(
                round(seconds * (self._images - self._done) / max(self._new, 1)), 60
            )
            line = f"{self._title} {self._done:,} of {self._images:,} {self._unit}, {speed}"
            line += "" if last else f", {minutes}:{rest:02d} left"
            print(line, file=sys.stderr, flush=True)
