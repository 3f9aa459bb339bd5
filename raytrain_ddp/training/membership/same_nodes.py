"""Checks that all workers run the same software.

Ray compares its own version and Python's. A node that joins later may have another torch: the run
would continue, but its result could not be reproduced.
"""

from __future__ import annotations

import socket

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.runtime.world import World, broadcast, software_versions


def versions_here() -> dict[str, str]:
    """Returns the versions of the software that affects the result, by name."""
    return {"raytrain_ddp": package_version(), **software_versions()}


def require_same_nodes(world: World) -> None:
    """Compares the versions of all ranks; all ranks take part.

    Raises:
        PreflightError: a version on this rank differs from that on rank 0.
    """
    mine, here = versions_here(), socket.gethostname()
    first, there = broadcast((mine, here), world)
    for name, own in mine.items():
        other = first.get(name, own)  # what one node lacks is not used
        if own != other:
            raise PreflightError(
                f"rank {world.of_run(world.rank)} (host {here}) has {name} {own}, rank "
                f"{world.of_run(0)} (host {there}) has {other}: install the same version on all "
                "nodes (raytrain doctor compares them)."
            )
