"""The metrics of the built-in tasks equal torchmetrics' and do not make the host wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassStatScores,
    MultilabelAveragePrecision,
)

from raytrain_ddp.tasks.class_metrics import (
    ClassCounts,
    Mean,
    MeanAveragePrecision,
    TopK,
)
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.metrics.metric_states import TreeMetrics
from raytrain_ddp.training.runtime.world import World

CLASSES = 11


def batches() -> list[tuple[Tensor, Tensor]]:
    """Unequal batches; one has tied outputs, and one class never occurs."""
    made = torch.Generator().manual_seed(0)
    found = []
    for n in (7, 1, 32, 5):
        outputs = torch.randn(n, CLASSES, generator=made)
        found.append((outputs, torch.randint(0, CLASSES - 1, (n,), generator=made)))
    found[2] = (found[2][0].round(), found[2][1])
    return found


PAIRS: list[tuple[str, Metric, Metric]] = [
    ("mean", Mean(), MeanMetric()),
    ("top1", TopK(1), MulticlassAccuracy(CLASSES, average="micro")),
    ("top5", TopK(5), MulticlassAccuracy(CLASSES, top_k=5, average="micro")),
    ("classes", ClassCounts(CLASSES), MulticlassStatScores(CLASSES, average=None)),
]


def of(name: str, outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (outputs[:, 0],) if name == "mean" else (outputs, labels)


class Waits(TorchDispatchMode):
    """Records operations for which a GPU's host waits: they read a value, or their size depends on
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        waits = ("_local_scalar_dense", "nonzero", "bincount", "unique", "aten.index.Tensor")
        self.found += [name for each in waits if each in name]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "ours", "theirs"), PAIRS)
def test_values_equal_torchmetrics_bitwise_and_no_update_reads_a_value_on_the_host(
    name: str, ours: Metric, theirs: Metric
):
    found = []
    for metric in (ours, theirs):
        with Waits() as waits:
            for outputs, labels in batches():
                metric.update(*of(name, outputs, labels))
        found.append(waits.found)
    assert ours.compute().dtype == theirs.compute().dtype
    assert torch.equal(ours.compute(), theirs.compute())
    assert found[0] == []
    assert name != "mean" or found[1] != []  # torchmetrics' own does: the test can detect it


def test_memory_is_linear_in_the_number_of_classes():
    """A table of all pairs would take 3.5 GB."""
    counts = ClassCounts(21_000)
    outputs, labels = torch.randn(4, 21_000), torch.tensor([0, 20_999, 5, 5])
    counts.update(outputs, labels)
    assert sum(state.numel() for state in counts.metric_state.values()) == 3 * 21_000 + 1
    assert counts.compute()[:, 4].nonzero().flatten().tolist() == [0, 5, 20_999]
    assert counts.compute()[:, :4].sum(1).unique().tolist() == [4]


def test_states_are_merged_over_chunks():
    metrics: dict[str, Metric] = {"mean": Mean(), "top1": TopK(1), "top5": TopK(5)}
    metrics["classes"] = ClassCounts(CLASSES)
    scores = TreeMetrics(type("Some", (Task,), {})(), metrics, torch.device("cpu"))
    for chunk, (outputs, labels) in enumerate(batches()):
        scores.reset()
        for name, metric in scores.given.items():
            metric.update(*of(name, outputs, labels))
        scores.take(chunk, True)
    values = scores.values(World(0, 1, 0, torch.device("cpu"), 1))
    whole = [torch.cat(each) for each in zip(*batches(), strict=True)]
    for name, _, theirs in PAIRS:
        theirs.reset()
        theirs.update(*of(name, *whole))
        assert torch.allclose(values[name].double(), theirs.compute().double(), atol=1e-6)


@pytest.mark.filterwarnings("ignore:No ")
def test_a_class_without_rows_is_excluded_from_averages():
    """torchmetrics counts it as 0."""
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]])
    labels = torch.tensor([0, 1, 0, 1])
    targets = functional.one_hot(labels, 3)
    precision = MeanAveragePrecision(3)
    precision.update(scores, targets)
    assert precision.compute() == 1
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(50, 3, generator=random).softmax(1)
    labels = torch.randint(3, (50,), generator=random)
    ours, theirs = MeanAveragePrecision(3), MultilabelAveragePrecision(3)
    for metric in (ours, theirs):
        metric.update(scores, functional.one_hot(labels, 3))
    torch.testing.assert_close(ours.compute(), theirs.compute())
