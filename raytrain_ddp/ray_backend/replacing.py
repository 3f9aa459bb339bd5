"""Makes Ray Train replace a worker that dies, and only that one; the others keep their state.

Ray Train 2.60 does this for a `Backend` with `has_replica_groups`: the new worker gets the rank and
the placement of the dead one. It makes no process group then; the workers do, by generation, see
training/generations.py.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import ray
import ray.train
import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.ray_backend.mailbox import draining
from raytrain_ddp.ray_backend.placement import Layout, workers_that_fit
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.training.generations import Place
from raytrain_ddp.training.roster import Member, Seat


class _ReplacingBackend(Backend):  # type: ignore[misc]
    has_replica_groups = True


class ReplacingConfig(TorchConfig):  # type: ignore[misc]
    """Each worker is a replica group of its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _ReplacingBackend


def replacing_layout(config: TrainConfig, layout: Layout) -> Layout | None:
    """The workers to start if each that dies is to be replaced; None if all are to be restarted:

    - on GPUs: a collective of NCCL's that is aborted would let the update go on with its result.
    - with ddp.shard_optimizer: what is lost with a worker is in the newest checkpoint only.
    - with MIN:MAX workers, unless there is room for MAX: Ray Train decides on the number of workers
      at a restart.
    """
    replaces = config.scaling.replace_workers and not config.ddp.shard_optimizer
    replaces = replaces and layout.backend == "gloo" and not layout.use_gpu
    if not replaces or layout.most == 1 or not hasattr(Backend, "has_replica_groups"):
        return None
    fixed = dataclasses.replace(layout, least=layout.most)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if layout.least < layout.most > workers_that_fit(layout, nodes):
        return None
    if os.environ.get(PREEMPTION_WATCHER) != "0":
        try:
            draining({0: ""})
        except (AttributeError, ImportError):
            return None
    return fixed


def least_left(config: TrainConfig, layout: Layout) -> int:
    """How many workers go on without the others until these are replaced.

    Args:
        layout: as it is configured.
    """
    if layout.least < layout.most:
        return layout.least
    return 1 if config.exact else layout.most


def place_of_worker(mailbox: Any, least: int, node: str) -> Place:
    """The place of this worker; the mailbox keeps the roster."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    here = ray.get_runtime_context().get_node_id()
    member = Member(rank, size, least, os.urandom(8).hex(), 0, node, here)
    return Place(member, ray.util.get_node_ip_address(), _Remote(mailbox))


def set_environment(seat: Seat) -> None:
    """A task may read these. For Ray Train, each worker is a group of its own."""
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.size))
    os.environ.update(LOCAL_RANK=str(seat.local_rank), LOCAL_WORLD_SIZE=str(seat.local_size))
    os.environ.update(NODE_RANK=str(seat.node_rank))


class _Remote:
    """The mailbox's roster."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def meet(self, member: Member) -> Seat | None:
        seat: Seat | None = ray.get(self._mailbox.meet.remote(member))
        return seat

    def is_over(self, member: Member) -> bool:
        return bool(ray.get(self._mailbox.is_over.remote(member)))
