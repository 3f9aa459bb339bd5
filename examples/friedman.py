"""A custom task: regression on a table.

    python -m raytrain_ddp.fit --task examples/friedman.py:Friedman --epochs 20 --optim.lr 0.02

The data are Friedman's first regression problem (J. H. Friedman, Multivariate Adaptive Regression
Splines, 1991): ten columns, of which five matter, and noise of variance `noise` squared. So a
perfect model reaches a mean squared error of noise ** 2, which is 1 by default.
The task has options: ``--task-options rows 5000 noise 0.5``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchmetrics import MeanSquaredError, Metric

from raytrain_ddp import ArraySource, Data, Task, TrainConfig


class Friedman(Task):
    """Predicts y from ten columns with a small network."""

    monitor, goal, unit = "mse", "min", "rows"

    def __init__(self, config: TrainConfig, rows: int = 4000, noise: float = 1.0) -> None:
        self._train, self._eval = _table(rows, noise, seed=1), _table(1000, noise, seed=2)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def train_data(self) -> Data:
        return Data(self._train)

    def eval_data(self) -> Data:
        return Data(self._eval)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return mse_loss(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Metric]:
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
