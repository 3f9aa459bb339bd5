"""Workers that are placed one by one, where the others continue without one that is missing.

Ray Train places its workers together, changes their number only by a restart of all, replaces those
that die one after another, and ends all if a further one dies meanwhile. So it places only the
first worker here. Each other one is an actor that trains as the workers of Ray Train do. It waits
for room, which an autoscaler sees, and joins the next generation: see roster.py. If it dies, the
driver starts it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_ddp.messages import Died, Event
from raytrain_ddp.ray_backend.failure_callback import described, was_preempted
from raytrain_ddp.ray_backend.replacing import Start
from raytrain_ddp.ray_backend.worker import WorkerSettings, train_as

_AGAIN_S = 2.0  # between two starts of a worker that cannot even begin


class SingleWorkers:
    """The driver's side.

    Args:
        placement: see ScalingConfig; not a strict one.
        push: passes an event to the mailbox.
    """

    def __init__(
        self, given: WorkerSettings, start: Start, placement: str, push: Callable[[Event], None]
    ) -> None:
        self._given, self._push = ray.put(given), push
        self._wanted, self._spreads = dict(start.placed.per_worker), placement == "SPREAD"
        self._first, self._size, self._most = start.placed.most, given.size, given.most
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._started_at: dict[int, float] = {}
        self._training: dict[Any, int] = {}  # pending answer -> rank

    def look(self, others_train: bool) -> None:
        """Starts the workers that there is room for, and restarts dead ones; cheap.

        Args:
            others_train: if not, Ray could give the room of the first workers to later ones.
        """
        for rank in range(self._first, self._most if others_train else self._size):
            since_s = time.monotonic() - self._started_at.get(rank, -math.inf)
            if rank not in self._actors and since_s > _AGAIN_S:
                self._start(rank)
        pending = [*self._training]
        for answer in ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else []:
            rank = self._training.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.RayError as error:
                preempted = [rank] if was_preempted(error) else []
                self._push(Died({rank: f"{described(error)} {answer.hex()}"}, preempted))
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
        """Ends them all."""
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
