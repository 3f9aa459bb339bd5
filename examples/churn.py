"""A table in CSV files with a column of 0 and 1, evaluated by the area under the ROC curve.

    python -m raytrain_ddp.fit --task examples/churn.py:Churn --batch-size 256 --micro-batch 256 \
        --optim.lr 0.05 --task-options train train.csv eval val.csv target churned

All other columns are features: numbers as they are, text as a column for each value.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.classification import BinaryAUROC

from raytrain_ddp import ArraySource, Data, Task, TrainConfig


class Churn(Task):
    monitor, goal, unit = "auroc", "max", "rows"

    def __init__(self, config: TrainConfig, train: str, eval: str, target: str) -> None:
        tables = [pd.read_csv(path) for path in (train, eval)]
        features = pd.get_dummies(pd.concat(table.drop(columns=target) for table in tables))
        x = features.to_numpy(np.float32)
        parts = np.split(np.nan_to_num(x), [len(tables[0])])
        self._sources = [
            ArraySource({"x": part, "y": table[target].to_numpy(np.float32)})
            for part, table in zip(parts, tables, strict=True)
        ]
        self._columns = x.shape[1]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm1d(self._columns), nn.Linear(self._columns, 64), nn.ReLU(),
            nn.BatchNorm1d(64), nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def train_data(self) -> Data:
        return Data(self._sources[0], batch_of)

    def eval_data(self) -> Data:
        return Data(self._sources[1], batch_of)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Any]:
        return {"auroc": BinaryAUROC()}

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Any) -> None:
        metrics["auroc"].update(model(batch["x"]).sigmoid(), batch["y"].long())


def batch_of(records: Mapping[str, np.ndarray], draws: object) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in records.items()}
