"""Exact evaluation: each sample once, the same values for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import eval_batches
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order.epoch_order import items_of_rank
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task_check import metrics_of
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.buffer_sync import SavedBuffers
from raytrain_ddp.training.metrics.metric_states import (
    TreeMetrics,
    require_monitor,
    scalars,
    tables,
)
from raytrain_ddp.training.runtime.seeding import seed_slot
from raytrain_ddp.training.runtime.world import autocast, from_all_ranks
from raytrain_ddp.training.steps.device_feed import ahead_on_device, require_few_bad

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def evaluation_of(
    build: Build, threads: LoaderThreads, beat: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the metrics and tables of `evaluate`, for `events.Eval`; all ranks take part.

    Raises:
        DataError: too many bad records. TaskError: the metrics lack the task's monitor.
    """
    values = evaluate(build, threads, beat=beat, limit=build.config.limit_eval_batches)
    metrics = scalars(values)
    skipped = int(metrics.get("skipped", 0))
    require_few_bad(skipped, "in the evaluation set", build.config.data.max_bad)
    require_monitor(build.task, values)
    return metrics, tables(values)


def evaluate(
    build: Build,
    threads: LoaderThreads,
    metrics: Mapping[str, Metric] | MetricCollection | None = None,
    beat: Callable[[], None] = lambda: None,
    limit: int = 0,
) -> dict[str, Tensor]:
    """Metric values over all evaluation data, on the CPU. All ranks take part and get the same.

    The rows are divided into chunks of `config.eval_micro_batch`, independent of the number of
    workers. The metric states of the chunks are merged along a tree over all chunks, so
    floating-point sums are the same for any number of workers; see `TreeMetrics`. Random numbers
    that `Task.evaluate` draws from torch's, numpy's and Python's generators depend only on the
    chunk, and are the same in all evaluations.

    The values include "skipped", the number of bad records, if any were skipped.

    Args:
        build: must have evaluation data.
        metrics: used instead of the task's metrics.
        beat: called before each batch.
        limit: the maximum number of chunks, spread evenly over the data; 0: all.

    Raises:
        DataError: collate left out records although data.bad_records is not skip.
        TaskError: the states of a metric for two chunks cannot be merged.
    """
    config, task, model, world = build.config, build.task, build.model, build.world
    data = build.eval_data
    assert data is not None
    scores = TreeMetrics(task, metrics_of(task) if metrics is None else metrics, world.device)
    batch_size = config.eval_micro_batch
    chunks = chunks_of(data.rows, batch_size, limit)
    places = items_of_rank(len(chunks), world.size, world.rank)
    samples = 0
    mine = chunks[places.start : places.stop]
    with closing(passes(config, model, data, mine, batch_size, world.device, threads)) as loaded:
        for place, (chunk, batch, own) in zip(places, loaded, strict=True):
            beat()
            scores.reset()
            rows = min(batch_size, data.rows - chunk * batch_size)
            # 0: all are bad, and skipped
            count = data.checked_samples(batch, rows, config.data.may_skip)
            if count:
                task.evaluate(model, own, scores.given)
            samples += count
            scores.take(place, scores.state() if count else None)
        values = scores.values(world)
    rows = sum(min(batch_size, data.rows - chunk * batch_size) for chunk in chunks)
    skipped = rows - sum(from_all_ranks(samples, world))
    return {**values, "skipped": torch.tensor(skipped)} if skipped else values


def passes(
    config: TrainConfig,
    model: nn.Module,
    data: Data,
    chunks: Sequence[int],
    batch_size: int,
    device: torch.device,
    threads: LoaderThreads,
) -> Generator[tuple[int, Batch, Batch], None, None]:
    """Yields each chunk, its batch, and the batch on the device. The model is in the state for an
    evaluation, and a pass affects neither the next pass nor the training."""
    buffers = SavedBuffers(model)
    loaded = eval_batches(data, batch_size, chunks, threads, pin=device.type == "cuda")
    with (
        torch.no_grad(),  # not inference_mode: a model may compute gradients in its forward pass
        evaluating(model),
        autocast(device, config.compute.precision),
        closing(loaded),
        closing(ahead_on_device(loaded, device)) as moved,
    ):
        for chunk, (batch, own) in zip(chunks, moved, strict=True):
            seed_slot(device, 0, 0, chunk)
            yield chunk, batch, own
            buffers.restore()


def chunks_of(rows: int, batch_size: int, limit: int) -> Sequence[int]:
    """The chunks of an evaluation: all, or `limit` of them, spread evenly."""
    count = -(-rows // batch_size)
    if not 0 < limit < count:
        return range(count)
    return [place * count // limit for place in range(limit)]
