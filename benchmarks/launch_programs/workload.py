"""What all contenders of launch.py train, and how each one's steps are timed. Plain torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

SEED = 0
FEATURES, CLASSES = 768, 10
MICRO_BATCH = 32  # samples of one worker and step
LR, MOMENTUM = 0.01, 0.9


def mlp() -> nn.Sequential:
    """24.1 M parameters; (n, FEATURES) -> (n, CLASSES)."""
    return nn.Sequential(
        nn.Linear(FEATURES, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1024),
        nn.ReLU(),
        nn.Linear(1024, CLASSES),
    )


def arrays(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up samples: "x" (rows, FEATURES) and "y" (rows,)."""
    random = np.random.default_rng(SEED)
    return {
        "x": random.standard_normal((rows, FEATURES), dtype=np.float32),
        "y": random.integers(0, CLASSES, rows),
    }


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def stamp_steps(path: str) -> None:
    """From now on rank 0 appends the time at which each optimizer step is complete, a line each.

    In every contender by torch's own hook, so at the same place. The monotonic clock is one for all
    processes of a machine.
    """
    file = Path(path).open("a", buffering=1, encoding="ascii")  # noqa: SIM115

    def stamp(*_: Any) -> None:
        now = time.monotonic()
        if dist.get_rank() == 0:
            file.write(f"{now}\n")

    register_optimizer_step_post_hook(stamp)


def train_by_hand(net: nn.Module, steps: int, rank: int, world_size: int) -> torch.optim.Optimizer:
    """One epoch over samples in memory, as one writes it by hand."""
    data = {
        name: torch.from_numpy(a) for name, a in arrays(steps * MICRO_BATCH * world_size).items()
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    order = torch.randperm(len(data["x"]), generator=torch.Generator().manual_seed(SEED))
    for step in range(steps):
        start = (step * world_size + rank) * MICRO_BATCH
        rows = order[start : start + MICRO_BATCH]
        optimizer.zero_grad(set_to_none=True)
        loss(net, data["x"][rows], data["y"][rows]).backward()
        optimizer.step()
    return optimizer
