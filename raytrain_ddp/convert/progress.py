"""Shows the progress of a conversion: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from raytrain_ddp.convert.shard_writer import MIB, Tell

_LINE_EVERY_S = 10.0


class Meter:
    """Shows images, images/s, MiB/s and the remaining time, on standard error."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def phase(self, title: str, images: int) -> Tell:
        """Starts a phase of the work, and returns the function to report its progress to."""
        counts = _Counts(title, images)
        progress = self._progress
        if progress is None:
            return counts.tell_in_lines
        task = progress.add_task(title, total=images, speed="")

        def tell(images: int, size: int) -> None:
            counts.add(images, size)
            progress.update(task, completed=counts.done, speed=counts.speed())

        return tell


@contextmanager
def shown() -> Iterator[Meter]:
    """A meter; on a terminal, it is cleared at the end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Meter(None)
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        yield Meter(progress)


class _Counts:
    def __init__(self, title: str, images: int) -> None:
        self._title, self._images = title, images
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
        return f"{self._new / seconds:,.0f} images/s, {self._bytes / MIB / seconds:,.1f} MiB/s"

    def tell_in_lines(self, images: int, size: int) -> None:
        self.add(images, size)
        now = time.monotonic()
        last = images > 0 and self.done == self._images
        if now - self._line < _LINE_EVERY_S and not last:
            return
        self._line = now
        left = (now - self._start) * (self._images - self.done) / max(self._new, 1)
        minutes, seconds = divmod(round(left), 60)
        line = f"{self._title} {self.done:,} of {self._images:,} images, {self.speed()}"
        line += "" if last else f", {minutes}:{seconds:02d} left"
        print(line, file=sys.stderr, flush=True)
