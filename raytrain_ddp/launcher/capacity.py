"""Computes the workers' resources, checks that they fit, and connects to Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raytrain_ddp.config.validation import LEAST_OF_RESOURCE
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.launcher.run_options import RunFlags
from raytrain_ddp.ray_backend.cluster import is_connected, ray_connection
from raytrain_ddp.ray_backend.placement import Layout, local_resources, missing_resources
from raytrain_ddp.ray_backend.placement import workers_that_fit as places
from raytrain_ddp.ray_backend.ray_settings import SETTINGS

_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # no large objects in the embedded Ray

NodeResources = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class GroupedLayout(Layout):
    """A layout whose workers are placed in groups of `each`; a group is on one node.

    Args:
        apart: whether each group has a node of its own.
    """

    each: int = 1
    apart: bool = False

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles to request from Ray, one per group."""
        one = {name: amount * self.each for name, amount in self.per_worker.items()}
        return [dict(one) for _ in range(self.least // self.each)]

    def lacks(self, nodes: NodeResources) -> str:
        """``""``, or a short description of the resources missing on these nodes."""
        names = self.per_worker
        total = {name: sum(node.get(name, 0) for node in nodes) for name in names}
        if lines := missing_resources(self, total):
            return "; ".join(line.strip() for line in lines.splitlines())
        want, share = len(self.bundles), self.bundles[0]
        fit = [places(self, [node]) // self.each for node in nodes]
        have = sum(map(bool, fit)) if self.apart else sum(fit)
        kind = "nodes" if self.apart else "places"
        return "" if have >= want else f"{kind} with {share}: want {want}, have {have}"


def layout_for(flags: RunFlags, nodes: NodeResources) -> GroupedLayout:
    """The layout that the flags request, on nodes with these resources.

    Raises:
        ConfigError: the number of workers is not given.
        PreflightError: there are no GPUs, and their number is not given.
    """
    if flags.by_node:
        return _as_torchrun(flags, nodes)
    usable = [n for n in nodes if n.get("CPU", 0) and (n.get("GPU", 0) or not flags.use_gpu)]
    if flags.use_gpu and not usable and flags.num_workers is None:
        raise _no_gpu("--use-gpu")
    count = flags.num_workers
    if flags.per == "node":
        least, most = flags.nodes if flags.nnodes else (1, max(1, len(usable)))
        count = count or max(least, min(most, len(usable)))
        taken = sorted(usable, key=lambda n: (n.get("GPU", 0), n["CPU"]))[-count:]
        cpus = flags.cpus_per_worker or min((n["CPU"] for n in taken), default=1)
        gpus = flags.gpus_per_worker or min((n.get("GPU", 0) for n in taken), default=1)
    else:
        cpus, gpus = flags.cpus_per_worker or 1, flags.gpus_per_worker or 1
        if count is None and not flags.use_gpu:
            raise ConfigError(
                "how many processes? --num-workers N before the script, or --use-gpu: one per GPU."
            )
        count = count or int(sum(n["GPU"] // gpus for n in usable))
    per_worker = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if flags.use_gpu else {})
    return GroupedLayout(count, count, flags.use_gpu, per_worker, "", 1, flags.per == "node")


def _as_torchrun(flags: RunFlags, nodes: NodeResources) -> GroupedLayout:
    """The number of workers on each node by --nproc-per-node and --nnodes, as in torchrun."""
    asked, (least, most) = flags.nproc_per_node or "1", flags.nodes
    per_gpu = flags.gpus_per_worker or 1
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= per_gpu]
    if asked == "gpu" and not with_gpus:
        raise _no_gpu("--nproc-per-node gpu")
    count_gpus = asked == "gpu" or (asked == "auto" and bool(with_gpus))
    usable = with_gpus if count_gpus else [node for node in nodes if node.get("CPU", 0)]
    taken = sorted(usable, key=lambda n: (n.get("GPU", 0), n.get("CPU", 0)))[-most:]
    if count_gpus:
        each = int(min(node["GPU"] for node in taken) // per_gpu)
    elif asked.isdecimal():
        each = int(asked)
    else:
        each = max(1, int(min((node["CPU"] for node in taken), default=1)))
    roomy = [node for node in nodes if node.get("GPU", 0) >= each * per_gpu]
    use_gpu = flags.use_gpu or count_gpus or (asked != "cpu" and len(roomy) >= least)
    fit = [node for node in (roomy if use_gpu else usable) if node.get("CPU", 0)]
    shared = min(1.0, max((node["CPU"] for node in fit), default=1.0) / each)
    cpus = flags.cpus_per_worker or max(LEAST_OF_RESOURCE, math.floor(shared * 1000) / 1000)
    per_worker = {"CPU": float(cpus)} | ({"GPU": float(per_gpu)} if use_gpu else {})
    one = GroupedLayout(each, each, use_gpu, per_worker, "", each, True)
    count = each * max(least, min(most, sum(places(one, [node]) >= each for node in fit)))
    return replace(one, least=count, most=count)


def _no_gpu(flag: str) -> PreflightError:
    return PreflightError(
        f"{flag}: no GPU found. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or, on an "
        "autoscaling cluster, request workers with --num-workers."
    )


def capacity_error(layout: GroupedLayout, nodes: NodeResources, where: str) -> PreflightError:
    """The error for workers that do not fit on these nodes, or not beside other jobs."""
    lacks = layout.lacks(nodes) or "other jobs use the resources (ray status)"
    remedy = "Use fewer with --num-workers, or smaller ones with --cpus-per-worker."
    if layout.use_gpu and not any(node.get("GPU") for node in nodes):
        remedy = "Remove --use-gpu, or pass the --address of a Ray cluster with GPUs."
    elif layout.apart:
        remedy = (
            "Lower --nnodes or --nproc-per-node, or pass the --address of a larger Ray cluster."
        )
    verb = "does" if layout.least == 1 else "do"
    return PreflightError(f"{layout.said} {verb} not fit on {where}: {lacks}. {remedy}")


@contextmanager
def connected(flags: RunFlags, tell: Callable[[str], None]) -> Iterator[None]:
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
        options = {
            "include_dashboard": False,
            "num_cpus": max(1, math.ceil(layout.least_needed()["CPU"])),  # a process for each
            "num_gpus": int(have["GPU"]),
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    with ray_connection(address, SETTINGS, options, tell, wait_s=flags.wait_s):
        yield
