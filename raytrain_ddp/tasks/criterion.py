"""The loss of the built-in tasks, and how outputs are compared with several labels or numbers."""

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


class Criterion:
    """The mean loss over samples, `loss.name` of the config.

    Args:
        class_sizes: gives the number of training rows of each class, int64 (classes,); called once
            if classes are weighted.

    Attributes:
        of_targets: outputs are compared with `data.target_columns` instead of classes.
        monitor, goal: of the metrics of such targets.

    Raises:
        ConfigError: the loss cannot use the kind of targets.
    """

    def __init__(self, config: TrainConfig, class_sizes: Callable[[], Tensor]) -> None:
        config.require_loss()
        self._config, self._smoothing = config.loss, config.optim.label_smoothing
        self._class_sizes = class_sizes
        self._weights: dict[torch.device, Tensor] = {}  # (classes,)
        self.of_targets = bool(config.data.target_columns)
        self._binary = config.loss.name == "bce"
        self.monitor = "mean_ap" if self._binary else "mae"
        self.goal: Literal["min", "max"] = "max" if self._binary else "min"

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

        Binary cross entropy is timm's (Wightman et al. 2021, ResNet strikes back), the focal loss
        that of Lin et al. 2017 over a softmax.
        """
        name = self._config.name
        if self.of_targets:
            of: dict[str, Callable[..., Tensor]] = {
                "bce": functional.binary_cross_entropy_with_logits,
                "mse": functional.mse_loss,
                "l1": functional.l1_loss,
                "huber": functional.huber_loss,
            }
            return of[name](logits.float(), labels, reduction="none").mean(1)
        if name == "bce":
            from timm.loss import BinaryCrossEntropy  # seconds

            return BinaryCrossEntropy(smoothing, reduction="none")(logits, labels).mean(1)  # type: ignore[no-any-return]
        if name == "cross-entropy":
            return functional.cross_entropy(
                logits, labels, label_smoothing=smoothing, reduction="none"
            )
        loss = functional.cross_entropy(logits, labels, reduction="none")
        return (-torch.expm1(-loss)) ** self._config.gamma * loss

    def metrics(self, targets: int) -> dict[str, Metric]:
        """The metrics of this many targets, besides the loss."""
        from torchmetrics import MeanAbsoluteError, R2Score  # takes seconds to import
        from torchmetrics.classification import MultilabelF1Score

        from raytrain_ddp.tasks.class_metrics import MeanAveragePrecision

        if self._binary:
            return {
                "mean_ap": MeanAveragePrecision(targets),
                "f1": MultilabelF1Score(targets, validate_args=False),
            }

        class R2(R2Score):
            def compute(self) -> Tensor:  # torchmetrics raises an error
                value: Tensor = super().compute() if self.total > 1 else self.residual * torch.nan
                return value

        # In double precision: a variance is a small difference of sums of squares.
        mae, r2 = MeanAbsoluteError(), R2()
        return {"mae": mae.set_dtype(torch.float64), "r2": r2.set_dtype(torch.float64)}

    def counts(self, classes: int) -> Metric:
        """tp, fp, tn, fn and support of each class or label, shape (classes, 5).

        Raises:
            ConfigError: the targets are numbers.
        """
        from torchmetrics.classification import MultilabelStatScores

        from raytrain_ddp.tasks.class_metrics import ClassCounts

        if self.of_targets and not self._binary:
            raise ConfigError("data.target_columns are numbers, which have no classes.")
        if self.of_targets:
            return MultilabelStatScores(classes, average=None, validate_args=False)
        return ClassCounts(classes)

    def update(self, metrics: Mapping[str, Metric], logits: Tensor, labels: Tensor) -> None:
        """Adds samples to metrics: "loss", and those of classes or of targets."""
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(self.each(logits, labels))
            else:
                metric.update(*self._compared(logits, labels))

    def _compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What a metric is updated with: probabilities and labels, or numbers."""
        if not self.of_targets:
            return outputs, targets
        if self._binary:
            return outputs.sigmoid(), targets.long()
        return outputs.double().contiguous(), targets.double()

    def predicted(self, logits: Tensor) -> dict[str, Tensor]:
        """What outputs mean: "probability" of each class or label, and "logit"; or "value".

        Args:
            logits: float (n, classes or targets); so are the results.
        """
        if self.of_targets and not self._binary:
            return {"value": logits}
        of_each = self._binary or self._config.name == "bce"
        return {"probability": logits.sigmoid() if of_each else logits.softmax(1), "logit": logits}

    def _class_weights(self, device: torch.device) -> Tensor:
        if device not in self._weights:  # only once: such a copy makes the host wait
            sizes = self._class_sizes()
            weights = sizes.sum() / (len(sizes) * sizes.clamp(min=1))  # scikit-learn's "balanced"
            self._weights[device] = weights.float().to(device)
        return self._weights[device]
