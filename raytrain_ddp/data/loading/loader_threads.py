"""Runs work in advance in threads, and yields the results in order."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WAIT_SHARE = 0.02  # of the time: if the wait for data is longer, add threads
_LOOK_EVERY = 8  # results


@dataclass(frozen=True)
class LoaderThreads:
    """The number of threads or processes that work in advance, and their limits.

    Args:
        most: the maximum number; 0: none, the consumer does the work.
        begin: the initial number of threads; as long as the consumer has to wait, others start: as
            many as the wait so far suggests. None: all. (All processes start at once.)
        ahead: maximum number of prepared results per thread or process.
        ahead_bytes: maximum size of all prepared results, except one per thread or process.
    """

    most: int
    begin: int | None = None
    ahead: int = 4
    ahead_bytes: int = 2**30


def prefetched(
    items: Iterable[T],
    work: Callable[[T], R],
    threads: LoaderThreads,
    size_bytes: Callable[[R], int] = lambda _: 1,
) -> Generator[R, None, None]:
    """Yields work(item) in order; an exception of `work` is raised in its position."""
    if threads.most == 0:
        yield from map(work, items)
        return
    gate = Gate(threads)
    pending: deque[Future[R]] = deque()

    def gated(item: T) -> R:
        with gate.semaphore:
            if gate.closed:
                raise CancelledError
            return work(item)

    with ThreadPoolExecutor(threads.most, "loader", _one_torch_thread) as pool:
        try:
            for item in items:
                pending.append(pool.submit(gated, item))
                if len(pending) > gate.room:
                    yield gate.passed(pending.popleft(), size_bytes)
            while pending:
                yield gate.passed(pending.popleft(), size_bytes)
        finally:  # after an error, or if the consumer stopped: waits for running work
            gate.closed = True
            for future in pending:
                future.cancel()


class Gate:
    """Admits just enough threads to keep the consumer from waiting."""

    def __init__(self, threads: LoaderThreads) -> None:
        self.active = threads.most if threads.begin is None else threads.begin
        self.semaphore = Semaphore(self.active)
        self.closed = False
        self._threads = threads
        self._largest_bytes = 0
        self._results = 0
        self._waited, self._since = 0.0, time.monotonic()

    @property
    def room(self) -> int:
        """The number of results that may be pending."""
        most = self.active * self._threads.ahead
        if not self._largest_bytes:  # unknown so far
            return self.active
        return max(self.active, min(most, self._threads.ahead_bytes // self._largest_bytes))

    def passed(self, future: Future[R], size_bytes: Callable[[R], int]) -> R:
        """The result; admits other threads if too much of the time is spent waiting."""
        started = time.monotonic()
        result = future.result()
        now = time.monotonic()
        self._waited += now - started
        self._largest_bytes = max(self._largest_bytes, size_bytes(result))
        self._results += 1
        if self._results == 1:  # no thread is late
            self._waited, self._since = 0.0, now
        elif self._results % _LOOK_EVERY == 0:
            self._admit(now - self._since)
            self._waited, self._since = 0.0, now
        return result

    def _admit(self, passed_s: float) -> None:
        if self._waited <= _WAIT_SHARE * passed_s or self.active >= self._threads.most:
            return
        # Threads that were always busy took `passed_s`; the consumer alone needs less.
        consumed_s = max(passed_s - self._waited, 1e-9)
        wanted = min(self._threads.most, math.ceil(self.active * passed_s / consumed_s))
        self.semaphore.release(wanted - self.active)
        self.active = wanted


def one_ahead(results: Iterator[R]) -> Generator[R, None, None]:
    """Yields the results; a thread takes the next one meanwhile."""
    with ThreadPoolExecutor(1, "loader") as pool:
        coming = pool.submit(next, results, None)
        while (result := coming.result()) is not None:
            coming = pool.submit(next, results, None)
            yield result


def _one_torch_thread() -> None:
    """A loader thread must not start a thread pool for each image that it resizes."""
    import torch

    torch.set_num_threads(1)
