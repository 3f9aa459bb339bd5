"""Classes of images, several labels, or numbers: any model of torchvision or timm, your own, or a
small one for digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.pixels.decoding import open_encoded_image
from raytrain_ddp.data.pixels.gpu_augment import finish_images, mix
from raytrain_ddp.data.pixels.image_batches import image_data
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.criterion import Criterion
from raytrain_ddp.tasks.model_parts import freeze
from raytrain_ddp.tasks.model_zoo import TIMM
from raytrain_ddp.tasks.pretrained import begun_model, normalization_note
from raytrain_ddp.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric


class ImageClassification(Task):
    """One of the losses of `Criterion` over class labels; top-1, top-5 and loss as metrics. With
    `data.target_columns`: over several labels, or numbers."""

    monitor = "top1"
    goal: Literal["min", "max"] = "max"
    unit = "images"
    pretrained = True
    """Whether `model()` loads `model.weights`; not needed if a checkpoint follows."""

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
        inputs, partners = self._inputs(batch), batch.get("partner")
        inputs, labels = mix(inputs, batch["label"], partners, self._config.augment)
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
