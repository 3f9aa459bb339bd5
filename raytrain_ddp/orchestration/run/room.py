"""How many workers, on what, and whether there is room; a Ray to run them on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.orchestration.cluster import is_connected, joined
from raytrain_ddp.orchestration.environment import SETTINGS
from raytrain_ddp.orchestration.resources import Layout, missing, this_machine
from raytrain_ddp.orchestration.resources import room as places
from raytrain_ddp.orchestration.run.order import Flags

_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # nothing large goes through the embedded Ray

Nodes = Sequence[Mapping[str, float]]


def layout_for(flags: Flags, nodes: Nodes) -> Layout:
    """What is asked for, on nodes with these resources.

    Raises:
        ConfigError: it is not said how many workers.
        PreflightError: there are no GPUs, and it is not said how many there shall be.
    """
    usable = [n for n in nodes if n.get("CPU", 0) and (n.get("GPU", 0) or not flags.use_gpu)]
    if flags.use_gpu and not usable and flags.num_workers is None:
        raise PreflightError(
            "--use-gpu: there is no GPU. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or say how "
            "many workers an autoscaling cluster shall bring with --num-workers."
        )
    count = flags.num_workers
    if flags.per == "node":
        count = count or max(1, len(usable))
        taken = sorted(usable, key=lambda n: (n.get("GPU", 0), n["CPU"]))[-count:]
        cpus = flags.cpus_per_worker or min((n["CPU"] for n in taken), default=1)
        gpus = flags.gpus_per_worker or min((n.get("GPU", 0) for n in taken), default=1)
    else:
        cpus, gpus = flags.cpus_per_worker or 1, flags.gpus_per_worker or 1
        if count is None and not flags.use_gpu:
            raise ConfigError("how many processes? --num-workers N, or --use-gpu: one per GPU.")
        count = count or int(sum(n["GPU"] // gpus for n in usable))
    per_worker = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if flags.use_gpu else {})
    return Layout(count, count, flags.use_gpu, per_worker, backend="")


def lacking(flags: Flags, layout: Layout, nodes: Nodes) -> str:
    """``""``, or in a few words what there is too little of on nodes with these resources."""
    total: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.items():
            total[name] = total.get(name, 0) + amount
    lines = missing(layout, total)
    if lines:
        return "; ".join(line.strip() for line in lines.splitlines())
    fit = sum(places(layout, [node]) > 0 for node in nodes)
    if flags.per == "node" and fit < layout.least:
        return f"nodes with {dict(layout.per_worker)}: want {layout.least}, have {fit}"
    fit = places(layout, nodes)
    if flags.per == "worker" and fit < layout.least:
        return f"places with {dict(layout.per_worker)}: want {layout.least}, have {fit}"
    return ""


def refusal(layout: Layout, lacks: str, where: str) -> PreflightError:
    """To be raised if the workers do not fit."""
    return PreflightError(
        f"{layout.said} do not fit on {where}: {lacks}. Take fewer with --num-workers, or less "
        "each with --cpus-per-worker."
    )


@contextmanager
def connected(flags: Flags, tell: Callable[[str], None]) -> Iterator[None]:
    """Connects to Ray, or starts one with just the room that is needed and ends it afterwards.

    Raises:
        PreflightError: there is no Ray at the address, or this machine is too small for the
            embedded one; before anything is started.
    """
    address = flags.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {}
    if not address and not is_connected():
        have = this_machine()
        layout = layout_for(flags, [have])
        lacks = lacking(flags, layout, [have])
        if lacks:
            raise refusal(layout, lacks, "this machine")
        needed = layout.least_needed()
        options = {
            "include_dashboard": False,
            "num_cpus": max(1, math.ceil(needed["CPU"])),  # Ray starts a process ahead for each
            "num_gpus": int(have["GPU"]),
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    with joined(address, SETTINGS, options, tell, wait_s=flags.wait_s):
        yield
