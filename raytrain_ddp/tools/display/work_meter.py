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
    if not console.is_terminal:
        yield lambda title, images: _Counts(title, images, unit, sized).tell_in_lines
        return
    *bar, left = Progress.get_default_columns()
    speed = TextColumn("{task.fields[speed]}")
    with Progress(*bar, speed, left, console=console) as progress:

        def phase(title: str, images: int) -> Tell:
            counts = _Counts(title, images, unit, sized)
            task = progress.add_task(title, total=images, speed="")

            def tell(images: int, size: int) -> None:
                counts.add(images, size)
                progress.update(task, completed=counts.done, speed=counts.speed())

            return tell

        yield phase


class _Counts:
    def __init__(self, title: str, images: int, unit: str, sized: bool) -> None:
        self._title, self._images, self._unit, self._sized = title, images, unit, sized
        self.done = self._new = self._bytes = 0
        self._start = self._line = time.monotonic()

    def add(self, images: int, size: int) -> None:
        self.done += images
        if size:  # work of an earlier process is reported without bytes
            self._new += images
            self._bytes += size

    def speed(self) -> str:
        """``412 images/s, 39.7 MiB/s``"""
        seconds = max(time.monotonic() - self._start, 1e-9)
        speed = f"{self._new / seconds:,.0f} {self._unit}/s"
        return speed + (f", {self._bytes / _MIB / seconds:,.1f} MiB/s" if self._sized else "")

    def tell_in_lines(self, images: int, size: int) -> None:
        self.add(images, size)
        now = time.monotonic()
        last = images > 0 and self.done == self._images
        if now - self._line < _LINE_EVERY_S and not last:
            return
        self._line = now
        left = (now - self._start) * (self._images - self.done) / max(self._new, 1)
        minutes, seconds = divmod(round(left), 60)
        line = f"{self._title} {self.done:,} of {self._images:,} {self._unit}, {self.speed()}"
        line += "" if last else f", {minutes}:{seconds:02d} left"
        print(line, file=sys.stderr, flush=True)
