"""What launch.py and recovery.py train, for raytrain_ddp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import workload

from raytrain_ddp import ArraySource, Data, Task, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric


class Made(Task):
    """The network and the made-up samples of workload.py; an epoch has `steps` steps.

    Args:
        stamps: the file of marks; see `workload.watch`.
    """

    def __init__(self, config: TrainConfig, stamps: str, steps: int) -> None:
        self._rows = steps * config.batch_size
        self._mark_step = workload.watch(stamps, by_hook=False)

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

    def evaluate(self, model: nn.Module, batch: object, metrics: object) -> None:
        """Never called: there is no evaluation set."""

    def after_step(self, model: nn.Module, step: int) -> None:
        self._mark_step()
