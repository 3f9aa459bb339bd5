"""Which of Ray's workers train, and how those that die are replaced.

Ray Train places its workers together, changes their number only by a restart of all, replaces those
that die one after another if each is a replica group, and ends all if a further one dies meanwhile.
Where the others continue without one that is missing, that is not enough: Ray Train places only the
first worker then. Each other one is an actor that trains as the workers of Ray Train do. It waits
for room, which an autoscaler sees, and joins the next generation: see membership/roster.py. If it
dies, the driver starts it again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, UserCallback
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.messages import ControllerStarted, Died, Placed
from raytrain_ddp.ray_backend import ray_private
from raytrain_ddp.ray_backend.placement import Layout, workers_that_fit
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.ray_backend.worker import WorkerSettings, train_as, train_on_worker
from raytrain_ddp.training.runtime.nccl_settings import collective_timeout, nccl_settings

_ABORT_S = 20.0  # while it starts workers, however long that takes, it handles no messages
_AGAIN_S = 2.0  # between two starts of a worker that cannot even begin
_MOST_CHARACTERS = 4000


class RayWorkers:
    """The workers of a run, as the driver sees them. If one dies, only that one is replaced; over
    NCCL, that needs `scaling.replace_workers` and a `scaling.hang_s` that ends hanging collectives.

    Args:
        layout: as it is configured. With MIN:MAX, as many as there is room for are started.
        given: what each worker receives, without `least` and `size`.

    Attributes:
        least: how many continue without the others until these are replaced; 0: all restart.
        size: how many there are at first, if those that die are replaced; else 0.
        are_single: some are placed one by one, of which Ray Train knows nothing.
    """

    def __init__(
        self, config: TrainConfig, run: Storage, layout: Layout, given: WorkerSettings
    ) -> None:
        self._config, self._run, self._layout = config, run, layout
        self.least = self.size = 0
        if _are_replaced(config, layout):
            self.least = 1 if config.exact and layout.least == layout.most else layout.least
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.size = max(layout.least, min(workers_that_fit(layout, nodes), layout.most))
        # Workers that are placed one by one could not keep a strict placement.
        strict = config.scaling.placement.startswith("STRICT")
        self.are_single = 0 < self.least < layout.most and not strict
        self._given = dataclasses.replace(given, least=self.least, size=self.size)
        self._singles = _SingleWorkers(self._given, layout, config.scaling.placement)
        self._controller: Any = None
        self._placement: Any = None

    def fit(self) -> None:
        """Places workers by Ray Train, and waits until they have ended.

        Raises:
            Exception: whatever ended Ray Train.
        """
        config, placed = self._config, self._layout
        if self.are_single:
            placed = dataclasses.replace(placed, least=1, most=1)
        parent, _, name = self._run.path.rstrip("/").rpartition("/")
        driver = ray.get_runtime_context().get_actor_id()
        trainer = ray_private.trainer_class()(
            train_on_worker,
            train_loop_config={"given": self._given},
            scaling_config=ScalingConfig(
                num_workers=placed.workers,
                use_gpu=placed.use_gpu,
                resources_per_worker=dict(placed.per_worker),
                placement_strategy=config.scaling.placement,
                elastic_resize_monitor_interval_s=config.scaling.resize_s,
            ),
            run_config=RunConfig(
                name=name,
                storage_path=parent,
                storage_filesystem=_memory(),
                # Ray replaces workers without limit; the driver's FailurePolicy decides when to
                # stop.
                failure_config=FailureConfig(
                    max_failures=-1,
                    max_preemption_failures=config.scaling.max_preemptions,
                    controller_failure_limit=-1,
                ),
                callbacks=[_FailureCallback(self._given.mailbox, driver)],
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
            torch_config=self._torch_config(),
        )
        trainer.fit()

    def _torch_config(self) -> Any:
        from ray.train.torch import TorchConfig

        backend = self._layout.backend
        if self.least:  # the workers make their process groups
            return ray_private.replacing_config(backend)
        if "nccl" not in backend:
            return TorchConfig(backend=backend)
        timeout_s = int(collective_timeout(self._config.scaling).total_seconds())
        return ray_private.nccl_config(backend, timeout_s, nccl_settings(self._config))

    def look(self, others_train: bool) -> None:
        """Starts workers that there is room for, and restarts dead ones; cheap to call often.

        Args:
            others_train: if not, Ray could give the room of the first workers to later ones.
        """
        if self.are_single:
            self._singles.look(1, self._given.most if others_train else self.size)

    def take(self, event: ControllerStarted | Placed) -> None:
        if isinstance(event, ControllerStarted):
            self._controller = event.actor
        else:
            self._placement = event.group

    def free_placement(self) -> None:
        """Frees the resources of workers whose controller did not, as it was killed: they would be
        reserved as long as this process lives."""
        with suppress(Exception):  # it is free, or there is none
            remove_placement_group(self._placement)

    def close(self) -> None:
        """Ends all workers. If Ray Train's controller were only killed, its resource request would
        remain."""
        self._singles.close()
        if self._controller is None:
            return
        with suppress(Exception):  # it, or all of Ray, has already ended
            try:
                ray_private.abort(self._controller, _ABORT_S)
            finally:
                ray.kill(self._controller)
                self.free_placement()


def _are_replaced(config: TrainConfig, layout: Layout) -> bool:
    """Whether the others keep their state if a worker dies."""
    wanted = config.scaling.replace_workers
    if "nccl" in layout.backend:
        wanted = wanted is True and bool(config.scaling.hang_s)
    if not wanted or layout.most == 1 or ray_private.replacing_config(layout.backend) is None:
        return False
    # Without notices of preemption, the workers cannot save their state in time.
    unwatched = os.environ.get(PREEMPTION_WATCHER) == "0"
    return unwatched or ray_private.draining_nodes() is not None


class _SingleWorkers:
    """Actors that are placed one by one."""

    def __init__(self, given: WorkerSettings, layout: Layout, placement: str) -> None:
        self._mailbox, self._given = given.mailbox, ray.put(given)
        self._wanted, self._spreads = dict(layout.per_worker), placement == "SPREAD"
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._started_at: dict[int, float] = {}
        self._training: dict[Any, int] = {}  # pending answer -> rank

    def look(self, first: int, end: int) -> None:
        """Starts those of the ranks from `first` to `end` that there are not; reports deaths."""
        for rank in range(first, end):
            since_s = time.monotonic() - self._started_at.get(rank, -math.inf)
            if rank not in self._actors and since_s > _AGAIN_S:
                self._start(rank)
        pending = [*self._training]
        for answer in ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else []:
            rank = self._training.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.RayError as error:
                died = _died({rank: error}, f" {answer.hex()}")
                self._mailbox.push.remote([died])
                with suppress(Exception):
                    ray.kill(self._actors.pop(rank))  # one that has only failed still lives

    def _start(self, rank: int) -> None:
        if rank not in self._groups and not self._spreads:
            self._groups[rank] = placement_group([self._wanted])
        place: Any = "SPREAD"
        if rank in self._groups:
            place = PlacementGroupSchedulingStrategy(self._groups[rank])
        actor = ray.remote(
            num_cpus=self._wanted["CPU"],
            num_gpus=self._wanted.get("GPU", 0),
            scheduling_strategy=place,
        )(SingleWorker).remote()
        self._actors[rank], self._started_at[rank] = actor, time.monotonic()
        self._training[actor.train.remote(self._given, rank)] = rank

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # all of Ray may have ended
                ray.kill(actor)
        for group in self._groups.values():
            with suppress(Exception):
                remove_placement_group(group)


class SingleWorker:
    """The actor; its name is that of its process."""

    def train(self, given: WorkerSettings, rank: int) -> None:
        train_as(given, rank)


class _FailureCallback(UserCallback):  # type: ignore[misc]
    """Reports workers that Ray Train finds dead, which cannot do so. Runs in its controller.

    Args:
        mailbox: handle of the Mailbox actor.
        driver: the driver's own actor id, if it is an actor.
    """

    def __init__(self, mailbox: Any, driver: str | None) -> None:
        self._mailbox, self._driver, self._reported = mailbox, driver, False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the controller: gives the driver a handle to it, which Ray Train does not offer."""
        self.__dict__ |= state
        context = ray.get_runtime_context()
        if not self._reported and context.get_actor_id() not in (None, self._driver):
            self._reported = True  # the controller passes copies to its workers
            handle = cloudpickle.dumps(context.current_actor)
            self._mailbox.push.remote([ControllerStarted(handle)])

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called at each check that finds dead workers; the driver handles each death once."""
        self._mailbox.push.remote([_died(worker_exceptions)])


def _died(exceptions: dict[int, Exception], suffix: str = "") -> Died:
    """What Ray says of dead workers, by rank, and which of them died with a node whose preemption
    had been announced."""
    texts, preempted = {}, []
    for rank, error in exceptions.items():
        inner = ray_private.underlying(error)
        texts[rank] = f"{type(inner).__name__}: {error}"[:_MOST_CHARACTERS] + suffix
        if isinstance(inner, RayActorError) and inner.preempted:
            preempted.append(rank)
    return Died(texts, preempted)


def _memory() -> Any:
    """Keeps what Ray Train writes of a run in its controller's memory.

    In the run's storage it would be written without retries, so a single storage failure would
    end the run.
    """
    import fsspec  # type: ignore[import-untyped]
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(fsspec.filesystem("memory")))
