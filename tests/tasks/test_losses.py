"""The losses and metrics of the built-in tasks, compared with torch's, torchvision's, timm's, and
torchmetrics'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torchmetrics.classification import MulticlassStatScores, MultilabelAveragePrecision

from raytrain_ddp import LossConfig, OptimConfig, TrainConfig
from raytrain_ddp.data.pixels.gpu_augment import Mixed
from raytrain_ddp.tasks.class_metrics import MeanAveragePrecision
from raytrain_ddp.tasks.image_classification import Criterion, ImageClassification

CLASSES = 5
LABELS = torch.tensor([0, 1, 4, 4, 2, 4, 0])
PARTNERS = torch.tensor([0, 1, 1, 2, 2, 4, 3])
LOGITS = 3 * torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(0))


def criterion(sizes: Tensor | None = None, smoothing: float = 0.0, **loss: Any) -> Criterion:
    optim = OptimConfig(label_smoothing=smoothing)
    config = TrainConfig(loss=LossConfig(**loss), optim=optim)
    return Criterion(config, lambda: pytest.fail("counted") if sizes is None else sizes)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_equals_timms_also_for_mixed_images(smoothing: float):
    from timm.data.mixup import mixup_target
    from timm.loss import BinaryCrossEntropy

    ours, theirs = criterion(name="bce", smoothing=smoothing), BinaryCrossEntropy(smoothing)
    torch.testing.assert_close(ours(LOGITS, LABELS), theirs(LOGITS, LABELS))
    labels = torch.tensor([3, 1, 4, 0, 2, 4, 0, 0])  # timm mixes the first with the last
    logits = torch.randn(8, CLASSES, requires_grad=True)
    soft = mixup_target(labels, CLASSES, lam=0.3, smoothing=smoothing)
    mixed = Mixed(labels, labels.flip(0), 0.3).loss(lambda each: ours(logits, each))
    losses = mixed, theirs(logits, soft)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


@pytest.mark.parametrize("gamma", [1.0, 3.5])
def test_the_two_class_focal_loss_equals_torchvisions(gamma: float):
    from torchvision.ops import sigmoid_focal_loss

    score = torch.linspace(-8, 8, 33, requires_grad=True)
    labels = torch.arange(33) % 2
    ours = criterion(name="focal", gamma=gamma).each(
        torch.stack([torch.zeros(33), score], 1), labels
    )
    theirs = sigmoid_focal_loss(score, labels.float(), alpha=-1, gamma=gamma)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    gradients = (torch.autograd.grad(loss.sum(), score)[0] for loss in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_cross_entropy_equals_torchs_bitwise():
    for smoothing in (0.0, 0.1):
        expected = cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
        assert torch.equal(criterion(smoothing=smoothing)(LOGITS, LABELS), expected)


def test_balanced_weights_equal_scikit_learns_and_do_not_depend_on_batching():
    sizes = torch.tensor([4, 2, 0, 1, 13])
    balanced = criterion(sizes, class_weights="balanced")
    weights = np.array([20 / (5 * n) if n else 4 for n in sizes.tolist()], np.float32)
    each = cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (each * torch.from_numpy(weights)[LABELS]).mean()
    torch.testing.assert_close(balanced(LOGITS, LABELS), expected)
    parts = [balanced(LOGITS[at], LABELS[at]) * len(at) / 7 for at in torch.arange(7).split(3)]
    torch.testing.assert_close(sum(parts), expected)
    assert torch.equal(balanced.each(LOGITS, LABELS), each)  # of an evaluation: without weights


def test_a_mixed_image_has_the_weights_of_both_classes():
    sizes = torch.tensor([1, 2, 3, 4, 10])
    balanced = criterion(sizes, class_weights="balanced", smoothing=0.1)
    weights = 20 / (5 * sizes)
    shares = 0.25 * one_hot(LABELS, 5) + 0.75 * one_hot(PARTNERS, 5)
    log_p = LOGITS.log_softmax(1)
    smoothed = -(0.9 * log_p + 0.1 * log_p.mean(1, keepdim=True))
    expected = (shares * weights * smoothed).sum(1).mean()
    mixed = Mixed(LABELS, PARTNERS, 0.25).loss(lambda each: balanced(LOGITS, each))
    torch.testing.assert_close(mixed, expected)


def test_class_weights_are_computed_from_the_training_set():
    loss = LossConfig(class_weights="balanced")
    task = ImageClassification(TrainConfig(loss=loss, optim=OptimConfig(label_smoothing=0.0)))
    labels = task.splits.train.labels()
    batch = {"image": torch.zeros(7, 3, 8, 8, dtype=torch.uint8), "label": LABELS}
    logits = torch.randn(7, 10)
    model: Any = lambda _: logits  # noqa: E731
    weights = torch.from_numpy(len(labels) / (10 * np.bincount(labels, minlength=10))).float()
    expected = (cross_entropy(logits, LABELS, reduction="none") * weights[LABELS]).mean()
    torch.testing.assert_close(task.loss(model, batch), expected)


# ------------------------------------------------------------------ metrics


def batches() -> list[tuple[Tensor, Tensor]]:
    """Unequal batches; one has tied outputs, and one class never occurs."""
    made = torch.Generator().manual_seed(0)
    found = []
    for n in (7, 1, 32, 5):
        outputs = torch.randn(n, 11, generator=made)
        found.append((outputs, torch.randint(0, 11 - 1, (n,), generator=made)))
    found[2] = (found[2][0].round(), found[2][1])
    return found


def test_counts_of_each_class_equal_torchmetrics_bitwise():
    ours, theirs = criterion().counts(11), MulticlassStatScores(11, average=None)
    for outputs, labels in batches():
        criterion().update({"classes": ours}, outputs, labels)
        theirs.update(outputs, labels)
    assert ours.compute().dtype == theirs.compute().dtype
    assert torch.equal(ours.compute(), theirs.compute())


@pytest.mark.filterwarnings("ignore:No ")
def test_a_class_without_rows_is_excluded_from_averages():
    """torchmetrics counts it as 0."""
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]])
    labels = torch.tensor([0, 1, 0, 1])
    targets = one_hot(labels, 3)
    precision = MeanAveragePrecision(3)
    precision.update(scores, targets)
    assert precision.compute() == 1
    scores = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = MeanAveragePrecision(3), MultilabelAveragePrecision(3)
    for metric in (ours, theirs):
        metric.update(scores, one_hot(torch.arange(50) % 3, 3))
    torch.testing.assert_close(ours.compute(), theirs.compute())
