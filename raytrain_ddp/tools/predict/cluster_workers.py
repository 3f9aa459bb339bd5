"""Makes parts of the output on the nodes of a Ray cluster: an actor for each device.

`ray.util.ActorPool` also gives work to actors that have not started, and is lost with the first
that dies: here, only those that are ready get parts, and another makes those of a dead one.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_line
from raytrain_ddp.files import different
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.worker_process import enter_folder
from raytrain_ddp.tools.display.formatting import plural

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.part_maker import Job

_MAX_DEATHS = 3  # over the same part, or before a worker was ready
_START_S = 300.0  # for a worker, while none is ready
_MAX_PARTS = 32  # handed out at once
_KEPT = "Finished work is kept: the same command continues."


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


@dataclass
class PartActor:
    """A worker: it has the model on its device.

    Args:
        plan: that of the driver, as are `folder` and `import_paths`.
    """

    job: Job
    plan: Mapping[str, Any]
    places: Places
    folder: str
    import_paths: Sequence[str]

    def open(self) -> None:
        """Raises RaytrainError, naming the node, if the job cannot be done here."""
        enter_folder(self.folder, self.import_paths)
        from raytrain_ddp.tools.predict.part_maker import PartMaker
        from raytrain_ddp.training.runtime.world import choose_device

        where, remedy = f"node {socket.gethostname()}", "use a shared folder or URIs."
        threads = max(1, int(self.places.cpus))
        try:
            self.maker = PartMaker(self.job, choose_device(self.places.device), threads)
        except RaytrainError as error:
            why = f"{error} All nodes must see the same files: {remedy}"
            raise type(error)(f"{where}: {why}") from None
        changes = "; ".join(different(self.plan, self.maker.plan()))
        if changes:
            raise DataError(f"{where} sees other files than this machine ({changes}): {remedy}")

    def made(self, parts: Sequence[int]) -> Iterator[Any]:
        """Yields the table of each part, in order."""
        yield from (table for _, table in self.maker.made(parts, lambda rows: None))


class Workers:
    """The actors of a job; the first of them is ready. `end` ends them.

    Args:
        parts: that will be made at most.
    """

    def __init__(
        self, job: Job, plan: Mapping[str, Any], places: Places, config: TrainConfig, parts: int
    ) -> None:
        import ray

        self._given = job, plan, places, str(Path.cwd()), import_paths(config)
        self._actor = ray.remote(num_cpus=places.cpus, num_gpus=places.gpus)(PartActor)
        self._count = min(places.count, parts)
        # By what each answers next, with the parts that it has not made: none while it starts;
        # then, the answer is a stream of their tables.
        self._workers: dict[Any, tuple[Any, deque[int]]] = {}
        self._deaths: Counter[int | None] = Counter()
        for _ in range(self._count):
            self._start()
        ray.wait([*self._workers], timeout=_START_S)

    def made(self, parts: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yields each of the parts and its table, in any order. The parts of a worker that died are
        made by another.

        Raises:
            RaytrainError: the job cannot be done, or workers die again and again.
        """
        import ray

        waiting = deque(parts)
        while (works := any(left for _, left in self._workers.values())) or waiting:
            ready, _ = ray.wait([*self._workers], timeout=None if works else _START_S)
            if not ready:
                raise PreflightError(
                    f"no worker started on the cluster within {_START_S:g} s: `ray status` shows "
                    f"what it lacks. {_KEPT}"
                )
            for reply in ready:
                actor, left = self._workers.pop(reply)
                try:
                    table = ray.get(next(reply) if left else reply)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    self._replace(actor, left[0] if left else None, error)
                    waiting.extendleft(reversed(left))
                    continue
                if left:
                    yield left.popleft(), table
                if left:
                    self._workers[reply] = actor, left  # after the others, so that all are heard
                elif waiting:
                    self._hand_out(actor, waiting)  # a worker without parts ends

    def _start(self) -> None:
        actor = self._actor.remote(*self._given)
        self._workers[actor.open.remote()] = actor, deque()

    def _hand_out(self, actor: Any, waiting: deque[int]) -> None:
        """Fewer parts at once toward the end, so that all workers end together."""
        share = min(max(1, len(waiting) // (2 * self._count)), _MAX_PARTS)
        left = deque(waiting.popleft() for _ in range(share))
        stream = actor.made.options(num_returns="streaming").remote([*left])
        self._workers[stream] = actor, left

    def _replace(self, actor: Any, part: int | None, error: Exception) -> None:
        self._deaths[part] += 1
        if self._deaths[part] >= _MAX_DEATHS:
            when = "before they were ready" if part is None else "over the same rows"
            text = f"{_MAX_DEATHS} workers died {when}: {first_line(error)}. {_KEPT}"
            raise RaytrainError(text)
        _kill(actor)
        self._start()

    def end(self) -> None:
        for actor, _ in self._workers.values():
            _kill(actor)


def _kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # it or the cluster is lost
        ray.kill(actor)
