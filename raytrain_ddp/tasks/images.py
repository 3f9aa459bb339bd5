"""Image classification: any torchvision model, or a small network for digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.data.images import image_data, open_images
from raytrain_ddp.data.locate import locate
from raytrain_ddp.data.source import Batch, Data
from raytrain_ddp.errors import DataError
from raytrain_ddp.tasks.digits import DigitsCNN
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.zoo import DIGITS

if TYPE_CHECKING:
    from torchmetrics import Metric


class ImageClassification(Task):
    """Cross entropy over class labels; top-1, top-5 and loss as metrics."""

    monitor = "top1"
    goal: Literal["min", "max"] = "max"
    unit = "images"

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        train, evaluation = locate(config.data.source, config.data.eval_source)
        self._train = open_images(train, config.data)
        self._eval = open_images(evaluation, config.data) if evaluation else None
        self.class_names = self._train.class_names
        if self._eval and self._eval.class_names != self.class_names:
            raise DataError(
                f"the evaluation set has classes {_some(self._eval.class_names)}, the training set "
                f"{_some(self.class_names)}."
            )

    def model(self) -> nn.Module:
        config, classes = self._config.model, len(self.class_names)
        if config.name == DIGITS:
            return DigitsCNN(classes, config.dropout)
        from torchvision.models import get_model, get_model_weights

        model: nn.Module = get_model(config.name, weights=None, num_classes=classes)
        if config.weights:
            weights = get_model_weights(config.name)[config.weights].get_state_dict(check_hash=True)
            own = model.state_dict()
            fitting = {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
            model.load_state_dict(fitting, strict=False)
        return model

    def train_data(self) -> Data:
        return image_data(self._train, self._config.data, len(self.class_names), train=True)

    def eval_data(self) -> Data | None:
        if self._eval is None:
            return None
        return image_data(self._eval, self._config.data, len(self.class_names), train=False)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(self._inputs(batch["image"]))
        smoothing = self._config.optim.label_smoothing
        return cross_entropy(_only_logits(logits), batch["label"], label_smoothing=smoothing)

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics import MeanMetric  # seconds to import: not before it is needed
        from torchmetrics.classification import MulticlassAccuracy

        classes = len(self.class_names)
        metrics: dict[str, Metric] = {"loss": MeanMetric()}
        for k in (1, 5):
            if k < classes:
                metrics[f"top{k}"] = MulticlassAccuracy(classes, top_k=k, average="micro")
        return metrics

    def per_class_metrics(self) -> dict[str, Metric]:
        """Adds "classes": tp, fp, tn, fn and support of each class, shape (classes, 5)."""
        from torchmetrics.classification import MulticlassStatScores

        counts = MulticlassStatScores(len(self.class_names), average=None)
        return {**self.metrics(), "classes": counts}

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> None:
        logits, labels = model(self._inputs(batch["image"])).float(), batch["label"]
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(cross_entropy(logits, labels, reduction="none"))
            else:
                metric.update(logits, labels)

    def _inputs(self, images: Tensor) -> Tensor:
        """uint8 (n, 3, h, w) to normalised floats, on the device."""
        data, compute = self._config.data, self._config.compute
        mean = torch.tensor(data.mean, device=images.device).view(1, 3, 1, 1) * 255
        std = torch.tensor(data.std, device=images.device).view(1, 3, 1, 1) * 255
        inputs = (images.float() - mean) / std
        if compute.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs


def _only_logits(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """googlenet and inception give auxiliary outputs beside the logits while training."""
    return output if isinstance(output, Tensor) else output[0]


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({len(names)})"
