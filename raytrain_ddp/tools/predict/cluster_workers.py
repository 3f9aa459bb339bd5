"""Makes parts of the output on the nodes of a Ray cluster: an actor for each device.

`ray.util.ActorPool` also gives work to actors that have not started, and may never start.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_line
from raytrain_ddp.files import different
from raytrain_ddp.formatting import plural
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.worker_process import enter_folder

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.__main__ import PredictArgs
    from raytrain_ddp.tools.predict.part_maker import PartMaker

_MAX_RETRIES = 2  # of the parts that are handed out at once
_START_S = 300.0  # for a worker, while none is ready
_MAX_PARTS = 32  # handed out at once
_KEPT = "Finished work is kept: the same command continues."

Plan = Mapping[str, Any]  # of `PartMaker`


@dataclass(frozen=True)
class Places:
    """Where workers run: `count` of them, each on a `device` ("cuda" or "cpu")."""

    count: int
    device: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        """``4 workers, each with a GPU``"""
        each = "a GPU" if self.gpus else plural(int(self.cpus), "CPU")
        return f"{plural(self.count, 'worker')}{', each' * (self.count > 1)} with {each}"


def places_for(nodes: Sequence[Mapping[str, float]], workers: int | None, device: str) -> Places:
    """The workers on nodes with these resources: by default one for each GPU or, without GPUs, one
    for each node.

    Raises:
        PreflightError: there is no such device, or there are fewer than `workers` places.
    """
    gpus = 0 if device == "cpu" else sum(int(node.get("GPU", 0)) for node in nodes)
    cpus = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    if device == "cuda" and not gpus:
        raise PreflightError("--device cuda: the cluster has no GPU.")
    if not gpus and not cpus:
        raise PreflightError("the cluster has neither a GPU nor a CPU for workers.")
    most, what = (gpus, "GPUs") if gpus else (sum(cpus), "CPUs")
    if workers is not None and workers > most:
        raise PreflightError(f"--workers {workers}: the cluster has {most} {what}.")
    if gpus:
        share = min(n.get("CPU", 0) / n["GPU"] for n in nodes if n.get("GPU", 0) >= 1)
        return Places(workers or gpus, "cuda", float(int(share)) if share >= 1 else share, 1.0)
    count, each = workers or len(cpus), min(cpus)
    while sum(own // each for own in cpus) < count:
        each -= 1
    return Places(count, "cpu", float(each), 0.0)


class PartActor:
    """A worker: it has the model on its device.

    Args:
        plan: that of the driver, as are `folder` and the import `paths`.
    """

    def __init__(
        self, job: PredictArgs, plan: Plan, places: Places, folder: str, paths: Sequence[str]
    ) -> None:
        self._job, self._plan, self._places = job, plan, places
        enter_folder(folder, paths)

    @cached_property
    def _maker(self) -> PartMaker:
        from raytrain_ddp.tools.predict.part_maker import PartMaker
        from raytrain_ddp.training.runtime.world import choose_device

        where, remedy = f"node {socket.gethostname()}", "use a shared folder or URIs."
        device, threads = choose_device(self._places.device), max(1, int(self._places.cpus))
        try:
            maker = PartMaker(self._job, device, threads)
        except RaytrainError as error:
            why = f"{error} All nodes must see the same files: {remedy}"
            raise type(error)(f"{where}: {why}") from None
        changes = "; ".join(different(self._plan, maker.plan()))
        if changes:
            raise DataError(f"{where} sees other files than this machine ({changes}): {remedy}")
        return maker

    def open(self) -> None:
        """Raises RaytrainError, naming the node, if the job cannot be done here."""
        _ = self._maker

    def made(self, parts: Sequence[int]) -> Iterator[Any]:
        """Yields the table of each part, in order."""
        yield from (table for _, table in self._maker.made(parts, lambda rows: None))


def made_on_cluster(
    job: PredictArgs,
    plan: Plan,
    places: Places,
    config: TrainConfig,
    parts: Sequence[int],
) -> Generator[tuple[int, Any], None, None]:
    """Starts workers; when one is ready, returns a generator of each part and its table, in any
    order. Close it to end them.

    Raises:
        RaytrainError: the job cannot be done, or a worker dies again and again.
    """
    import ray

    restarts = {"max_restarts": -1, "max_task_retries": _MAX_RETRIES}  # those of a call
    kind = ray.remote(num_cpus=places.cpus, num_gpus=places.gpus, **restarts)(PartActor)
    given = job, plan, places, str(Path.cwd()), import_paths(config)
    actors = [kind.remote(*given) for _ in range(min(places.count, len(parts)))]
    opened = {actor.open.remote(): (actor, deque[int]()) for actor in actors}
    ray.wait([*opened], timeout=_START_S)
    return _made(opened, deque(parts))


def _made(
    workers: dict[Any, tuple[Any, deque[int]]], waiting: deque[int]
) -> Generator[tuple[int, Any], None, None]:
    """Hands out parts, fewer at once toward the end, so that all workers end together.

    Args:
        workers: by what each answers next, with the parts that it has not made: none while it
            starts; then, the answer is a stream of their tables.
    """
    import ray

    count = len(workers)
    try:
        while (works := any(left for _, left in workers.values())) or waiting:
            ready, _ = ray.wait([*workers], timeout=None if works else _START_S)
            if not ready:
                raise PreflightError(
                    f"no worker started on the cluster within {_START_S:g} s: `ray status` shows "
                    f"what it lacks. {_KEPT}"
                )
            for reply in ready:
                actor, left = workers.pop(reply)
                table = ray.get(next(reply) if left else reply)
                done = [left.popleft()] if left else []
                if left:
                    workers[reply] = actor, left  # after the others, so that all are heard
                elif waiting:
                    share = min(max(1, len(waiting) // (2 * count)), _MAX_PARTS)
                    left = deque(waiting.popleft() for _ in range(share))
                    stream = actor.made.options(num_returns="streaming").remote([*left])
                    workers[stream] = actor, left
                # A worker without parts ends, and leaves its place to one that restarts.
                yield from ((part, table) for part in done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        text = f"a worker died {_MAX_RETRIES + 1} times: {first_line(error)}. {_KEPT}"
        raise RaytrainError(text) from None
    finally:
        for actor, _ in workers.values():
            with suppress(Exception):  # it or the cluster is lost
                ray.kill(actor)
