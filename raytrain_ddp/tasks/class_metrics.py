"""Metrics that the built-in task needs and torchmetrics lacks. Importing it takes seconds."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import R2Score
from torchmetrics.classification import MultilabelAveragePrecision
from torchmetrics.utilities.data import dim_zero_cat


class R2(R2Score):
    """R2Score that is nan for a single row, where torchmetrics raises an error."""

    def compute(self) -> Tensor:
        value: Tensor = super().compute() if self.total > 1 else self.residual * torch.nan
        return value


class MeanAveragePrecision(MultilabelAveragePrecision):
    """The mean over the labels that some rows have; nan if there is none. torchmetrics would count
    the other labels as 0."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, average=None, validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        of_each: Tensor = super().compute()
        return of_each[(dim_zero_cat(self.target) > 0).any(0)].mean()
