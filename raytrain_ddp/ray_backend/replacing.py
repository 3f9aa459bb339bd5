"""Makes Ray Train replace a worker that dies, and only that one; the others keep their state.

Ray Train 2.60 does this for a `Backend` with `has_replica_groups`: the new worker gets the rank and
the placement of the dead one. It makes no process group then; the workers do, by generation, see
training/generations.py.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import ray.train
import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.training.generations import Generation, Member, Place


class _ReplacingBackend(Backend):  # type: ignore[misc]
    has_replica_groups = True


class ReplacingConfig(TorchConfig):  # type: ignore[misc]
    """Each worker is a replica group of its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _ReplacingBackend


def replaces_workers(config: TrainConfig, layout: Layout) -> bool:
    """Whether a worker that dies is replaced. Otherwise, all are restarted:

    - on GPUs: a collective of NCCL's that is aborted would let the update go on with its result.
    - with MIN:MAX workers: Ray Train decides on the number of workers at a restart.
    - on several nodes, or where they may be preempted: Ray Train passes on no notices then.
    """
    return (
        config.scaling.replace_workers
        and getattr(Backend, "has_replica_groups", None) is not None
        and 1 < layout.least == layout.most
        and layout.backend == "gloo"
        and not layout.use_gpu
        and os.environ.get(PREEMPTION_WATCHER) == "0"
        and sum(bool(node["Alive"]) for node in ray.nodes()) == 1
    )


def place_of_worker(mailbox: Any, node: str) -> Place:
    """The place of this worker; the mailbox keeps the roster."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    # A task may read them. All workers are on one machine; for Ray Train, each is a group.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), NODE_RANK="0")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))

    def meet(member: Member) -> Generation | None:
        found: Generation | None = ray.get(mailbox.meet.remote(member))
        return found

    return Place(rank, size, ray.util.get_node_ip_address(), node, meet)
