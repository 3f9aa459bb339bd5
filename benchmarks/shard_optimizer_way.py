"""One way of shard_optimizer.py, for torchrun: WAY STEPS FOLDER.

Each rank writes what it measured.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp import TrainConfig
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    DdpConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
)
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.training import loop
from raytrain_ddp.training.recording.local_session import LocalSession, join_world
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World

SLOTS, MICRO_BATCH = 3, 32
LAYERS, WIDTH = 12, 1420


@dataclass(frozen=True)
class Found:
    """What one rank measured.

    Args:
        state_bytes: of the optimizer, in this process.
        step_s: of each step but the first ones.
        whole_s: until the whole optimizer state was on the CPU of rank 0.
    """

    state_bytes: int
    step_s: list[float]
    whole_s: float


class Deep(ImageClassification):
    """The bundled digits, with an MLP of 24.5 M parameters in layers of one size."""

    def model(self) -> nn.Module:
        return deep_mlp(len(self.class_names))


def deep_mlp(classes: int) -> nn.Module:
    """Of images (n, 3, 8, 8)."""
    parts: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 8 * 8, WIDTH), nn.ReLU()]
    for _ in range(LAYERS):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, classes))


def of_fit(shared: bool, steps: int, folder: Path) -> Found:
    """`train`, as `fit` under torchrun calls it."""
    config = TrainConfig(
        name="run",
        storage=str(folder),
        steps=steps,
        batch_size=SLOTS * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        optim=OptimConfig(name="adamw", lr=1e-3),
        ddp=DdpConfig(shard_optimizer=shared),
        eval=EvalConfig(every_epochs=0),
        checkpoint=CheckpointConfig(every_epochs=0, every_s=0.0),
        log=LogConfig(every_steps=10 * steps, tensorboard=False),
    )
    world = join_world(config.scaling)
    at: list[float] = []
    runs: list[Any] = []
    prepare = loop.prepare

    def watched(*given: Any) -> Any:
        runs.append(prepare(*given))
        return runs[0]

    class Session(LocalSession):
        def requests(self) -> Any:  # before each step
            at.append(time.monotonic())
            return super().requests()

    loop.prepare = watched
    task = Deep(config)
    with Session(config, world, Best(task.monitor, task.goal), lambda _: None) as session:
        loop.train(config, task, session)
    state = runs[0].state
    whole_s = timed(lambda: state._host.take(dict(state.gather().optimizer.tensors)))
    return Found(size_of(state.optimizer.state.values()), between(at), whole_s)


def of_torch(sharded: bool, steps: int) -> Found:
    """DistributedDataParallel with gradient accumulation, and AdamW, whole or sharded by
    ZeroRedundancyOptimizer."""
    world: World = join_world(TrainConfig().scaling)
    torch.manual_seed(0)
    net = DistributedDataParallel(deep_mlp(10), gradient_as_bucket_view=True)
    options: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), **options)
    images, labels = torch.randn(MICRO_BATCH, 3, 8, 8), torch.arange(MICRO_BATCH) % 10
    own = len(range(world.rank * SLOTS // world.size, (world.rank + 1) * SLOTS // world.size))
    at = []
    for _ in range(steps):
        at.append(time.monotonic())
        optimizer.zero_grad()
        for slot in range(own):
            with nullcontext() if slot == own - 1 else net.no_sync():
                (cross_entropy(net(images), labels) * world.size / SLOTS).backward()
        optimizer.step()
    at.append(time.monotonic())

    def whole() -> None:
        if sharded:
            optimizer.consolidate_state_dict(0)
        if world.is_main:
            copied = optimizer.state_dict()["state"].values()
            _ = [value.cpu().clone() for each in copied for value in each.values()]

    whole_s = timed(whole)
    held = optimizer.optim if sharded else optimizer
    return Found(size_of(held.state.values()), between(at), whole_s)


def timed(act: Any) -> float:
    dist.barrier()
    started = time.monotonic()
    act()
    return time.monotonic() - started


def between(at: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(at[3:])]


def size_of(states: Iterable[dict[str, Tensor]]) -> int:
    return sum(value.nbytes for each in states for value in each.values())


def main(way: str, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    shared = way in ("fit, shared", "ZeRO")
    found = of_fit(shared, steps, folder) if way.startswith("fit") else of_torch(shared, steps)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    note = {**found.__dict__, "peak_bytes": peak_bytes}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(note))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
