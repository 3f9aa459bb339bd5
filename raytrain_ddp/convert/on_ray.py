"""Runs the tasks of `convert` as Ray tasks. The shards are the same as on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from raytrain_ddp.convert.process_pool import TaskRunner
from raytrain_ddp.convert.shard_writer import Tell
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.ray_backend.cluster import ray_connection

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def on_cluster(address: str, workers: int | None) -> Iterator[TaskRunner]:
    """Runs tasks on the cluster at `address`, or on the Ray that this process is connected to.

    Args:
        workers: maximum number of concurrent tasks; None: one per CPU.

    Raises:
        PreflightError: there is no Ray at the address.
        RaytrainError: a task failed repeatedly.
    """
    with ray_connection(address, {}, {}, tell=lambda _: None):
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 1))
        yield partial(_run, workers or 2 * cpus)  # some wait in line, for nodes that join


def _run(
    at_once: int,
    function: Callable[[Task, Tell], Result],
    tasks: Iterable[Task],
    tell: Tell,
) -> Iterator[Result]:
    import ray

    remote = ray.remote(num_cpus=1)(_call)
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
        reason = str(error).partition("\n")[0]
        raise RaytrainError(f"Ray lost a task: {reason}. Run the same command again.") from error
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)


def _call(function: Callable[[Task, Tell], Result], task: Task) -> tuple[Result, int, int]:
    """The result, and the numbers of images and bytes that `function` reported."""
    images = size = 0

    def tell(more_images: int, more_bytes: int) -> None:
        nonlocal images, size
        images += more_images
        size += more_bytes

    return function(task, tell), images, size
