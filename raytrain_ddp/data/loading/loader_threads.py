"""Runs work in advance in threads, and yields the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class LoaderThreads:
    """The number of threads or processes that work in advance, and their limits.

    Args:
        most: the maximum number; 0: none, the consumer does the work.
        ahead: maximum number of prepared results per thread or process.
        ahead_bytes: maximum size of all prepared results, except one per thread or process.
    """

    most: int
    ahead: int = 4
    ahead_bytes: int = 2**30

    def room(self, largest_bytes: int) -> int:
        """The number of results that may be prepared.

        Args:
            largest_bytes: the size of the largest result; 0: unknown so far.
        """
        fitting = self.ahead_bytes // largest_bytes if largest_bytes else 0
        return max(self.most, min(self.most * self.ahead, fitting))


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
    pending: deque[Future[R]] = deque()
    largest = 0
    with ThreadPoolExecutor(threads.most, "loader", _one_torch_thread) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > threads.room(largest):
                    result = pending.popleft().result()
                    largest = max(largest, size_bytes(result))
                    yield result
            while pending:
                yield pending.popleft().result()
        finally:  # after an error, or if the consumer stopped: waits for running work
            for future in pending:
                future.cancel()


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
