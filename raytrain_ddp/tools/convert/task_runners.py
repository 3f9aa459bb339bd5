"""Runs the tasks of `convert` in processes or as Ray tasks; the shards are the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from raytrain_ddp.errors import RaytrainError, first_line
from raytrain_ddp.tools.convert.shard_writer import Tell

Task = TypeVar("Task")
Result = TypeVar("Result")

_TELL_EVERY_S = 0.5


class TaskRunner(Protocol):
    """Yields function(task, tell) for each task as it finishes, in any order."""

    def __call__(
        self, function: Callable[[Task, Tell], Result], tasks: Iterable[Task], tell: Tell
    ) -> Iterator[Result]: ...


class ProcessPool:
    """Runs tasks in processes, started when first needed; with 1 worker, in this process. They end
    with this process, however it ends.

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


# ------------------------------------------------------------------ Ray


@contextmanager
def on_cluster(address: str, workers: int | None) -> Iterator[TaskRunner]:
    """Runs tasks on the cluster at `address`, or on the Ray that this process is connected to.

    Args:
        workers: maximum number of concurrent tasks; None: one per CPU.

    Raises:
        PreflightError: there is no Ray at the address.
        RaytrainError: a task failed repeatedly.
    """
    # Here: the processes of a pool, which import this file, do without it.
    from raytrain_ddp.ray_backend.cluster import ray_connection

    with ray_connection(address, {}, {}, tell=lambda _: None):
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 1))
        yield partial(_run_on_ray, workers or 2 * cpus)  # some wait in line, for nodes that join


def _run_on_ray(
    at_once: int, function: Callable[[Task, Tell], Result], tasks: Iterable[Task], tell: Tell
) -> Iterator[Result]:
    import ray

    remote = ray.remote(num_cpus=1)(_counted)
    tasks = iter(tasks)
    pending: list[Any] = []
    try:
        while pending := pending + [
            remote.remote(function, task) for task in islice(tasks, at_once - len(pending))
        ]:
            done, pending = ray.wait(pending)
            for result, images, size in ray.get(done):
                tell(images, size)
                yield result
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)  # the exception of the function
        if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        reason = first_line(error)
        raise RaytrainError(f"Ray lost a task: {reason}. Run the same command again.") from error
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)


def _counted(function: Callable[[Task, Tell], Result], task: Task) -> tuple[Result, int, int]:
    """The result, and the numbers of images and bytes that `function` reported."""
    images = size = 0

    def tell(more_images: int, more_bytes: int) -> None:
        nonlocal images, size
        images += more_images
        size += more_bytes

    return function(task, tell), images, size
