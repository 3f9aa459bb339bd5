"""What is measured of a loader: speed, CPU time, memory, and what it does to a loop beside it."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from data_decode import BATCH, SIZE

MIB = 2**20
DRAINED = 16  # batches: more than any loader here has ready


@dataclass(frozen=True)
class Size:
    """How much a job does.

    Args:
        folder: of data_images.py.
        warm: batches before anything is measured.
        images: loaded while it is measured.
        limit_s: a slow loader is measured for so long only.
    """

    folder: str
    warm: int
    images: int
    limit_s: float = 45.0

    @property
    def needed(self) -> int:
        """Images that a loader must have, so that it does not come to an end while measured."""
        return (self.warm + 2 * DRAINED + 128) * BATCH + 2 * self.images


def loads(contender: Any, size: Size) -> dict[str, Any]:
    """Import, first batch, speed, the same beside a busy loop, memory."""
    import_s = imported_s(contender.imports)
    alone_ms = timed_ms(small_operations, 40)
    clock = Clock()
    batches = contender.open(Path(size.folder), size.needed)
    first = next(batches)
    first_batch_s = clock.spent_s()
    try:
        check(first)
        if contender.from_start:
            idle = speed(batches, size, size.images, since=clock)
            return {
                "import_s": import_s,
                "first_batch_s": first_batch_s,
                **idle,
                **memory_of_tree(),
            }
        for _ in range(size.warm):
            next(batches)
        idle = speed(batches, size, size.images)
        busy = speed(batches, size, size.images // 2, small_operations)
        memory = peak_memory(batches, 2.0)
    finally:
        batches.close()
    return {
        "import_s": import_s,
        "first_batch_s": first_batch_s,
        **idle,
        "alone_ms": alone_ms,
        **{f"busy_{name}": value for name, value in busy.items()},
        **memory,
    }


def imported_s(modules: Sequence[str]) -> float:
    began = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    return time.perf_counter() - began


def check(batch: Any) -> None:
    """All have to deliver the same kind of batch, in either memory format."""
    import torch

    images = images_of(batch)
    shapes = ((BATCH, 3, SIZE, SIZE), (BATCH, SIZE, SIZE, 3))
    if tuple(images.shape) not in shapes or images.dtype != torch.uint8:
        raise ValueError(f"a batch of {tuple(images.shape)}, {images.dtype}")


def images_of(batch: Any) -> Any:
    """The images of (images, labels), or of images alone."""
    return batch[0] if isinstance(batch, tuple | list) else batch


class Clock:
    """Time and CPU time of the tree since it was made."""

    def __init__(self) -> None:
        self._cpu_s, self._began = tree_cpu_s(), time.perf_counter()

    def spent_s(self) -> float:
        return time.perf_counter() - self._began

    def cpu_s(self) -> float:
        return tree_cpu_s() - self._cpu_s


def speed(
    batches: Iterator[Any],
    size: Size,
    images: int,
    work: Callable[[], None] | None = None,
    since: Clock | None = None,
) -> dict[str, float]:
    """Images/s and CPU seconds per 1,000 images; with `work` after each batch also its median ms.

    Before `work` begins, what was made ahead is used up, so that it is not counted.

    Args:
        since: counts from there; one batch was already taken.
    """
    for _ in range(DRAINED if work else 0):
        next(batches)
    loaded = BATCH if since else 0
    work_s = []
    clock = since or Clock()
    while loaded < images and clock.spent_s() < size.limit_s:
        loaded += len(images_of(next(batches)))
        if work:
            began = time.perf_counter()
            work()
            work_s.append(time.perf_counter() - began)
    spent_s = clock.spent_s()
    found = {"images_per_s": loaded / spent_s, "cpu_s": 1000 * clock.cpu_s() / loaded}
    return {**found, "work_ms": 1e3 * median(work_s)} if work_s else found


def small_operations(count: int = 6000) -> None:
    """What the Python of a training loop does: small operations that give and take the GIL."""
    import torch

    x = torch.ones(64)
    seen = 0
    for number in range(count):
        x = x * 0.5 + 1.0
        seen += number % 7
    if seen < 0 or float(x[0]) > 3:
        raise AssertionError


def timed_ms(work: Callable[[], None], times: int) -> float:
    """The median of some runs, after a few that do not count."""
    spent_s = []
    for _ in range(times + 5):
        started = time.perf_counter()
        work()
        spent_s.append(time.perf_counter() - started)
    return 1e3 * median(spent_s[5:])


def tree() -> list[psutil.Process]:
    """This process and all below it."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def tree_cpu_s() -> float:
    """User and system time of the tree, with processes that have ended and were waited for."""
    total = 0.0
    for process in tree():
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def peak_memory(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """The most that is seen of `memory_of_tree` while loading on."""
    seen = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(memory_of_tree())
            stop.wait(0.2)

    looker = threading.Thread(target=look)
    looker.start()
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < seconds:
            next(batches)
    finally:
        stop.set()
        looker.join()
    return {name: max(found[name] for found in seen) for name in seen[0]}


def memory_of_tree() -> dict[str, float]:
    """Proportional set size now, and the sum of each process's peak RSS so far; MiB."""
    pss = sum(pss_of(process) for process in tree())
    rss = sum(peak_rss_of(process) for process in tree())
    return {"pss_mib": pss / MIB, "rss_mib": rss / MIB}


def pss_of(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def peak_rss_of(process: psutil.Process) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0
