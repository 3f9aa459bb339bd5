"""``raytrain_ddp.load(RUN)``: a trained model with its preprocessing and its classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import (
    config_of,
    find_checkpoint,
    recorded,
    recorded_classes,
)
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels.image_batches import OnBad, image_data
from raytrain_ddp.data.splits import ImageSource
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.process_state import process_as_found
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.tasks.task_check import model_of
from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task
from raytrain_ddp.tools.inference.batch_outputs import EMBEDDING, outputs
from raytrain_ddp.tools.inference.inputs import GivenImages
from raytrain_ddp.training.runtime.world import choose_device
from raytrain_ddp.training.state.shared_checkpoint import load_model

if TYPE_CHECKING:
    from raytrain_ddp.checkpoint.store import Checkpoint
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.tasks.task import Task


class LoadedModel(nn.Module):
    """A trained model in evaluation mode, as `load` returns it.

    Called with uint8 images (n, 3, height, width), as `preprocess` returns them, it normalizes them
    and returns the logits (n, classes). With a task of your own, it is called like its model.

    Attributes:
        model: as the task builds it.
        class_names: in the order of the outputs; empty if there are none.
        config: of the run.
        checkpoint: the one that was loaded.
    """

    def __init__(
        self, task: Task, model: nn.Module, config: TrainConfig, checkpoint: Checkpoint
    ) -> None:
        super().__init__()
        self.task, self.model, self.config, self.checkpoint = task, model, config, checkpoint
        self.class_names = [str(name) for name in task.class_names]
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def takes_images(self) -> bool:
        """Whether it is the model of an image classification."""
        return isinstance(self.task, ImageClassification)

    def forward(self, *inputs: Any) -> Any:
        if isinstance(self.task, ImageClassification):
            return self.task.logits(self.model, {"image": inputs[0]})
        return self.model(*inputs)

    def preprocess(self, images: Sequence[Any]) -> Tensor:
        """Decodes, resizes and crops images as the evaluation of the run does.

        Args:
            images: paths, encoded bytes, PIL images, or uint8 arrays (height, width, 3).

        Returns:
            uint8 (n, 3, height, width), on the model's device.

        Raises:
            DataError: an image cannot be read; names it.
        """
        data = self._data_of(images)
        tensor: Tensor = data.batch(Draws(0, 0, np.arange(data.rows)))["image"].to(self.device)
        return tensor

    def predict(
        self,
        images: Sequence[Any],
        batch_size: int | None = None,
        tta: Literal["none", "flip"] = "none",
        layer: str | None = None,
    ) -> list[dict[str, Any]]:
        """What the model says of each image: "class", "probability" and "probabilities" by class
        name; for several labels or numbers, "probabilities" or "values".

        Args:
            images: as for `preprocess`.
            batch_size: images of a forward pass. Default: as in the evaluation.
            tta: flip: the mean of the outputs for the image and its mirror image.
            layer: adds the output of this module as "embedding".

        Raises:
            DataError: an image cannot be read; names it.
        """
        size = self.config.eval_micro_batch if batch_size is None else batch_size
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"batch_size = {size!r}: must be an integer, 1 or more.")
        data = self._data_of(images)
        chunks = range(-(-data.rows // size))
        made = outputs(self, data, chunks, {}, LoaderThreads(0), size, tta, layer)
        return [self._row(chunk.values, n) for chunk in made for n in range(len(chunk.kept))]

    def _row(self, values: dict[str, Any], place: int) -> dict[str, Any]:
        of_each = values["value" if "value" in values else "probability"][place]
        by_name = dict(zip(self.class_names, of_each.tolist(), strict=True))
        row: dict[str, Any] = {"values" if "value" in values else "probabilities": by_name}
        if "value" not in values and not self.config.data.target_columns:
            best = int(values.get("logit", values["probability"])[place].argmax())
            row = {"class": self.class_names[best], "probability": of_each[best].item(), **row}
        if EMBEDDING in values:
            row["embedding"] = values[EMBEDDING][place]
        return row

    def _data_of(self, images: Sequence[Any]) -> Data:
        if not self.takes_images:
            raise ConfigError(
                f"task = {self.config.task!r} is not an image classification: call the model."
            )
        if isinstance(images, str | bytes) or not isinstance(images, Sequence) or not images:
            raise ConfigError("give a list of images, also for a single one: predict([image]).")
        source = GivenImages(images)

        def refuse(row: int, why: str) -> None:
            raise DataError(f"{source.where(row)}: not a readable image: {why}.")

        return self.data_of(source, refuse, self.image_size)

    @cached_property
    def image_size(self) -> int:
        """The side of the images that the model takes, in pixels. If they are used as they are
        stored: that of the first training image, or 0 if it was not square or not readable."""
        config = self.config.data
        known: int = config.eval_size or config.image_size
        return known or recorded(self.checkpoint).get("data", {}).get("image_size", 0)

    def data_of(self, source: ImageSource, on_bad: OnBad, image_size: int = 0) -> Data:
        """The batches of an image classification, made as in its evaluation.

        Args:
            on_bad: see `image_data`.
            image_size: instead of that of the evaluation; 0: that.
        """
        config = self.config.data
        if image_size:
            config = replace(config, image_size=image_size, eval_size=0)
        return image_data(source, config, None, len(self.class_names), on_bad)


@process_as_found()
def load(
    run: str | os.PathLike[str],
    checkpoint: Literal["best", "last"] | None = None,
    device: str = "auto",
) -> LoadedModel:
    """The model of a checkpoint, with the weights that the run evaluated (the averaged ones, with
    `ema.decay`). The data of a built-in image classification need not be there.

    Args:
        run: folder or URI of a run, its name below runs/, or the folder of one checkpoint.
        checkpoint: of the run. Default: best.
        device: auto (a GPU if there is one), cpu, cuda or cuda:1.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version wrote it.
        ConfigError: the task cannot be built here, or `checkpoint` is something else.
    """
    if checkpoint not in ("best", "last", None):
        raise ConfigError(f"checkpoint = {checkpoint!r}: must be best or last.")
    found = find_checkpoint(os.fspath(run), checkpoint)
    return loaded(found, config_of(found), choose_device(device))


def loaded(checkpoint: Checkpoint, config: TrainConfig, device: torch.device) -> LoadedModel:
    """As `load`, with the config given."""
    names = recorded_classes(checkpoint)
    if config.task in BUILT_IN and names:
        task: Task = ImageClassification.without_data(config, names)
    else:  # a task of your own, or a checkpoint of an earlier version
        task = load_task(config)
    model = model_of(task, pretrained=False)
    load_model(model, checkpoint)
    return LoadedModel(task, model.to(device), config, checkpoint)
