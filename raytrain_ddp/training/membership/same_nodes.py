"""Checks that all workers run the same software, and says if their hardware differs.

Ray compares its own version and Python's. A node that joins later may have another torch, or an
older copy of the task. The run would continue, but its result could not be reproduced.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from raytrain_ddp import user_code
from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.events import Note
from raytrain_ddp.training.runtime.world import (
    World,
    broadcast,
    device_name,
    from_all_ranks,
    software_versions,
)
from raytrain_ddp.training.session import Session


@dataclass(frozen=True)
class Node:
    """What a worker's result depends on, besides the config and the data.

    Args:
        versions: of software, by name.
        code: the user's modules: name -> file, and hex SHA-256 of its content.
        device: its model.
    """

    host: str
    versions: dict[str, str]
    code: Mapping[str, tuple[str, str]]
    device: str

    @staticmethod
    def here(device: torch.device) -> Node:
        return Node(
            socket.gethostname(),
            {"raytrain_ddp": package_version(), **software_versions()},
            user_code.digests(),
            device_name(device) if device.type == "cuda" else _cpu(),
        )


def require_same_nodes(session: Session) -> None:
    """All ranks take part. Different devices are noted only.

    Raises:
        PreflightError: this rank has other software, or other code of the user, than rank 0.
    """
    world = session.world
    if world.size == 1:
        return
    mine = Node.here(world.device)
    first = broadcast(mine, world)
    devices = from_all_ranks(mine.device, world)
    _require_same(mine, first, world)
    note = _devices_note(devices, world)
    if note:
        session.tell(Note(note))


def _require_same(mine: Node, first: Node, world: World) -> None:
    here = f"rank {world.of_run(world.rank)} (host {mine.host})"
    there = f"rank {world.of_run(0)} (host {first.host})"
    for name, own in mine.versions.items():
        other = first.versions.get(name, own)  # what one node lacks is not used
        if own != other:
            raise PreflightError(
                f"{here} has {name} {own}, {there} has {other}: install the same version on all "
                "nodes (python -m raytrain_ddp.doctor compares them)."
            )
    for name in mine.code.keys() & first.code.keys():
        path, digest = mine.code[name]
        if digest != first.code[name][1]:
            raise PreflightError(
                f"{path} differs between {here} and {there}: copy the same file to all nodes."
            )


def _devices_note(devices: Sequence[str], world: World) -> str | None:
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(world.of_run(rank))
    if len(ranks) == 1:
        return None
    listed = "; ".join(
        f"{name}: {'rank' if len(of) == 1 else 'ranks'} {', '.join(map(str, of[:4]))}"
        f"{' ...' if of[4:] else ''}"
        for name, of in ranks.items()
    )
    return (
        f"the workers have different hardware ({listed}): the last bits of the weights depend on "
        "which of them computes what, and the slowest sets the pace."
    )


def _cpu() -> str:
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
