"""The loss and the metrics of the built-in task: of classes, of several labels, or of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

if TYPE_CHECKING:
    from torchmetrics import Metric

_OF_TARGETS: Mapping[str, Callable[..., Tensor]] = {
    "bce": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}


class Criterion:
    """The mean loss over samples, `loss.name` of the config, and what outputs mean with it.

    Args:
        class_sizes: gives the number of training rows of each class, int64 (classes,); called once
            if classes are weighted.

    Attributes:
        kind: what outputs are compared with: a class, or `data.target_columns`.
        monitor, goal: the metric that decides which evaluation is the best, and its direction.

    Raises:
        ConfigError: the loss cannot use the kind of targets.
    """

    def __init__(self, config: TrainConfig, class_sizes: Callable[[], Tensor]) -> None:
        config.require_loss()
        self._config, self._smoothing = config.loss, config.optim.label_smoothing
        self._class_sizes = class_sizes
        self._weights: dict[torch.device, Tensor] = {}  # (classes,)
        of_targets: Literal["labels", "numbers"]
        of_targets = "labels" if config.loss.name == "bce" else "numbers"
        self.kind = of_targets if config.data.target_columns else "classes"
        self.monitor = {"classes": "top1", "labels": "mean_ap", "numbers": "mae"}[self.kind]
        self.goal: Literal["min", "max"] = "min" if self.kind == "numbers" else "max"

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of training, shape (): with label smoothing and class weights. The mean is over
        the samples, so that it does not depend on how a step is cut into micro-batches.

        Args:
            logits: (n, classes). labels: int64 (n,); or targets, float (n, classes).
        """
        if self._config.class_weights == "balanced":
            weights = self._class_weights(logits.device)
            return (self.each(logits, labels, self._smoothing) * weights[labels]).mean()
        if self._config.name == "cross-entropy":
            return functional.cross_entropy(logits, labels, label_smoothing=self._smoothing)
        return self.each(logits, labels, self._smoothing).mean()

    def each(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The loss of each sample, (n,), without class weights; that of evaluation.

        Binary cross-entropy is timm's (Wightman et al. 2021, ResNet strikes back); the focal loss
        is that of Lin et al. 2017 over a softmax.
        """
        name = self._config.name
        if self.kind != "classes":
            return _OF_TARGETS[name](logits.float(), labels, reduction="none").mean(1)
        if name == "bce":
            from timm.loss import BinaryCrossEntropy  # seconds

            return BinaryCrossEntropy(smoothing, reduction="none")(logits, labels).mean(1)  # type: ignore[no-any-return]
        if name == "focal":
            loss = functional.cross_entropy(logits, labels, reduction="none")
            return (-torch.expm1(-loss)) ** self._config.gamma * loss
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")

    def metrics(self, outputs: int) -> dict[str, Metric]:
        """New metrics, "loss" among them, for this number of classes, labels or numbers."""
        from torchmetrics import MeanAbsoluteError, MeanMetric  # takes seconds to import
        from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

        from raytrain_ddp.tasks.class_metrics import R2, MeanAveragePrecision

        # torchmetrics' checks of values would make the host wait for the device.
        loss = MeanMetric(nan_strategy="disable")
        if self.kind == "labels":
            f1 = MultilabelF1Score(outputs, validate_args=False)
            return {"loss": loss, "mean_ap": MeanAveragePrecision(outputs), "f1": f1}
        if self.kind == "numbers":
            # These need double precision: a variance is a small difference of sums of squares.
            mae, r2 = (each.set_dtype(torch.float64) for each in (MeanAbsoluteError(), R2()))
            return {"loss": loss, "mae": mae, "r2": r2}
        tops = {
            f"top{k}": MulticlassAccuracy(outputs, k, average="micro", validate_args=False)
            for k in (1, 5)
            if k < outputs
        }
        return {"loss": loss, **tops}

    def counts(self, outputs: int) -> Metric:
        """A metric: tp, fp, tn, fn and support of each class or label, shape (classes, 5).

        Raises:
            ConfigError: the targets are numbers.
        """
        from torchmetrics.classification import MultilabelStatScores

        if self.kind == "numbers":
            raise ConfigError("data.target_columns are numbers, which have no classes.")
        # For classes, too: MulticlassStatScores would make a table of all pairs of classes.
        return MultilabelStatScores(outputs, average=None, validate_args=False)

    def update(self, metrics: Mapping[str, Metric], logits: Tensor, labels: Tensor) -> None:
        """Adds samples to `metrics`, and to `counts` by the name "classes"."""
        pair = logits, labels
        if self.kind == "labels":
            pair = logits.sigmoid(), labels.long()
        elif self.kind == "numbers":
            pair = logits.double().contiguous(), labels.double()
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(self.each(logits, labels))
            elif name == "classes" and self.kind == "classes":
                both = (logits.argmax(1), labels)
                metric.update(*(functional.one_hot(each, logits.shape[1]) for each in both))
            else:
                metric.update(*pair)

    def predicted(self, logits: Tensor) -> dict[str, Tensor]:
        """What outputs mean: "probability" of each class or label, and "logit"; or "value".

        Args:
            logits: float (n, classes or targets); so are the results.
        """
        if self.kind == "numbers":
            return {"value": logits}
        of_each = self._config.name == "bce"
        return {"probability": logits.sigmoid() if of_each else logits.softmax(1), "logit": logits}

    def _class_weights(self, device: torch.device) -> Tensor:
        if device not in self._weights:  # only once: such a copy makes the host wait
            sizes = self._class_sizes()
            weights = sizes.sum() / (len(sizes) * sizes.clamp(min=1))  # scikit-learn's "balanced"
            self._weights[device] = weights.float().to(device)
        return self._weights[device]
