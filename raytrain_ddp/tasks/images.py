"""Image classification: any torchvision model, or a small network for digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.data.device import finish, mix
from raytrain_ddp.data.images import image_data, open_images
from raytrain_ddp.data.locate import locate
from raytrain_ddp.data.source import Batch, Data
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean
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
        self._scales: dict[torch.device, Tensor] = {}  # mean and std, (2, 3, 1, 1)
        train, evaluation = locate(config.data.source, config.data.eval_source)
        self._train = open_images(train, config.data)
        self._eval = open_images(evaluation, config.data) if evaluation else None
        self.class_names = self._train.class_names
        # A split without the last classes may not know of them.
        if self._eval and self._eval.class_names != self.class_names[: len(self._eval.class_names)]:
            raise DataError(
                f"the evaluation set has classes {_some(self._eval.class_names)}, the training set "
                f"{_some(self.class_names)}."
            )

    def model(self) -> nn.Module:
        config, classes = self._config.model, len(self.class_names)
        if config.name == DIGITS:
            return DigitsCNN(classes, config.dropout)
        from torchvision.models import get_model, get_model_weights

        # Their auxiliary heads would be trained by no loss here.
        alone = {"aux_logits": False} if config.name in ("googlenet", "inception_v3") else {}
        model: nn.Module = get_model(config.name, weights=None, num_classes=classes, **alone)
        if config.weights:
            known = get_model_weights(config.name)
            if config.weights not in known.__members__:
                names = list(known.__members__)
                raise ConfigError(
                    f"model.weights = {config.weights!r}: {config.name} has {', '.join(names)}."
                    f"{did_you_mean(config.weights, names)}"
                )
            weights = known[config.weights].get_state_dict(check_hash=True)
            own = model.state_dict()
            fitting = {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
            model.load_state_dict(fitting, strict=False)
        return model

    def train_data(self) -> Data:
        config = self._config
        return image_data(self._train, config.data, config.augment, len(self.class_names))

    def eval_data(self) -> Data | None:
        if self._eval is None:
            return None
        return image_data(self._eval, self._config.data, None, len(self.class_names))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, partners = self._inputs(batch), batch.get("partner")
        inputs, labels = mix(inputs, batch["label"], partners, self._config.augment)
        return labels.loss(model(inputs), self._config.optim.label_smoothing)

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
        logits, labels = model(self._inputs(batch)).float(), batch["label"]
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(cross_entropy(logits, labels, reduction="none"))
            else:
                metric.update(logits, labels)

    def _inputs(self, batch: Batch) -> Tensor:
        """What the model is given, float (n, 3, h, w), made on the device."""
        images = batch["image"]
        if images.device not in self._scales:  # once: such a copy makes the host wait
            values = torch.tensor([self._config.data.mean, self._config.data.std])
            self._scales[images.device] = (values * 255).view(2, 3, 1, 1).to(images.device)
        mean, std = self._scales[images.device]
        flip, erase = batch.get("flip"), batch.get("erase")
        return finish(images, mean, std, flip, erase, self._config.compute.channels_last)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({len(names)})"
