"""Computes the workers' resources, checks that they fit, and connects to Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raytrain_ddp.config.field_types import LEAST_OF_RESOURCE
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.launcher.output import tell
from raytrain_ddp.launcher.run_options import RunFlags
from raytrain_ddp.ray_backend.cluster import is_connected, ray_connection
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.ray_backend.ray_start import SETTINGS

_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # no large objects in the embedded Ray

NodeResources = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class GroupedLayout:
    """What is requested from Ray: `count` workers, in groups of `each` on one node.

    Args:
        per_worker: the resources of one.
        apart: whether each group has a node of its own.
    """

    count: int
    each: int
    per_worker: Mapping[str, float]
    apart: bool = False

    @property
    def said(self) -> str:
        """``2 workers``"""
        return f"{self.count} worker{'s' if self.count > 1 else ''}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles to request from Ray, one per group."""
        one = {name: amount * self.each for name, amount in self.per_worker.items()}
        return [one] * (self.count // self.each)

    def groups_on(self, node: Mapping[str, float]) -> int:
        """The number of groups that fit on a node with these resources."""
        shares = (node.get(name, 0) / amount for name, amount in self.per_worker.items())
        groups = int(min(shares) + 1e-9) // self.each
        return min(1, groups) if self.apart else groups

    def lacks(self, nodes: NodeResources) -> str:
        """``""``, or a short description of the resources missing on these nodes."""
        want, have = self.count // self.each, sum(map(self.groups_on, nodes))
        share = ", ".join(f"{amount:g} {name}" for name, amount in self.bundles[0].items())
        kind = "nodes" if self.apart else "places"
        return "" if have >= want else f"{kind} with {share}: want {want}, have {have}"


def layout_for(flags: RunFlags, nodes: NodeResources) -> GroupedLayout:
    """The layout that the flags request, on nodes with these resources.

    Raises:
        ConfigError: the number of workers is not given.
        PreflightError: there are no GPUs, and their number is not given.
    """
    asked, gpus = flags.nproc_per_node or "1", float(flags.gpus_per_worker or 1)
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= gpus]
    counts_gpus = asked == "gpu" or (asked == "auto" and bool(with_gpus))
    use_gpu = flags.use_gpu or flags.gpus_per_worker is not None or counts_gpus
    usable = with_gpus if use_gpu else [node for node in nodes if node.get("CPU", 0)]
    if use_gpu and not usable and (counts_gpus or flags.num_workers is None):
        raise PreflightError(
            "no GPU found. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or, on an autoscaling "
            "cluster, request workers with --num-workers."
        )
    if not flags.by_node:
        count = flags.num_workers or sum(int(node["GPU"] // gpus) for node in usable if use_gpu)
        if not count:
            raise ConfigError(
                "how many processes? --num-workers N before the script, or --use-gpu: one per GPU."
            )
        return GroupedLayout(count, 1, _resources(flags.cpus_per_worker or 1, gpus * use_gpu))
    least, most = flags.node_range or (1, max(1, len(usable)))
    taken = sorted(usable, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))[-most:]
    smallest = {name: min((n.get(name, 0) for n in taken), default=1) for name in ("CPU", "GPU")}
    if flags.per == "node":
        each, cpus, gpus = 1, smallest["CPU"], flags.gpus_per_worker or smallest["GPU"]
    else:
        counted = smallest["GPU"] // gpus if counts_gpus else smallest["CPU"]
        each = int(asked) if asked.isdecimal() else max(1, int(counted))
        roomy = [node for node in nodes if node.get("GPU", 0) >= each * gpus]
        if asked != "cpu" and len(roomy) >= least:
            use_gpu, usable = True, roomy
        share = min(1.0, max((node.get("CPU", 0) for node in usable), default=1.0) / each)
        cpus = max(LEAST_OF_RESOURCE, math.floor(share * 1000) / 1000)
    per_worker = _resources(flags.cpus_per_worker or cpus, gpus * use_gpu)
    one = GroupedLayout(each, each, per_worker, apart=True)
    groups = max(least, min(most, sum(map(one.groups_on, usable))))
    return replace(one, count=each * groups)


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def capacity_error(layout: GroupedLayout, nodes: NodeResources, where: str) -> PreflightError:
    """The error for workers that do not fit on these nodes, or not beside other jobs."""
    lacks = layout.lacks(nodes) or "other jobs use the resources (ray status)"
    verb = "does" if layout.count == 1 else "do"
    return PreflightError(
        f"{layout.said} {verb} not fit on {where}: {lacks}. Ask for fewer or smaller ones, or pass "
        "the --address of a larger Ray cluster."
    )


@contextmanager
def connected(flags: RunFlags) -> Iterator[None]:
    """Connects to Ray, or starts an embedded one with the needed resources and stops it afterward.

    Raises:
        PreflightError: there is no Ray at the address, or this machine is too small for the
            embedded one, which is checked before it is started.
    """
    address = None if flags.standalone else flags.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {}
    if not address and not is_connected():
        have = local_resources()
        layout = layout_for(flags, [have])
        if layout.lacks([have]):
            raise capacity_error(layout, [have], "this machine")
        cpus = math.ceil(layout.count * layout.per_worker["CPU"])
        options = {
            "include_dashboard": False,
            "num_cpus": max(1, cpus),  # Ray prestarts a process for each
            "num_gpus": int(have["GPU"]),
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    with ray_connection(address, SETTINGS, options, tell, wait_s=flags.wait_s):
        yield
