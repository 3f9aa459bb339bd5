"""A custom task: regression on a table.

    python -m raytrain_ddp.fit --task examples/friedman.py:Friedman --epochs 20 --optim.lr 0.02

The data are Friedman's first regression problem (J. H. Friedman, Multivariate Adaptive Regression
Splines, 1991): ten columns, of which five matter, and noise of variance `noise` squared. So a
perfect model reaches a mean squared error of noise ** 2, which is 1 by default.

A task defines what is learned. The package handles the order of samples, the workers, the learning
rate and the checkpoints. The task has options: ``--task-options rows 5000 noise 0.5``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from raytrain_ddp import ArraySource, Data, Task, TrainConfig

if TYPE_CHECKING:
    from torchmetrics import Metric


class Friedman(Task):
    """Predicts y from ten columns with a small network."""

    monitor = "mse"
    goal = "min"
    unit = "rows"

    def __init__(self, config: TrainConfig, rows: str = "4000", noise: str = "1.0") -> None:
        self._train = _table(int(rows), float(noise), seed=1)
        self._eval = _table(1000, float(noise), seed=2)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def train_data(self) -> Data:
        return Data(self._train, _batch)

    def eval_data(self) -> Data:
        return Data(self._eval, _batch)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return mse_loss(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics import MeanSquaredError

        return {"mse": MeanSquaredError()}

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Metric]
    ) -> None:
        metrics["mse"].update(model(batch["x"]), batch["y"])


def _table(rows: int, noise: float, seed: int) -> ArraySource:
    """x (rows, 10) uniform in [0, 1), y (rows,); the same for the same seed."""
    random = np.random.Generator(np.random.Philox(seed))
    x = random.random((rows, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + noise * random.standard_normal(rows)
    return ArraySource({"x": x.astype(np.float32), "y": y.astype(np.float32)})


def _batch(records: Mapping[str, np.ndarray], draws: object) -> dict[str, Tensor]:
    """{"x": (n, 10), "y": (n,)}; `draws` has random numbers for augmentation, not needed here."""
    return {name: torch.from_numpy(values) for name, values in records.items()}
