"""What a step must take on an H100, and what this package adds to it: computed, not measured.

    python benchmarks/gpu_estimates.py [--out docs/results/gpu_estimates.md]

The floor: each operation of forward pass, backward pass and update takes at least its FLOPs at the
GPU's peak, or its bytes at the peak of its memory; operations are counted on meta tensors in bf16,
as torch dispatches them: not fused, but for attention, which reads its inputs and writes its
output. What is added: launches and bytes of a step of `train` less those of a hand-written loop,
counted on emulated GPUs (tests/fakecuda; needs a C++ compiler), with ResNet-50 and small images, on
one worker and on two. The vote: one all-reduce of three numbers between the hosts in each step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from series import HERE, table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.tasks.model_zoo import build

PEAK_FLOPS, PEAK_BYTES = 989e12, 3.35e12  # a second; H100 SXM, dense bf16, from its data sheet
LAUNCH_S = 2.5e-6  # that a small kernel keeps a GPU busy: an assumption
HOPS_S = (15e-6, 50e-6)  # a message between hosts by TCP, in gloo's ring: assumptions
SHAPES = {
    "ResNet-50": (ModelConfig(name="resnet50"), 128),
    "ViT-S/16": (ModelConfig(name="timm:vit_small_patch16_224"), 256),
}
COUNTED = {"model": "resnet50", "args": {}, "batch": 2, "image_size": 32, "every": 4}
COUNTED |= {"warm_up": 4, "precision": "bf16", "changes": {"scaling": {"backend": "gloo"}}}
STEPS = (4, 8)  # of two runs, which differ by four steps and one line of the log
AREAS = {
    "training/steps/nonfinite.py": "the guard: is the gradient finite",
    "training/steps/turn.py": "loss, scaling",
    "training/gradients/buffer_sync.py": "the average of batch norm's statistics over slots",
    "training/gradients/reduction.py": "the same",
    "data/pixels/gpu_augment.py": "crop, flip, normalizing",
    "data/loading/nested.py": "copies of the batch",
    "tasks/criterion.py": "cross entropy",
}
OUTSIDE = ("the model", "autograd, DDP and the optimizer")
PACKAGE = HERE.parent / "raytrain_ddp"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    floors = {name: floor_of(config, batch) for name, (config, batch) in SHAPES.items()}
    counts = {(job, n): per_step(job, n) for n in (1, 2) for job in ("ours", "plain")}
    text = "\n\n".join(
        [
            "# Estimates for an H100",
            "`python benchmarks/gpu_estimates.py`: computed, not measured; no GPU was there.",
            f"torch {torch.__version__}; {PEAK_FLOPS / 1e12:.0f} TFLOP/s (bf16, dense), "
            f"{PEAK_BYTES / 1e12:.2f} TB/s.",
            "## The floor of a step",
            floors_table(floors),
            "## What is added to a step",
            "Launches on the GPU and MB that they read and write, in a step of ResNet-50, which is "
            f"the same for any batch except where pixels are touched. A launch of a small kernel "
            f"is taken as {LAUNCH_S * 1e6:g} us.",
            added_table(counts, floors["ResNet-50"]),
            areas_table(counts),
            "## The vote",
            vote(floors),
        ]
    )
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


# ------------------------------------------------------------------ floor


class Roofline(TorchDispatchMode):
    """Adds up FLOPs, bytes, and the least time of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        is_free = func.name().startswith(("aten::empty", "aten::_unsafe_view"))
        if is_view or is_free or not _tensors(result):
            return result
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        touched = [*_tensors(args), *_tensors(tuple((kwargs or {}).values())), *_tensors(result)]
        size = sum({id(t): t.numel() * t.element_size() for t in touched}.values())
        self.add(flops, size)
        return result

    def add(self, flops: float, size: float) -> None:
        self.flops += flops
        self.bytes += size
        self.seconds += max(flops / PEAK_FLOPS, size / PEAK_BYTES)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


class Attention(torch.autograd.Function):
    """Takes the place of torch's: shapes and the costs of one fused kernel each way."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Roofline) -> Tensor:
        ctx.of, ctx.seen = query, seen
        seen.add(_attention_flops(query), 4 * query.numel() * query.element_size())
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        flops = 2.5 * _attention_flops(ctx.of)  # computes the matrix once more
        ctx.seen.add(flops, 8 * gradient.numel() * gradient.element_size())
        return *(torch.empty_like(gradient) for _ in range(3)), None


def _fused(seen: Roofline, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
    return Attention.apply(query, key, value, seen)


def _attention_flops(query: Tensor) -> float:
    return 4.0 * query.numel() * query.shape[-2]


def floor_of(config: ModelConfig, batch: int) -> dict[str, float]:
    """Of a step with SGD and momentum, whose state and weights are fp32."""
    model = build(config, 1000).to("meta", torch.bfloat16).train()
    images = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    seen = Roofline()
    fused = partial(_fused, seen)
    with mock.patch.object(nn.functional, "scaled_dot_product_attention", fused), seen:
        nn.functional.cross_entropy(model(images), labels).backward()
    numbers = sum(p.numel() for p in model.parameters())
    update = 4 * numbers * (2 + 1 + 2) + 6 * numbers  # weight, gradient, momentum; bf16 copies
    return {
        "batch": batch,
        "flops": seen.flops,
        "bytes": seen.bytes + update,
        "seconds": seen.seconds + update / PEAK_BYTES,
    }


def floors_table(floors: Mapping[str, Mapping[str, float]]) -> str:
    head = ["", "batch", "TFLOP", "GB", "by FLOPs ms", "by bytes ms", "floor ms", "images/s", "MFU"]
    rows = []
    for name, of in floors.items():
        by_flops, by_bytes = of["flops"] / PEAK_FLOPS, of["bytes"] / PEAK_BYTES
        rate = f"{of['batch'] / of['seconds']:.0f}"
        figures = [f"{1e3 * s:.1f}" for s in (by_flops, by_bytes, of["seconds"])]
        size = [f"{of['flops'] / 1e12:.2f}", f"{of['bytes'] / 1e9:.1f}"]
        share = f"{by_flops / of['seconds']:.0%}"
        rows.append([name, f"{of['batch']:.0f}", *size, *figures, rate, share])
    return table(head, rows)


# ------------------------------------------------------------------ counted

Counts = Mapping[tuple[str, str], Sequence[float]]  # (operation, place) -> launches, bytes


def per_step(job: str, workers: int) -> Counts:
    """Launches and bytes of a step in rank 0, by operation and the line that called it."""
    few, many = (counted(job, workers, steps) for steps in STEPS)
    steps = STEPS[1] - STEPS[0]
    return {key: [(many[key][n] - few.get(key, (0, 0))[n]) / steps for n in (0, 1)] for key in many}


def counted(job: str, workers: int, steps: int) -> dict[tuple[str, str], tuple[int, int]]:
    sys.path[:0] = [str(HERE.parent / "tests" / "fakecuda")]
    import building

    with tempfile.TemporaryDirectory(prefix="raytrain-estimates-") as folder:
        building.build(Path(folder))
        report = Path(folder) / "report"
        environment = building.environment(Path(folder), workers, install=True)
        environment |= {"EMULATED_REPORT": str(report)}
        options = {**COUNTED, "steps": steps, "storage": folder}
        start = [sys.executable]
        if workers > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command = [*start, str(HERE / "gpu_jobs.py"), job, json.dumps(options)]
        done = subprocess.run(command, env={**os.environ, **environment}, check=False)
        if done.returncode:
            raise SystemExit(f"{job} on {workers} emulated GPUs ended with {done.returncode}")
        name = f"report-{'alone' if workers == 1 else 0}"
        found = json.loads((Path(folder) / name).read_text())["launches"]
    return {(operation, place): (n, size) for operation, place, n, size in found}


def total(counts: Counts) -> tuple[float, float]:
    launches, size = (sum(each[n] for each in counts.values()) for n in (0, 1))
    return launches, size


def added_table(counts: Mapping[tuple[str, int], Counts], floor: Mapping[str, float]) -> str:
    head = ["workers", "hand-written", "this package", "more launches", "more MB", "of the floor"]
    rows = []
    for workers in (1, 2):
        (own, own_size), (plain, plain_size) = (
            total(counts[job, workers]) for job in ("ours", "plain")
        )
        more, size = own - plain, own_size - plain_size
        seconds = max(more * LAUNCH_S, size / PEAK_BYTES)
        shares = [f"{more:+.0f}", f"{size / 1e6:+.0f}", f"{seconds / floor['seconds']:.1%}"]
        rows.append([str(workers), f"{plain:.0f}", f"{own:.0f}", *shares])
    return table(head, rows)


def areas_table(counts: Mapping[tuple[str, int], Counts]) -> str:
    """By the file of the package that launched; what autograd and DDP launch has no such file."""
    rows = []
    found = {}
    for workers in (1, 2):
        by_area: Counter[str] = Counter()
        for (_, place), (launches, _) in counts["ours", workers].items():
            file = place.partition(":")[0]
            is_ours = not file.startswith("/") and (PACKAGE / file).is_file()
            area = f"`{file}`" if is_ours else OUTSIDE[file == "native"]
            by_area[area] += launches  # type: ignore[assignment]
        found[workers] = by_area
    for place in sorted(found[2], key=lambda p: -found[2][p]):
        if max(found[1][place], found[2][place]) >= 0.5:
            what = AREAS.get(place.strip("`"), "")
            rows.append([place, what, f"{found[1][place]:.1f}", f"{found[2][place]:.1f}"])
    return table(["launched by", "", "1 worker", "2 workers"], rows)


def vote(floors: Mapping[str, Mapping[str, float]]) -> str:
    """From how many workers the vote of the hosts takes longer than the GPU's step."""
    lines = []
    for name, of in floors.items():
        reached = [int(of["seconds"] / hop / 2) + 1 for hop in HOPS_S]
        lines.append(
            f"- {name}, batch {of['batch']:.0f}: {reached[1]} to {reached[0]} workers, with "
            f"{HOPS_S[1] * 1e6:.0f} to {HOPS_S[0] * 1e6:.0f} us a message (assumed)"
        )
    return (
        "Under torchrun, the hosts vote in each step (2 (W - 1) messages in gloo's ring) while the "
        "GPUs compute, so it is hidden as long as it takes less than the step. (Under Ray, the "
        "vote of rank 0 is broadcast: log2(W) messages.) At the floor, it is seen from:"
        "\n\n" + "\n".join(lines)
    )


if __name__ == "__main__":
    sys.exit(main())
