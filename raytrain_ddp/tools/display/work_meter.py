"""Shows how fast images are worked on: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress, TextColumn

from raytrain_ddp.tools.display.terminal import terminal

Tell = Callable[[int, int], None]
"""Called with images and bytes that were just finished; 0 bytes: by an earlier process."""

_MIB = 2**20
_LINE_EVERY_S = 10.0


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
