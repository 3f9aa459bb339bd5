"""A process pool whose processes always end with this process, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from raytrain_ddp.convert.shard_writer import Tell
from raytrain_ddp.errors import RaytrainError

Task = TypeVar("Task")
Result = TypeVar("Result")

_TELL_EVERY_S = 0.5


class TaskRunner(Protocol):
    """Yields function(task, tell) for each task as it finishes, in any order."""

    def __call__(
        self, function: Callable[[Task, Tell], Result], tasks: Iterable[Task], tell: Tell
    ) -> Iterator[Result]: ...


class ProcessPool:
    """Runs tasks in processes, started when first needed; with 1 worker, in this process.

    Processes are spawned, not forked: a fork would copy locks held by this process's threads.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._context = multiprocessing.get_context("spawn")
        self._counts = self._context.Array("q", 2)  # images and bytes that tasks reported
        self._reported = (0, 0)
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> TaskRunner:
        return self._run

    def __exit__(self, *_: object) -> None:
        """Ends the processes, even in the middle of a task."""
        if "_pool" in vars(self):
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - self._others:
                child.terminate()
            self._pool.shutdown()

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._workers, self._context, _begin, (self._counts,))

    def _run(
        self, function: Callable[[Task, Tell], Result], tasks: Iterable[Task], tell: Tell
    ) -> Iterator[Result]:
        tasks = iter(tasks)
        first = list(islice(tasks, 2))
        if self._workers == 1 or len(first) < 2:
            yield from (function(task, tell) for task in chain(first, tasks))
            return
        tasks = chain(first, tasks)
        pending: set[Future[Result]] = set()
        try:
            while pending := pending | {
                self._pool.submit(_call, function, task)
                for task in islice(tasks, 2 * self._workers - len(pending))
            }:
                done, pending = wait(pending, _TELL_EVERY_S, FIRST_COMPLETED)
                self._pass_on(tell)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise RaytrainError(
                f"one of {self._workers} processes was killed, perhaps because memory ran out: use "
                "fewer with --workers. Run the same command again to continue."
            ) from None

    def _pass_on(self, tell: Tell) -> None:
        images, size = self._counts[:]
        tell(images - self._reported[0], size - self._reported[1])
        self._reported = (images, size)


_shared: Any = None  # in a worker process: images and bytes


def _begin(shared: Any) -> None:
    global _shared  # noqa: PLW0603 - a pool offers no other place for shared state
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process with its parent: a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[[Task, Tell], Result], task: Task) -> Result:
    def tell(images: int, size: int) -> None:
        with _shared.get_lock():
            _shared[0] += images
            _shared[1] += size

    return function(task, tell)
