"""Classes of images, several labels, or numbers: any model of torchvision or timm, your own, or a
small one for digits; with their loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.pixels.decoding import open_encoded_image
from raytrain_ddp.data.pixels.gpu_augment import finish_images, mix
from raytrain_ddp.data.pixels.image_batches import image_data
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_parts import freeze
from raytrain_ddp.tasks.model_zoo import TIMM, begun_model, normalization_note
from raytrain_ddp.tasks.task import Task

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


class ImageClassification(Task):
    """One of the losses of `Criterion` over class labels; top-1, top-5 and loss as metrics. With
    `data.target_columns`: over several labels, or numbers."""

    monitor = "top1"
    goal: Literal["min", "max"] = "max"
    unit = "images"

    def __init__(self, config: TrainConfig) -> None:
        self._begin(config)
        self.splits = open_splits(config.data, binary=config.loss.name == "bce")
        self.class_names = self.splits.class_names

    @classmethod
    def without_data(cls, config: TrainConfig, class_names: Sequence[str]) -> ImageClassification:
        """Makes the task for the model and predictions of a checkpoint, wherever its data are."""
        task = cls.__new__(cls)
        task._begin(config)
        task.class_names = [*class_names]
        return task

    def _begin(self, config: TrainConfig) -> None:
        self._config = config
        self.notes: list[str] = []  # about the model
        self._criterion = Criterion(config, self._class_sizes)
        self._scales: dict[torch.device, Tensor] = {}  # mean and std, (2, 3, 1, 1)
        self.monitor, self.goal = self._criterion.monitor, self._criterion.goal

    def model(self) -> nn.Module:
        config, names = self._config.model, self.class_names
        model, weights_note = begun_model(config, len(names), self.pretrained, names)
        data = self._config.data
        expects = normalization_note(model, data.mean, data.std) if weights_note else ""
        frozen_note = freeze(model, config.freeze)
        self.notes = [*filter(None, (weights_note, expects, frozen_note))]
        return model

    def train_data(self) -> Data:
        config = self._config
        return image_data(self.splits.train, config.data, config.augment, len(self.class_names))

    def eval_data(self) -> Data | None:
        if self.splits.eval is None:
            return None
        return image_data(self.splits.eval, self._config.data, None, len(self.class_names))

    @property
    def stored_image_size(self) -> int:
        """Side of the first training image, in pixels; 0 if it is not square or cannot be read."""
        try:
            stored = self.splits.train.read(np.array([0]))[0][0]
            image = open_encoded_image(stored, self._config.data.exif_orientation)
        except Exception:  # the source's, or a decoder's
            return 0
        return image.height if image.height == image.width else 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        partners, augment = batch.get("partner"), self._config.augment
        inputs, labels = mix(self._inputs(batch), batch["label"], partners, augment)
        logits = self._logits(model, inputs)
        return labels.loss(lambda targets: self._criterion(logits, targets))

    def metrics(self) -> dict[str, Metric]:
        return self._criterion.metrics(len(self.class_names))

    def per_class_metrics(self) -> dict[str, Metric]:
        """Adds "classes": tp, fp, tn, fn and support of each class, shape (classes, 5)."""
        return {**self.metrics(), "classes": self._criterion.counts(len(self.class_names))}

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> None:
        logits, labels = self.logits(model, batch).float(), batch["label"]
        self._criterion.update(metrics, logits, labels)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self._criterion.predicted(self.logits(model, batch).float())

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits of the batch's "image", uint8 (n, 3, h, w) -> float (n, classes)."""
        return self._logits(model, self._inputs(batch))

    def _logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The logits, shape (n, classes).

        Raises:
            ConfigError: the model takes images of another size, or returns something else.
        """
        name, wanted = self._config.model.name, (len(inputs), len(self.class_names))
        try:
            logits = model(inputs)
        except AssertionError as error:  # of torchvision's and timm's transformers
            of_timm = name.startswith(TIMM)
            if ":" in name and not of_timm:
                raise
            (height, width), size = inputs.shape[-2:], "img_size" if of_timm else "image_size"
            raise ConfigError(
                f"model.name = {name!r} does not take images of {height} x {width} pixels "
                f"({error}): set data.image_size and data.eval_size to its size, or build it for "
                f"yours with --model.args {size}={height}."
            ) from error
        if isinstance(logits, Tensor) and logits.shape == wanted:
            return logits
        is_tensor = isinstance(logits, Tensor)
        found = f"shape {tuple(logits.shape)}" if is_tensor else f"a {type(logits).__name__}"
        raise ConfigError(
            f"model.name = {name!r}: for {wanted[0]} images and {wanted[1]} "
            f"{self._criterion.kind} it returns {found} instead of shape {wanted}."
        )

    def _class_sizes(self) -> Tensor:
        """Rows of each class in the training set, (classes,); reads all its labels."""
        labels = torch.from_numpy(np.asarray(self.splits.train.labels(), np.int64))
        return labels.bincount(minlength=len(self.class_names))

    def _inputs(self, batch: Batch) -> Tensor:
        """The model's input, float (n, 3, h, w), computed on the device."""
        images = batch["image"]
        if images.device not in self._scales:  # only once: such a copy makes the host wait
            values = torch.tensor([self._config.data.mean, self._config.data.std])
            self._scales[images.device] = (values * 255).view(2, 3, 1, 1).to(images.device)
        mean, std = self._scales[images.device]
        flip, erase = batch.get("flip"), batch.get("erase")
        channels_last = self._config.compute.channels_last is True
        return finish_images(images, mean, std, flip, erase, channels_last)
