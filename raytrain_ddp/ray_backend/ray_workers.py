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
import pickle
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
from pyarrow.fs import PyFileSystem
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, UserCallback
from ray.util import remove_placement_group

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import absolute_path
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import ControllerStarted, Died, Placed
from raytrain_ddp.membership.process_group import collective_timeout
from raytrain_ddp.ray_backend import ray_private
from raytrain_ddp.ray_backend.failure_causes import is_ended_for_memory
from raytrain_ddp.ray_backend.placement import Layout, workers_that_fit
from raytrain_ddp.ray_backend.train_report import RunFiles, train_and_report
from raytrain_ddp.ray_backend.worker import WorkerSettings, train_as

_AGAIN_S = 2.0  # between two starts of a worker that cannot even begin
_MOST_CHARACTERS = 4000

_RESTARTS_ALL = (
    "scaling.replace_workers = true has no effect here: all workers restart if one dies. Over "
    "NCCL, it needs scaling.hang_s above 0."
)


class RayWorkers:
    """The workers of a run, as the driver sees them. If one dies, only that one is replaced; over
    NCCL, that needs `scaling.replace_workers` and a `scaling.hang_s` that ends hanging collectives.

    Args:
        layout: the configured layout. With MIN:MAX, as many workers start as there is room for.
        given: what each worker receives, without what is chosen here.

    Attributes:
        size: how many workers there are at first, if dead ones are replaced; else 0.
        least_left: how many continue without the others while there is no room for these; 0: none.
        notes: what the user should know.
    """

    def __init__(
        self, config: TrainConfig, run: Storage, layout: Layout, given: WorkerSettings
    ) -> None:
        self._config, self._run, self._layout = config, run, layout
        least = self.size = 0
        if replaced := _are_replaced(config, layout):
            # Workers that are placed one by one could not keep a strict placement.
            is_strict = config.scaling.placement.startswith("STRICT")
            any_goes_on = config.exact and layout.least == layout.most and not is_strict
            least = 1 if any_goes_on else layout.least
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.size = max(layout.least, min(workers_that_fit(layout, nodes), layout.most))
        self.least_left = least if least < layout.most else 0
        self.notes = [_RESTARTS_ALL] if config.scaling.replace_workers is True else []
        if replaced or layout.most == 1:
            self.notes.clear()
        if replaced and self.size < layout.most:
            room = f"there is room for {self.size} of {layout.said}: others join when they fit"
            self.notes.append(room)
        self._given = dataclasses.replace(
            given,
            replaced=replaced,
            least=least,
            size=self.size,
            most=layout.most if replaced else 0,
            backend=layout.backend,
            limit_s=collective_timeout(config.scaling).total_seconds(),
        )
        self._singles = _SingleWorkers(self._given, layout, config.scaling.placement)
        self._controller: Any = None
        self._placement: Any = None

    def fit(self) -> bytes:
        """Places workers by Ray Train, and waits until they have ended. Returns its Result,
        pickled.

        Raises:
            Exception: whatever ended Ray Train.
        """
        self._free_placement()  # of a controller that was killed
        config, placed = self._config, self._layout
        if self.least_left:
            placed = dataclasses.replace(placed, least=1, most=1)
        parent, _, name = self._run.path.rstrip("/").rpartition("/")
        driver = ray.get_runtime_context().get_actor_id()
        files = PyFileSystem(RunFiles(absolute_path(config.storage)))
        trainer = ray_private.trainer_class()(
            train_and_report,
            train_loop_config={"given": self._given, "files": files},
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
                storage_filesystem=files,
                # Ray replaces workers without limit; the driver's FailurePolicy decides when to
                # stop.
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
                callbacks=[_FailureCallback(self._given.mailbox, driver)],
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
            torch_config=ray_private.torch_config(self._given.replaced),
        )
        return pickle.dumps(trainer.fit())

    def look(self, others_train: bool) -> None:
        """Starts workers that there is room for, and restarts dead ones; cheap to call often.

        Args:
            others_train: if not, Ray could give the room of the first workers to later ones.
        """
        if self.least_left:
            self._singles.look(range(1, self._given.most if others_train else self.size))

    def take(self, event: ControllerStarted | Placed) -> None:
        if isinstance(event, ControllerStarted):
            self._controller = event.actor
        else:
            self._placement = event.group

    def close(self) -> None:
        """Ends all workers, which Ray Train would restart as long as this process lives."""
        self._singles.close()
        if self._controller is not None:
            with suppress(Exception):  # it, or all of Ray, has already ended
                ray.kill(self._controller)
            self._free_placement()

    def _free_placement(self) -> None:
        """Frees the resources of workers whose controller did not, as it was killed: they would be
        reserved as long as this process lives."""
        with suppress(Exception):  # it is free, or there is none
            remove_placement_group(self._placement)


def _are_replaced(config: TrainConfig, layout: Layout) -> bool:
    """Whether the others keep their state if a worker dies."""
    wanted = config.scaling.replace_workers
    if "nccl" in layout.backend:
        wanted = wanted is True and bool(config.scaling.hang_s)
    return bool(wanted) and layout.most > 1 and ray_private.can_replace()


class _SingleWorkers:
    """Actors that are placed one by one."""

    def __init__(self, given: WorkerSettings, layout: Layout, placement: str) -> None:
        self._mailbox, self._given = given.mailbox, ray.put(given)
        wanted, spreads = layout.per_worker, placement == "SPREAD"
        self._options: dict[str, Any] = {
            "num_cpus": wanted["CPU"],
            "num_gpus": wanted.get("GPU", 0),
            "scheduling_strategy": "SPREAD" if spreads else "DEFAULT",
        }
        self._actors: dict[int, Any] = {}
        self._started_at: dict[int, float] = {}
        self._training: dict[Any, int] = {}  # pending answer -> rank

    def look(self, ranks: Iterable[int]) -> None:
        """Starts those of these ranks that have no actor, and reports deaths."""
        for rank in ranks:
            since_s = time.monotonic() - self._started_at.get(rank, -math.inf)
            if rank not in self._actors and since_s > _AGAIN_S:
                actor = ray.remote(**self._options)(SingleWorker).remote()
                self._actors[rank], self._started_at[rank] = actor, time.monotonic()
                self._training[actor.train.remote(self._given, rank)] = rank
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

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # all of Ray may have ended
                ray.kill(actor)


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
    """What Ray says of dead workers, by rank."""
    texts, preempted = {}, []
    for rank, error in exceptions.items():
        inner = ray_private.underlying(error)
        texts[rank] = f"{type(inner).__name__}: {error}"[:_MOST_CHARACTERS] + suffix
        if isinstance(inner, RayActorError) and inner.preempted:
            preempted.append(rank)
    return Died(texts, preempted, [rank for rank in texts if is_ended_for_memory(texts[rank])])
