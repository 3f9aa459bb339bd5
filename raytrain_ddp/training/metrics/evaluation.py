"""Exact evaluation: each sample once, the same values for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import eval_batches, tried
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.loading.nested import to_device
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order.epoch_order import items_of_rank
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.errors import TaskError
from raytrain_ddp.events import Note
from raytrain_ddp.messages import Event
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import metrics_of, place_of, refused
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.buffer_sync import SavedBuffers
from raytrain_ddp.training.metrics.metric_states import (
    MOST_NUMBERS,
    TreeMetrics,
    require_monitor,
    scalars,
    tables,
)
from raytrain_ddp.training.runtime.determinism import naming_nondeterministic
from raytrain_ddp.training.runtime.seeding import keeping_generators, seed_slot
from raytrain_ddp.training.runtime.world import World, autocast, from_all_ranks
from raytrain_ddp.training.steps.device_feed import ahead_on_device, require_few_bad

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_MOST_BAD = 4096  # rows searched for a readable one


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
            scores.take(place, count > 0)
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


def try_evaluation(
    build: Build, tell: Callable[[Event], None], micro_batch: int | None = None
) -> None:
    """Evaluates the first chunk, if there is evaluation data, without side effects. Each rank does
    this on its own.

    Args:
        micro_batch: size of the chunk; None: that of the config.

    Raises:
        TaskError: the metrics' states cannot be merged, or the task's monitor is not a metric.
    """
    config, task, model, world = build.config, build.task, build.model, build.world
    data, size = build.eval_data, micro_batch or config.eval_micro_batch
    batch = None if data is None else _readable(data, size, config.data.may_skip)
    if batch is None:
        return  # all records are bad; the evaluation will count them
    metrics = metrics_of(task)
    fresh = TreeMetrics(task, _copied(task, metrics), world.device)
    scores = TreeMetrics(task, metrics, world.device)
    buffers = SavedBuffers(model)
    with (
        keeping_generators(world.device),
        evaluating(model),
        torch.no_grad(),
        autocast(world.device, config.compute.precision),
        naming_nondeterministic(model),
    ):
        scores.reset()
        seed_slot(world.device, 0, 0, 0)
        returned: Any = task.evaluate(model, to_device(batch, world.device), scores.given)  # type: ignore[func-returns-value]
        if returned is not None:
            hint = " It must update the metrics that it receives: metrics['name'].update(...)."
            raise refused(task.evaluate, returned, "None", hint)
        buffers.restore()
        untouched = scores.untouched()
        if task.monitor.partition("/")[0] in untouched:
            raise TaskError(
                f"{place_of(task.evaluate)}: did not update the metric {task.monitor!r}, which is "
                "the task's monitor: call its update()."
            )
        scores.take(0, True)
        values = scores.computed()
        alone = replace(world, rank=0, size=1)
        fresh.take_all(scores)
        merged = _values_of_fresh(fresh, task, alone)
        for name, value in values.items():
            if not _alike(value, merged[name]):
                raise TaskError(
                    f"{place_of(task.metrics)}: the metric {name!r} cannot be merged over chunks "
                    f"of the data: its value is {_short(value)}, but {_short(merged[name])} once "
                    "its state is merged into a fresh metric. Everything compute() needs must "
                    "be a state (add_state)."
                )
        for chunk in range(2):
            scores.take(chunk, True)
        scores.values(alone)
    require_monitor(task, values)
    _note_goal(task, scores, tell)
    for name in untouched:
        text = f"{place_of(task.evaluate)}: did not update the metric {name!r}."
        tell(Note(text))
    for name, value in values.items():
        if value.numel() > MOST_NUMBERS:
            text = f"The metric {name!r} has {value.numel():,} numbers, too many for the log."
            tell(Note(f"{text} `evaluate --out FILE` writes them all."))


def _readable(data: Data, size: int, may_skip: bool) -> Batch | None:
    """Returns the first chunk with a readable record, if there is one."""
    for start in range(0, min(data.rows, _MOST_BAD), size):
        rows = np.arange(start, min(start + size, data.rows), dtype=np.int64)
        batch = tried(data, Draws(0, 0, rows))
        if data.checked_samples(batch, len(rows), may_skip):
            return batch
    return None


def _values_of_fresh(fresh: TreeMetrics, task: Task, alone: World) -> dict[str, Tensor]:
    try:
        return fresh.values(alone)
    except Exception as error:
        raise TaskError(
            f"{place_of(task.metrics)}: the metrics cannot be merged over chunks of the data: once "
            f"their states are merged into fresh metrics, {type(error).__name__}: {error}. "
            "Everything that compute() needs must be a state (add_state)."
        ) from error


def _note_goal(task: Task, scores: TreeMetrics, tell: Callable[[Event], None]) -> None:
    better = getattr(scores.metric(task.monitor), "higher_is_better", None)
    if better is not None and better != (task.goal == "max"):
        what = f"the metric says that a {'higher' if better else 'lower'} {task.monitor} is better"
        text = f"goal = {task.goal!r}, but {what} (see its higher_is_better)."
        tell(Note(f"{place_of(task.metrics)}: {text}"))


def _copied(task: Task, metrics: Any) -> Any:
    try:
        return deepcopy(metrics)
    except Exception:  # a metric may hold objects that cannot be copied
        return metrics_of(task)


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _short(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"of shape {tuple(value.shape)}"
