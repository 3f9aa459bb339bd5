"""The training of the contenders of launch.py and recovery.py, and its marks. Plain torch."""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

SEED = 0
FEATURES, CLASSES = 768, 10
MICRO_BATCH = 32  # samples of a worker in a step
LR, MOMENTUM = 0.01, 0.9


def parse(doc: str | None) -> argparse.Namespace:
    """Parses the arguments of all programs."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--address", default="local", help="address of a Ray")
    parser.add_argument("--replica", type=int, help="number of a replica of torchft")
    return parser.parse_args()


def mlp() -> nn.Sequential:
    """A network of 24.1 M parameters, (n, FEATURES) -> (n, CLASSES)."""
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


def batch(steps: int, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The samples of a rank in a step of one shuffled epoch."""
    data, order = _epoch(steps * MICRO_BATCH * size)
    start = (step * size + rank) * MICRO_BATCH
    rows = order[start : start + MICRO_BATCH]
    return data["x"][rows], data["y"][rows]


@functools.cache
def _epoch(rows: int) -> tuple[dict[str, Tensor], Tensor]:
    data = {name: torch.from_numpy(array) for name, array in arrays(rows).items()}
    return data, torch.randperm(rows, generator=torch.Generator().manual_seed(SEED))


class Loop:
    """A hand-written loop that can continue from a saved state."""

    def __init__(self, model: nn.Module, net: nn.Module, steps: int) -> None:
        self._model, self._net, self._steps, self._step = model, net, steps, 0
        self._optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)

    def save(self, file: Path) -> None:
        """Saves the state, atomically."""
        state = {
            "step": self._step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        temp = file.with_suffix(".temp")
        torch.save(state, temp)
        os.replace(temp, file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]

    def run(self) -> Iterator[int]:
        """Yields the number of each step that is done."""
        while self._step < self._steps:
            x, y = batch(self._steps, self._step, dist.get_rank(), dist.get_world_size())
            self._optimizer.zero_grad(set_to_none=True)
            loss(self._net, x, y).backward()
            self._optimizer.step()
            self._step += 1
            yield self._step


# ------------------------------------------------------------------ marks


@functools.cache
def watch(path: str, replica: int | None = None, by_hook: bool = True) -> Callable[..., None]:
    """Makes this process append marks to a file from now on, as lines ``TIME PID MARK [RANK]``.

    The marks are "started" and "here" (this call), "ddp" (the model is wrapped), "loaded" (a state
    is loaded), and "step" (an optimizer step is done). TIME is in seconds, on the monotonic clock,
    which is the same for all processes of a machine.

    Args:
        by_hook: whether torch's own hook marks the steps.

    Returns:
        A function that marks a step, for loops without the hook.
    """

    def mark(name: str, at: float = 0.0) -> None:
        line = f"{at or time.monotonic()} {os.getpid()} {name}\n".encode()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line)
        os.close(file)

    def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            mark(name)
            return result

        return wrapper

    def step(*_: Any) -> None:
        if replica is not None or dist.is_initialized():
            mark(f"step {dist.get_rank() if replica is None else replica}")

    mark("started", _started())
    mark("here")
    DistributedDataParallel.__init__ = marked(DistributedDataParallel.__init__, "ddp")  # type: ignore[method-assign]
    Optimizer.load_state_dict = marked(Optimizer.load_state_dict, "loaded")  # type: ignore[method-assign]
    if by_hook:
        register_optimizer_step_post_hook(step)
    return step


def _started() -> float:
    """The time at which this process was started or forked, in seconds on the monotonic clock."""
    ticks = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
