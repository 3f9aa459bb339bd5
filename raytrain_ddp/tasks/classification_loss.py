"""The losses of image classification: cross entropy, binary cross entropy, and focal loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.train_config import TrainConfig


class Criterion:
    """The mean loss over samples, `loss.name` of the config.

    Args:
        class_sizes: gives the number of training rows of each class, int64 (classes,); called once
            if classes are weighted.
    """

    def __init__(self, config: TrainConfig, class_sizes: Callable[[], Tensor]) -> None:
        self._config, self._smoothing = config.loss, config.optim.label_smoothing
        self._class_sizes = class_sizes
        self._weights: dict[torch.device, Tensor] = {}  # (classes,)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of training, shape (): with label smoothing and class weights. The mean is over
        the samples, so that it does not depend on how a step is cut into micro-batches.

        Args:
            logits: (n, classes). labels: int64 (n,).
        """
        if self._config.class_weights == "balanced":
            weights = self._class_weights(logits.device)
            return (self.each(logits, labels, self._smoothing) * weights[labels]).mean()
        if self._config.name == "cross-entropy":
            return cross_entropy(logits, labels, label_smoothing=self._smoothing)
        return self.each(logits, labels, self._smoothing).mean()

    def each(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The loss of each sample, (n,), without class weights; that of evaluation.

        Binary cross entropy is timm's (Wightman et al. 2021, ResNet strikes back), the focal loss
        that of Lin et al. 2017 over a softmax.
        """
        if self._config.name == "bce":
            from timm.loss import BinaryCrossEntropy  # seconds

            return BinaryCrossEntropy(smoothing, reduction="none")(logits, labels).mean(1)  # type: ignore[no-any-return]
        if self._config.name == "cross-entropy":
            return cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
        loss = cross_entropy(logits, labels, reduction="none")
        return (-torch.expm1(-loss)) ** self._config.gamma * loss

    def _class_weights(self, device: torch.device) -> Tensor:
        if device not in self._weights:  # only once: such a copy makes the host wait
            sizes = self._class_sizes()
            weights = sizes.sum() / (
                len(sizes) * sizes.clamp(min=1)
            )  # as scikit-learn's "balanced"
            self._weights[device] = weights.float().to(device)
        return self._weights[device]
