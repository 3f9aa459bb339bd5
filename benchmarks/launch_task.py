"""What launch.py trains, for raytrain_ddp: ``--task benchmarks/launch_task.py:LaunchTask``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from launch_programs import workload

from raytrain_ddp import ArraySource, Data, Task, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric


class LaunchTask(Task):
    """A 24 M-parameter MLP on made-up samples; an epoch has `steps` steps.

    Args:
        stamps: file to which rank 0 writes when each optimizer step was complete.
    """

    def __init__(self, config: TrainConfig, stamps: str, steps: str) -> None:
        self._rows = int(steps) * config.batch_size
        workload.stamp_steps(stamps)

    def model(self) -> nn.Module:
        return workload.mlp()

    def train_data(self) -> Data:
        return Data(
            ArraySource(workload.arrays(self._rows)),
            lambda records, _: {name: torch.from_numpy(a) for name, a in records.items()},
        )

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return workload.loss(model, batch["x"], batch["y"])

    def metrics(self) -> dict[str, Metric]:
        return {}

    def evaluate(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        """Never called: there is no evaluation set."""
