"""Makes parts of the output on the nodes of a Ray cluster: an actor for each device."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_line
from raytrain_ddp.files import different
from raytrain_ddp.formatting import plural
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.worker_process import enter_folder
from raytrain_ddp.tools.predict.part_maker import Progress

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.part_maker import Job

_MOST_DEATHS = 3  # over the same part, or before a worker was ready
_LOOK_EVERY_S = 5.0
_START_S = 300.0  # for the first worker, and after all have died
_TELL_EVERY_S = 0.5
_MOST_PARTS = 32  # handed out at once


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
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus and device != "cpu":
        shares = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU", 0) >= 1]
        share = min(shares)
        _require_places(workers, gpus, "GPUs")
        return Places(workers or gpus, "cuda", float(int(share)) if share >= 1 else share, 1.0)
    if device == "cuda":
        raise PreflightError("--device cuda: the cluster has no GPU.")
    cpus = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    if not cpus:
        raise PreflightError("the cluster has neither a GPU nor a CPU for workers.")
    _require_places(workers, sum(cpus), "CPUs")
    count, each = workers or len(cpus), min(cpus)
    while sum(own // each for own in cpus) < count:
        each -= 1
    return Places(count, "cpu", float(each), 0.0)


def _require_places(workers: int | None, have: int, what: str) -> None:
    if workers is not None and workers > have:
        raise PreflightError(f"--workers {workers}: the cluster has {have} {what}.")


@dataclass(frozen=True)
class _Given:
    """What a worker gets."""

    job: Job
    plan: Mapping[str, Any]
    device: str
    threads: int
    folder: str
    import_paths: Sequence[str]


class _PartActor:
    """A worker: it has the model on its device."""

    def __init__(self, given: _Given) -> None:
        self._given = given

    def open(self) -> None:
        """Raises RaytrainError, naming the node, if the job cannot be done here."""
        given = self._given
        enter_folder(given.folder, given.import_paths)
        from raytrain_ddp.tools.predict.part_maker import PartMaker
        from raytrain_ddp.training.runtime.world import choose_device

        where = f"node {socket.gethostname()}"
        try:
            maker = PartMaker(given.job, choose_device(given.device), given.threads)
        except RaytrainError as error:
            remedy = "All nodes must see the same files: use a shared folder or URIs."
            raise type(error)(f"{where}: {error} {remedy}") from None
        changes = different(given.plan, maker.plan(given.device))
        if changes:
            raise DataError(
                f"{where} sees other files than this machine ({'; '.join(changes)}): use a shared "
                "folder or URIs."
            )
        self._maker = maker

    def predict(self, parts: Sequence[int]) -> Iterator[Progress]:
        """Yields each part when it is complete, and progress in between."""
        rows, reported = 0, time.monotonic()
        for step in self._maker.made(parts):
            rows += step.rows
            if step.table is not None or time.monotonic() - reported > _TELL_EVERY_S:
                yield step._replace(rows=rows)
                rows, reported = 0, time.monotonic()
        if rows:
            yield Progress(rows)


@dataclass
class _Worker:
    """An actor, as the driver sees it.

    Args:
        reply: what it answers next: a reference until it is open, then a stream of `Progress`.
        left: parts that it has been given and that are not complete.
        rows: of the first of them, which are done.
    """

    actor: Any
    reply: Any
    is_open: bool = False
    left: deque[int] = field(default_factory=deque)
    rows: int = 0


@contextmanager
def working(
    job: Job, plan: Mapping[str, Any], places: Places, config: TrainConfig, parts: int
) -> Iterator[Callable[[Sequence[int]], Iterator[Progress]]]:
    """Starts workers, for this many parts, and waits for the first of them; ends them afterward.

    Yields:
        A function that makes parts, in any order. Parts of a worker that died are made again by
        another.

    Raises:
        RaytrainError: the job cannot be done, or workers die again and again; also when the
            function is used.
    """
    threads, here = max(1, int(places.cpus)), str(Path.cwd())
    team = _Team(_Given(job, plan, places.device, threads, here, import_paths(config)), places)
    try:
        team.begin(min(places.count, parts))
        yield lambda wanted: team.made(deque(wanted))
    finally:
        team.end()


class _Team:
    """The workers, and the parts that no one has been given yet."""

    def __init__(self, given: _Given, places: Places) -> None:
        self._given, self._places = given, places
        self._workers: list[_Worker] = []
        self._deaths: Counter[int | None] = Counter()
        self._seen = time.monotonic()  # when a worker was open

    def begin(self, count: int) -> None:
        for _ in range(count):
            self._start()
        while self._workers and not any(worker.is_open for worker in self._workers):
            for _ in self._listen(deque()):
                pass

    def made(self, waiting: deque[int]) -> Iterator[Progress]:
        while waiting or any(worker.left for worker in self._workers):
            self._hand_out(waiting)
            yield from self._listen(waiting)

    def _listen(self, waiting: deque[int]) -> Iterator[Progress]:
        """Waits for the next replies."""
        import ray

        replies = {worker.reply: worker for worker in self._workers if worker.reply is not None}
        ready, _ = ray.wait([*replies], timeout=_LOOK_EVERY_S)
        if any(worker.is_open for worker in self._workers):
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _START_S:
            raise PreflightError(
                f"no worker started on the cluster within {_START_S:g} s: `ray status` shows "
                "what it lacks. Finished work is kept: the same command continues."
            )
        for reply in ready:
            worker = replies[reply]
            self._workers.remove(worker)
            self._workers.append(worker)  # so that the others are heard before it is again
            yield from self._heard(worker, waiting)

    def _heard(self, worker: _Worker, waiting: deque[int]) -> Iterator[Progress]:
        import ray

        try:
            if not worker.is_open:
                ray.get(worker.reply)
                worker.is_open, worker.reply = True, None
                return
            progress: Progress = ray.get(next(worker.reply))
        except StopIteration:
            worker.reply = None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # an exception of our own code
            if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
                raise cause from None
            yield Progress(-worker.rows)
            self._lost(worker, waiting, error)
        else:
            worker.rows = 0 if progress.table is not None else worker.rows + progress.rows
            if progress.table is not None:
                worker.left.remove(progress.part)
            yield progress

    def _lost(self, worker: _Worker, waiting: deque[int], error: Exception) -> None:
        part = worker.left[0] if worker.left else None
        self._deaths[part] += 1
        if self._deaths[part] >= _MOST_DEATHS:
            when = "before they were ready" if part is None else "over the same rows"
            raise RaytrainError(
                f"{_MOST_DEATHS} workers died {when}: {first_line(error)}. Finished work is kept: "
                "the same command continues."
            )
        waiting.extendleft(reversed(worker.left))
        self._workers.remove(worker)
        _kill(worker)
        self._start()

    def _hand_out(self, waiting: deque[int]) -> None:
        """Fewer parts at once toward the end, so that all workers end together."""
        for worker in self._workers:
            if worker.is_open and worker.reply is None and waiting:
                share = len(waiting) // (2 * len(self._workers))
                count = min(max(1, share), _MOST_PARTS)
                worker.left = deque(waiting.popleft() for _ in range(count))
                method = worker.actor.predict.options(num_returns="streaming")
                worker.reply = method.remote([*worker.left])

    def _start(self) -> None:
        import ray

        needs = {"num_cpus": self._places.cpus, "num_gpus": self._places.gpus}
        actor = ray.remote(**needs)(_PartActor).remote(self._given)
        self._workers.append(_Worker(actor, actor.open.remote()))

    def end(self) -> None:
        for worker in self._workers:
            _kill(worker)


def _kill(worker: _Worker) -> None:
    import ray

    with suppress(Exception):  # it or the cluster is lost
        ray.kill(worker.actor)
