"""What all contenders of recovery.py train: a 24 M-parameter MLP. The loop by hand can go on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_PATH = Path(__file__).resolve().parent.parent / "launch_programs" / "workload.py"
_SPEC = importlib.util.spec_from_file_location("launch_workload", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_launch = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_launch)

SEED, LR, MOMENTUM, MICRO_BATCH = _launch.SEED, _launch.LR, _launch.MOMENTUM, _launch.MICRO_BATCH
mlp, loss, arrays = _launch.mlp, _launch.loss, _launch.arrays


class Resumable:
    """The loop of launch.py's hand-written contender, which can go on from a saved state."""

    def __init__(self, model: nn.Module, net: nn.Module, steps: int) -> None:
        self._model, self._net, self._steps, self._step = model, net, steps, 0
        self._optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]

    def steps(self) -> Iterator[int]:
        """Yields the number of each step that is done."""
        rank, size, rows = dist.get_rank(), dist.get_world_size(), MICRO_BATCH
        data = {
            name: torch.from_numpy(array)
            for name, array in arrays(self._steps * rows * size).items()
        }
        order = torch.randperm(len(data["x"]), generator=torch.Generator().manual_seed(SEED))
        while self._step < self._steps:
            start = (self._step * size + rank) * rows
            chosen = order[start : start + rows]
            self._optimizer.zero_grad(set_to_none=True)
            loss(self._net, data["x"][chosen], data["y"][chosen]).backward()
            self._optimizer.step()
            self._step += 1
            yield self._step
