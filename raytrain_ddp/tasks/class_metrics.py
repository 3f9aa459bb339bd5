"""Metrics of the built-in tasks, with torchmetrics' values but without what a GPU waits for.

torchmetrics' own check values on the host in each update, and count classes in a table of all pairs
of classes. Imports torchmetrics: seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MultilabelAveragePrecision
from torchmetrics.utilities.data import dim_zero_cat


class Mean(Metric):
    """The mean of all values, as `torchmetrics.MeanMetric`; not finite if one of them is not."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")
        self.add_state("count", torch.tensor(0.0), "sum")

    def update(self, values: Tensor) -> None:
        self.total += values.to(self.dtype).sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class TopK(Metric):
    """Share of samples whose label is among the k largest outputs, as `MulticlassAccuracy` with
    average="micro"."""

    full_state_update = False
    right: Tensor
    count: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self.add_state("right", torch.tensor(0), "sum")
        self.add_state("count", torch.tensor(0), "sum")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Of outputs (n, classes) and labels (n,)."""
        first = outputs.argmax(1, keepdim=True) if self._k == 1 else outputs.topk(self._k).indices
        self.right += (first == labels.view(-1, 1)).sum()
        self.count += len(labels)

    def compute(self) -> Tensor:
        return self.right.float() / self.count.float()


class MeanAveragePrecision(MultilabelAveragePrecision):
    """The mean over the labels that some rows have; torchmetrics counts another one as 0. nan if
    there is none."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, average=None, validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        of_each: Tensor = super().compute()
        return of_each[(dim_zero_cat(self.target) > 0).any(0)].mean()


class ClassCounts(Metric):
    """tp, fp, tn, fn and support of each class, shape (classes, 5), as `MulticlassStatScores` with
    average=None. Its memory grows with the classes, not with their square."""

    full_state_update = False
    tp: Tensor
    predicted: Tensor
    support: Tensor
    count: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        for name in ("tp", "predicted", "support"):
            self.add_state(name, torch.zeros(classes, dtype=torch.long), "sum")
        self.add_state("count", torch.tensor(0), "sum")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Of outputs (n, classes) and labels (n,)."""
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        predicted = outputs.argmax(1, keepdim=True) == classes  # (n, classes)
        there = labels.view(-1, 1) == classes
        self.tp += (predicted & there).sum(0)
        self.predicted += predicted.sum(0)
        self.support += there.sum(0)
        self.count += len(labels)

    def compute(self) -> Any:
        fp, fn = self.predicted - self.tp, self.support - self.tp
        tn = self.count - self.tp - fp - fn
        return torch.stack([self.tp, fp, tn, fn, self.support], 1)
