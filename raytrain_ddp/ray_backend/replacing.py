"""Ray Train's process groups; or none, so that only a worker that dies is replaced.

The others keep their state. Ray Train 2.60 does this for a `Backend` with `has_replica_groups`: the
new worker gets the rank and the placement of the dead one. It makes no process group then; the
workers do, by generation, see membership/generations.py.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.membership.generations import Place
from raytrain_ddp.membership.roster import Member, Seat
from raytrain_ddp.ray_backend.mailbox import draining
from raytrain_ddp.ray_backend.placement import Layout, workers_that_fit
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.ray_backend.worker import WorkerSettings
from raytrain_ddp.training.runtime.nccl_settings import set_missing


class _ReplacingBackend(Backend):  # type: ignore[misc]
    has_replica_groups = True


class ReplacingConfig(TorchConfig):  # type: ignore[misc]
    """Each worker is a replica group of its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _ReplacingBackend


class Start(NamedTuple):
    """How the workers are started.

    Args:
        placed: by Ray Train; the others are placed one by one, see single_workers.py.
        least: how many continue without the others until these are replaced; 0: all are restarted.
        size: how many there are at first, if those that die are replaced; else 0.
    """

    placed: Layout
    least: int = 0
    size: int = 0


def start_of(config: TrainConfig, layout: Layout) -> Start:
    """Returns how the workers start. If one dies, only that one is replaced. Over NCCL, this
    requires that the config asks for it, and that `scaling.hang_s` ends hanging collectives.

    Args:
        layout: as it is configured. With MIN:MAX, as many as there is room for are started.
    """
    wanted = config.scaling.replace_workers
    if "nccl" in layout.backend:
        wanted = wanted is True and bool(config.scaling.hang_s)
    wanted = wanted and layout.most > 1
    if not wanted or not hasattr(Backend, "has_replica_groups"):
        return Start(layout)
    if os.environ.get(PREEMPTION_WATCHER) != "0":
        try:
            draining({0: ""})
        except (AttributeError, ImportError):
            return Start(layout)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size = max(layout.least, min(workers_that_fit(layout, nodes), layout.most))
    least = 1 if config.exact and layout.least == layout.most else layout.least
    # Workers that are placed one by one could not keep a strict placement.
    if least == layout.most or config.scaling.placement.startswith("STRICT"):
        return Start(layout, least, size)
    return Start(dataclasses.replace(layout, least=1, most=1), least, size)


def place_of_worker(given: WorkerSettings, rank: int, node: str) -> Place:
    """The place of this worker; the mailbox keeps the roster."""
    here = ray.get_runtime_context().get_node_id()
    token = os.urandom(8).hex()
    member = Member(rank, given.size, given.least, token, 0, node, here, most=given.most)
    registry = _Remote(given.mailbox)
    return Place(member, ray.util.get_node_ip_address(), registry, given.backend)


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


@dataclass
class NcclConfig(TorchConfig):  # type: ignore[misc]
    """Sets environment variables that the worker's node has not set, before the group is made.

    Args:
        settings: the variables.
    """

    settings: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Any]:
        base: type[Any] = super().backend_cls

        class WithSettings(base):  # type: ignore[misc]
            def on_start(self, worker_group: Any, backend_config: NcclConfig) -> None:
                worker_group.execute(set_missing, backend_config.settings)
                super().on_start(worker_group, backend_config)

        return WithSettings
