"""The number of workers and their resources: chosen and checked before anything is started."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_ddp.config.field_types import require
from raytrain_ddp.config.process import usable_cpus
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError

_NO_GPU = "check nvidia-smi and CUDA_VISIBLE_DEVICES, train on CPUs with --scaling.use-gpu False"


@dataclass(frozen=True)
class Layout:
    """The resources requested from Ray: `least` to `most` workers with `per_worker` each.

    Attributes:
        note: why GPUs stay idle; "" if none does.
        has_bf16: all GPUs of the cluster have it in hardware; False before Ray runs.
    """

    least: int
    most: int
    use_gpu: bool
    per_worker: Mapping[str, float]
    backend: str
    note: str = field(default="", kw_only=True)
    has_bf16: bool = field(default=False, kw_only=True)

    @property
    def workers(self) -> int | tuple[int, int]:
        """As ray.train.ScalingConfig takes it; a pair is elastic."""
        return self.most if self.least == self.most else (self.least, self.most)

    @property
    def said(self) -> str:
        """``2 workers``, or ``1 to 8 workers``."""
        count = f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{count} worker{'s' if self.most > 1 else ''}"


def choose_layout(
    config: TrainConfig,
    have: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]] | None = None,
) -> Layout:
    """The layout that the config requests, on a cluster with these resources.

    Args:
        nodes: the resources of each node. Default: `have` are those of one machine.

    Raises:
        PreflightError: GPUs are requested, and there are none.
        ConfigError: more workers than slots, or MIN:MAX with a strict placement.
    """
    scaling = config.scaling
    gpus = have.get("GPU", 0)
    use_gpu = gpus > 0 if scaling.use_gpu == "auto" else scaling.use_gpu
    least, most = scaling.worker_range()
    rule = "needs a fixed number of workers: set one, or use PACK or SPREAD"
    fits = least == most or not scaling.placement.startswith("STRICT")
    require(fits, "scaling.placement", scaling.placement, rule)
    nodes, note = [have] if nodes is None else nodes, ""
    if (least, most) == (0, 0):
        if use_gpu and not gpus:
            raise PreflightError(
                f"scaling.use_gpu = true, but there is no GPU: {_NO_GPU}, or set the number of "
                "workers for an autoscaling cluster with --scaling.num-workers."
            )
        each = scaling.gpus_per_worker
        whole = sum(int(node.get("GPU", 0) / each + 1e-9) for node in nodes) if use_gpu else 2
        least = most = min(whole, config.slots)
        note = _note_of_idle(config, least, whole) if use_gpu else ""
    config.require_slots(most)
    per_worker = {"CPU": _cpus(scaling, nodes) if use_gpu else scaling.cpus_without_gpu}
    backend = scaling.backend
    if use_gpu:
        per_worker["GPU"] = scaling.gpus_per_worker
    if backend == "auto":
        backend = "nccl" if use_gpu and scaling.gpus_per_worker == 1 else "gloo"
    return Layout(
        least,
        most,
        use_gpu,
        per_worker,
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        note=note,
    )


def _cpus(scaling: ScalingConfig, nodes: Sequence[Mapping[str, float]]) -> float:
    """CPUs of a worker with a GPU. auto: its share of the node's, as of the node that has the
    fewest for each GPU, so that every GPU has a worker."""
    if not isinstance(scaling.cpus_per_worker, str):
        return scaling.cpus_per_worker
    shares = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU", 0) > 0]
    share = min(filter(None, shares), default=1.0) * scaling.gpus_per_worker
    return float(int(share)) if share >= 1 else math.floor(share * 1000) / 1000


def _note_of_idle(config: TrainConfig, workers: int, places: int) -> str:
    """Why fewer workers than GPUs have a slot, and which flags change that; "": all have."""
    if workers >= places:
        return ""
    batch, micro = config.batch_size, config.micro_batch
    smaller = [m for m in range(1, config.micro_batch) if batch % m == 0 and batch // m >= places]
    remedies = [f"--micro-batch {m} (batch norm then sees as many)" for m in smaller[-1:]]
    remedies.append(f"--batch-size {places * micro} (with a learning rate for it)")
    return (
        f"{workers} of {places} GPUs are used: a step has {workers} slots, batch_size = {batch} / "
        f"micro_batch = {micro}. For all of them: {', or '.join(remedies)}."
    )


def workers_that_fit(layout: Layout, nodes: Sequence[Mapping[str, float]]) -> int:
    """The number of workers that fit on nodes with these resources; each needs a single node."""
    wants = {name: amount for name, amount in layout.per_worker.items() if amount > 0}
    return sum(
        int(min(node.get(name, 0) / amount + 1e-9 for name, amount in wants.items()))
        for node in nodes
    )


def lack_of_room(layout: Layout, nodes: Sequence[Mapping[str, float]]) -> str:
    """Returns which workers do not fit on nodes with these resources; "" if the layout can start
    there."""
    fit = workers_that_fit(layout, nodes)
    each = " + ".join(f"{amount:g} {name}" for name, amount in layout.per_worker.items())
    lack = f"{each} for each worker: want {layout.least}, have {fit} on {len(nodes)} node(s)"
    return "" if fit >= layout.least else lack


def require_room(layout: Layout, nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Raises PreflightError if the layout cannot start on these nodes, which are those of
    `where`."""
    if lack := lack_of_room(layout, nodes):
        remedy = "--scaling.num-workers, or smaller ones with --scaling.cpus-per-worker"
        if layout.use_gpu and not any(node.get("GPU") for node in nodes):
            remedy = f"{remedy}. There is no GPU: {_NO_GPU}"
        raise PreflightError(
            f"{where} has no room for {layout.said}: {lack}. Use fewer with {remedy}."
        )


def embedded_resources(
    config: TrainConfig, layout: Layout, have: Mapping[str, float]
) -> dict[str, float]:
    """What an embedded Ray is started with: the default number of workers runs on one core, too."""
    if config.scaling.num_workers == "auto":
        return {**have, "CPU": max(have.get("CPU", 0), layout.least * layout.per_worker["CPU"])}
    return {**have}


def local_resources() -> dict[str, float]:
    """The CPUs that this process may use, and the GPUs, counted without torch or Ray."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is not None:
        devices = [device.strip() for device in visible.split(",")]
        hidden = next((n for n, d in enumerate(devices) if not d or d.startswith("-")), None)
        gpus = min(gpus, len(devices[:hidden]))  # CUDA stops at the first invalid one
    return {"CPU": float(usable_cpus()), "GPU": float(gpus)}
