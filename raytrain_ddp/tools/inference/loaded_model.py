"""``raytrain_ddp.load(RUN)``: a trained model with its preprocessing and its classes, and its
outputs for each row of the data, computed in the same chunks as in an evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import (
    config_of,
    recorded,
    recorded_classes,
    with_checkpoint,
)
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.data.loading.sources import Data, ImageSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.image_batches import OnBad, image_data
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean, first_names
from raytrain_ddp.process_state import process_as_found
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.tasks.task_check import model_of, refused
from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task
from raytrain_ddp.tools.inference.inputs import Column, GivenImages
from raytrain_ddp.training.evaluation import passes
from raytrain_ddp.training.runtime.world import choose_device
from raytrain_ddp.training.state.shared_checkpoint import load_model

if TYPE_CHECKING:
    from raytrain_ddp.checkpoint.store import Checkpoint
    from raytrain_ddp.config.train_config import TrainConfig
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

    def classes(self, top: int) -> int:
        """How many classes a prediction has: `top`, or 0 if the run predicts no classes."""
        return top if self.class_names and not self.config.data.target_columns else 0

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
        self, images: Sequence[Any], batch_size: int | None = None, layer: str | None = None
    ) -> list[dict[str, Any]]:
        """What the model says of each image: "class", "probability" and "probabilities" by class
        name; for several labels or numbers, "probabilities" or "values".

        Args:
            images: as for `preprocess`.
            batch_size: images of a forward pass. Default: as in the evaluation.
            layer: adds the output of this module as "embedding".

        Raises:
            DataError: an image cannot be read; names it.
        """
        size = batch_size or self.config.eval_micro_batch
        data, found = self._data_of(images), list[dict[str, Any]]()
        chunks = range(-(-data.rows // size))
        for chunk in outputs(self, data, chunks, {}, LoaderThreads(0), size, layer):
            columns = [*columns_of(chunk.values, self.class_names, self.classes(1), True)]
            for place in range(len(chunk.kept)):
                found.append({name: _of(each[place], names) for name, each, names in columns})
        return found

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

    def data_of(self, source: ImageSource, on_bad: OnBad | None, image_size: int = 0) -> Data:
        """The batches of an image classification, made as in its evaluation.

        Args:
            on_bad: see `image_data`.
            image_size: instead of that of the evaluation; 0: that.
        """
        config = self.config.data
        if image_size:
            config = replace(config, image_size=image_size, eval_size=0)
        return image_data(source, config, None, len(self.class_names), on_bad)


def _of(value: Any, names: Sequence[str]) -> Any:
    """The output for one row: numbers by their names, if they have names."""
    if names:
        return dict(zip(names, value.tolist(), strict=True))
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


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
        ConfigError: there is no run, the task cannot be built here, or `checkpoint` is neither.
    """
    if checkpoint not in ("best", "last", None):
        raise ConfigError(f"checkpoint = {checkpoint!r}: must be best or last.")
    chosen = choose_device(device)
    return with_checkpoint(
        os.fspath(run), checkpoint, lambda found: loaded(found, config_of(found), chosen)
    )


def loaded(
    checkpoint: Checkpoint,
    config: TrainConfig,
    device: torch.device,
    reads: set[str] | None = None,
) -> LoadedModel:
    """Like `load`, with a given config. `reads`: see `load_task`."""
    names = recorded_classes(checkpoint)
    if config.task in BUILT_IN and names:
        task: Task = ImageClassification.without_data(config, names)
    else:  # a task of your own, or a checkpoint of an earlier version
        task = load_task(config, reads)
    model = model_of(task, pretrained=False)
    load_model(model, checkpoint)
    return LoadedModel(task, model.to(device), config, checkpoint)


class Outputs(NamedTuple):
    """The outputs of a chunk.

    Args:
        rows: all rows of the chunk. kept: the rows that are not bad records, in order.
        values: tensors on the CPU, or lists, with an entry for each row in `kept`.
    """

    rows: range
    kept: list[int]
    values: dict[str, Any]


def outputs(
    loaded: LoadedModel,
    data: Data,
    chunks: Sequence[int],
    bad: Mapping[int, str],
    threads: LoaderThreads,
    size: int,
    layer: str | None = None,
) -> Iterator[Outputs]:
    """Yields the outputs of each chunk, in order, computed in the same way as in `evaluate`.

    Args:
        bad: the rows that were omitted from the batches yielded so far.
        size: rows in a chunk. Kernels for other sizes may round differently.
        layer: a module whose output is added as "embedding", (n, numbers).

    Raises:
        ConfigError: the task cannot predict, or the model has no such layer.
        DataError: a batch has more or fewer samples than rows that are not bad.
        TaskError: `predict` returns something else.
    """
    predict = getattr(loaded.task, "predict", None)
    if predict is None:
        raise ConfigError(
            f"{type(loaded.task).__name__} has no predict(model, batch): add one that returns a "
            "dict of tensors or lists by name, with an entry for each sample."
        )
    model, given = loaded.model, (chunks, size, loaded.device, threads)
    made = passes(loaded.config, model, data, *given)
    with _captured(model, layer) as captured, closing(made):
        for chunk, batch, own in made:
            rows = range(chunk * size, min((chunk + 1) * size, data.rows))
            kept = [row for row in rows if row not in bad]
            samples = data.samples_of(batch)
            if samples != len(kept):
                raise DataError(
                    f"rows {rows[0]} to {rows[-1]} gave {samples} samples: predictions cannot be "
                    "assigned to rows, because collate dropped some of them."
                )
            values = _checked(predict, predict(model, own), samples) if samples else {}
            layers = {"embedding": _on_cpu(captured.pop().flatten(1))} if captured else {}
            yield Outputs(rows, kept, {**values, **layers})


def columns_of(
    values: Mapping[str, Any], class_names: Sequence[str], top: int, probabilities: bool
) -> Iterator[Column]:
    """A model's predictions for rows. Classes are ordered as in the metrics top1 and top5.

    Args:
        values: see `Outputs`.
        top: number of classes for each row, the most probable first; 0: the outputs are not
            classes.
        probabilities: adds the probabilities of all classes.
    """
    others = dict(values)
    probability = others.pop("probability", None)
    scores = others.pop("logit", probability)
    if probability is not None and top:
        ranked = scores.argmax(1, keepdim=True) if top == 1 else scores.topk(top).indices
        for place, column in enumerate(ranked.T):
            end = f"_{place + 1}" * (place > 0)
            yield f"class{end}", [class_names[number] for number in column.tolist()], ()
            yield f"probability{end}", probability.gather(1, column[:, None])[:, 0], ()
    if probability is not None and (probabilities or not top):
        yield "probabilities", probability, class_names
    if "value" in others and class_names:
        yield "values", others.pop("value"), class_names
    yield from ((name, value, ()) for name, value in others.items())


def _checked(predict: Any, values: Any, samples: int) -> dict[str, Any]:
    wanted = f"a dict of tensors or lists by name, each with {samples} entries"
    if not isinstance(values, Mapping) or not values:
        raise refused(predict, values, wanted)
    found = {str(name): _on_cpu(value) for name, value in values.items()}
    for name, value in found.items():
        scalar = isinstance(value, Tensor) and not value.ndim
        if scalar or not isinstance(value, Tensor | list) or len(value) != samples:
            raise refused(predict, value, wanted, f" That is the value of {name!r}.")
    return found


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@contextmanager
def _captured(model: nn.Module, layer: str | None) -> Iterator[list[Tensor]]:
    """Receives the output of a layer in each pass of the model.

    Raises:
        ConfigError: there is no such layer.
    """
    taken: list[Tensor] = []
    if layer is None:
        yield taken
        return
    modules = {name: module for name, module in model.named_modules() if name}
    if layer not in modules:
        hint = did_you_mean(layer, modules) or f" Its layers are {first_names([*modules])}."
        raise ConfigError(f"--layer {layer}: the model has no such layer.{hint}")

    def take(_: nn.Module, __: Any, output: Any) -> None:
        taken[:] = [output]

    handle = modules[layer].register_forward_hook(take)
    try:
        yield taken
    finally:
        handle.remove()
