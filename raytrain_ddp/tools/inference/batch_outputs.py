"""What a model gives for each row of the data, in the chunks in which it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from raytrain_ddp.data.loading.loader import eval_batches
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean, first_line
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task_check import refused
from raytrain_ddp.training.gradients.buffer_sync import SavedBuffers
from raytrain_ddp.training.runtime.seeding import seed_slot
from raytrain_ddp.training.runtime.world import autocast
from raytrain_ddp.training.steps.device_feed import ahead_on_device

if TYPE_CHECKING:
    from raytrain_ddp.tools.inference.loaded_model import LoadedModel

EMBEDDING = "embedding"


class Outputs(NamedTuple):
    """The outputs of a chunk.

    Args:
        rows: all rows of the chunk. kept: those that are not bad records, in order.
        values: tensors on the CPU, or lists, with an entry for each of `kept`.
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
    tta: Literal["none", "flip"] = "none",
    layer: str | None = None,
) -> Iterator[Outputs]:
    """Yields the outputs of each chunk, in order; computed as `evaluate` does.

    Args:
        bad: has the rows that were omitted from the batches that were yielded so far.
        size: rows of a chunk. Kernels of other sizes may round in another way.
        tta: flip: the mean of the outputs for the image and its mirror image.
        layer: a module whose output is added as `EMBEDDING`, (n, numbers).

    Raises:
        ConfigError: the task cannot predict, or has no such layer or nothing to flip; or the model
            cannot compute images of this size.
        DataError: a batch has other samples than the rows that are not bad.
        TaskError: `predict` returns something else.
    """
    task, model, own_size = loaded.task, loaded.model, loaded.image_size
    if tta not in ("none", "flip"):
        raise ConfigError(f"tta = {tta!r}: must be 'none' or 'flip'.")
    predict = task.predict
    if predict is None:
        raise ConfigError(
            f"{type(task).__name__} has no predict(model, batch), which returns a dict of tensors "
            "or lists by name, with an entry for each sample: add it to the task."
        )
    device, buffers = loaded.device, SavedBuffers(model)
    batches = eval_batches(data, size, chunks, threads, pin=device.type != "cpu")
    with (
        torch.no_grad(),
        evaluating(model),
        autocast(device, loaded.config.compute.precision),
        _captured(model, layer) as captured,
        closing(batches),
        closing(ahead_on_device(batches, device)) as moved,
    ):
        for chunk, (batch, own) in zip(chunks, moved, strict=True):
            rows = range(chunk * size, min((chunk + 1) * size, data.rows))
            kept = [row for row in rows if row not in bad]
            samples = data.samples_of(batch)
            if samples != len(kept):
                raise DataError(
                    f"rows {rows[0]} to {rows[-1]} gave {samples} samples: predictions cannot be "
                    "assigned to rows, because collate has dropped some."
                )
            seed_slot(device, 0, 0, chunk)
            passes = []
            for each in (own, _mirrored(own)) if tta == "flip" else (own,):
                if samples:
                    passes.append(_computed(predict, model, each, samples, own_size, captured))
                    buffers.restore()
            values = passes[0] if passes else {}
            if passes[1:]:
                values = {name: _mean(value, passes[1][name]) for name, value in values.items()}
                values.pop("logit", None)  # the classes are ordered by the mean probability
            yield Outputs(rows, kept, values)


def _computed(
    predict: Any, model: nn.Module, batch: Batch, samples: int, own_size: int, captured: list[Any]
) -> dict[str, Any]:
    try:
        values = predict(model, batch)
    except RuntimeError as error:
        sides = (*batch["image"].shape[-2:],) if _has_images(batch) else ()
        if not own_size or {*sides} <= {own_size}:
            raise
        raise ConfigError(
            f"the model fails on images of {sides[0]} x {sides[1]} pixels ({first_line(error)}): "
            f"use --image-size {own_size}, as the run's evaluation does."
        ) from error
    wanted = f"a dict of tensors or lists by name, each with {samples} entries"
    if not isinstance(values, Mapping) or not values:
        raise refused(predict, values, wanted)
    layers = {EMBEDDING: captured.pop().flatten(1)} if captured else {}
    found = {str(name): _on_cpu(value) for name, value in {**values, **layers}.items()}
    for name, value in found.items():
        scalar = isinstance(value, Tensor) and not value.ndim
        if scalar or not isinstance(value, Tensor | list) or len(value) != samples:
            raise refused(predict, value, wanted, f" That is the value of {name!r}.")
    return found


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return list(value) if isinstance(value, tuple) else value
    value = value.detach().cpu()
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _mean(one: Any, other: Any) -> Any:
    return (one + other) / 2 if isinstance(one, Tensor) and one.is_floating_point() else one


def _has_images(batch: Batch) -> bool:
    return isinstance(batch, Mapping) and "image" in batch


def _mirrored(batch: Batch) -> Batch:
    if not _has_images(batch):
        raise ConfigError("--tta flip: the batches have no 'image' to mirror.")
    return {**batch, "image": batch["image"].flip(-1)}


@contextmanager
def _captured(model: nn.Module, layer: str | None) -> Iterator[list[Tensor]]:
    """Receives the output of a layer in each pass of the model.

    Raises:
        ConfigError: there is no such layer, or its output is not a tensor.
    """
    taken: list[Tensor] = []
    modules = {name: module for name, module in model.named_modules() if name}
    if layer is None:
        yield taken
        return
    if layer not in modules:
        hint = (
            did_you_mean(layer, modules)
            or f" Its parts are {', '.join(dict(model.named_children()))}."
        )
        raise ConfigError(f"--layer {layer}: the model has no such layer.{hint}")

    def take(_: nn.Module, __: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ConfigError(f"--layer {layer}: its output is no tensor.")
        taken[:] = [output]

    handle = modules[layer].register_forward_hook(take)
    try:
        yield taken
    finally:
        handle.remove()
