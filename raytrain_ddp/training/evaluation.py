"""Exact evaluation: each sample once, the same values for any number of workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import LoaderThreads, eval_batches
from raytrain_ddp.data.loading.nested import map_leaves
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order import items_of_rank
from raytrain_ddp.errors import TaskError, did_you_mean, first_line
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import metrics_of, place_of
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.buffer_sync import SavedBuffers
from raytrain_ddp.training.runtime.world import (
    World,
    autocast,
    broadcast,
    from_all_ranks,
    seed_slot,
)
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


MAX_NUMBERS = 4096
"""Larger values are left out of the log, which is part of each checkpoint."""

_CPU = torch.device("cpu")

State = dict[str, Any]  # by the name of the metric


class TreeMetrics:
    """Metrics whose states over chunks are merged along one binary tree over all chunks, so that
    floating-point sums are the same however chunks are assigned to workers.

    Node (level, index) covers the 2 ** level chunks from index << level on. Two halves are merged
    as soon as both exist, so there is about one state per level, however many chunks there are.
    States that are lists keep an entry for each sample.

    Args:
        metrics: as `Task.metrics` returns them.

    Attributes:
        given: the metrics that `Task.evaluate` updates.

    Raises:
        TaskError: a metric has no states.
    """

    def __init__(self, task: Task, metrics: Any, device: torch.device) -> None:
        self.given: Any = _ungrouped(metrics)
        self._metrics = dict(_each("", self.given))
        self._task = task
        self._nodes: list[tuple[int, int, State | None]] = []
        for name, metric in self._metrics.items():
            if not metric.metric_state:
                raise TaskError(
                    f"{place_of(task.metrics)}: the metric {name!r}, a {type(metric).__name__}, "
                    "has no states of its own: everything that compute() needs must be a state "
                    "(add_state); instead of a wrapper, return the wrapped metric."
                )
            metric.to(device)
            metric.distributed_available_fn = lambda: False  # states are merged here

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def metric(self, name: str) -> Metric | None:
        return self._metrics.get(name)

    def state(self) -> State:
        """A copy of the states of all metrics; `reset` empties lists in place."""
        return {
            name: {k: list(v) if isinstance(v, list) else v for k, v in metric.metric_state.items()}
            for name, metric in self._metrics.items()
        }

    def untouched(self) -> list[str]:
        """The metrics that were not updated since `reset`, as far as they report it."""
        return [n for n, m in self._metrics.items() if not getattr(m, "update_called", True)]

    def take(self, chunk: int, state: State | None) -> None:
        """Takes the state over `chunk`; None: it has no samples. Chunks come in order."""
        self._add(0, chunk, state)

    def _add(self, level: int, index: int, state: State | None) -> None:
        while index % 2 and self._nodes and self._nodes[-1][:2] == (level, index - 1):
            state = self._merged(self._nodes.pop()[2], state)
            level, index = level + 1, index // 2
        self._nodes.append((level, index, state))

    def _merged(self, left: State | None, right: State | None) -> State | None:
        if left is None or right is None:
            return right if left is None else left
        self._become(right, left)  # torchmetrics puts the argument first
        return self.state()

    def _become(self, *states: State) -> None:
        """Merges states into metrics that are reset before."""
        self.reset()
        for name, metric in self._metrics.items():
            try:
                for state in states:
                    metric.merge_state(state[name])
            except Exception as error:
                raise TaskError(
                    f"{place_of(self._task.metrics)}: the metric {name!r} cannot be merged over "
                    f"chunks of the data: {first_line(error)}."
                ) from error

    def values(self, world: World) -> dict[str, Tensor]:
        """The values over all chunks, on the CPU; all ranks take part and get the same."""
        self._nodes = map_leaves(lambda x: x.cpu() if isinstance(x, Tensor) else x, self._nodes)
        for metric in self._metrics.values():
            metric.to("cpu")
        reach = 1  # each round, half of the ranks pass what they have to one of lower rank
        while reach < world.size:
            place = world.rank % (2 * reach)
            if place == reach:
                dist.send_object_list([self._nodes], world.rank - reach, device=_CPU)
            elif place == 0 and world.rank + reach < world.size:
                box: list[Any] = [None]
                dist.recv_object_list(box, world.rank + reach, device=_CPU)
                for node in box[0]:
                    self._add(*node)
            reach *= 2
        self._nodes = broadcast(self._nodes, world)
        whole: State | None = None
        while self._nodes:  # nodes without a sibling, the last first
            whole = self._merged(self._nodes.pop()[2], whole)
        self._become(*(() if whole is None else (whole,)))
        return self.computed()

    def computed(self) -> dict[str, Tensor]:
        """The values of the current state, by name; parts are named as by `flat_values`."""
        values: dict[str, Tensor] = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():  # it saw only merges; and of labels that no row has
                warnings.filterwarnings("ignore", "The ``compute``|No positive|Average precision")
                value = metric.compute()
            values |= flat_values(self._task, name, value)
        return values


def flat_values(task: Task, name: str, value: Any) -> dict[str, Tensor]:
    """A metric's value as tensors on the CPU; ``name/part`` for each part of a dict or sequence."""
    if isinstance(value, Tensor):
        return {name: value.detach().cpu()}
    if isinstance(value, Real):  # also numpy's
        return {name: torch.tensor(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        raise TaskError(
            f"{place_of(task.metrics)}: the value of the metric {name!r} is a "
            f"{type(value).__name__}; expected a number, a tensor, or a dict or sequence of them."
        )
    parts = (flat_values(task, f"{name}/{key}", part) for key, part in value.items())
    return {key: tensor for part in parts for key, tensor in part.items()}


def scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The values that are single numbers."""
    return {name: value.item() for name, value in values.items() if value.numel() == 1}


def tables(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The other values, as nested lists; of those with more than MAX_NUMBERS, only the shape."""
    return {
        name: value.tolist() if value.numel() <= MAX_NUMBERS else {"shape": list(value.shape)}
        for name, value in values.items()
        if value.numel() != 1
    }


def require_monitor(task: Task, values: Mapping[str, Tensor]) -> None:
    """Raises TaskError unless the task's monitor is one of its metrics and a single number."""
    monitor, names = task.monitor, list(scalars(values))
    if monitor in names:
        return
    problem = f"the task's monitor is {monitor!r}, but its metrics are {', '.join(names) or 'none'}"
    if monitor in values:
        shape = tuple(values[monitor].shape)
        problem = (
            f"the task's monitor is {monitor!r}, whose value is not a single number (shape {shape})"
        )
    raise TaskError(f"{place_of(task.metrics)}: {problem}.{did_you_mean(monitor, names)}")


def _ungrouped(metrics: Any) -> Any:
    """Removes compute groups from collections: torchmetrics guesses them from the first batch's
    values, so they would depend on the data that a worker gets."""
    if isinstance(metrics, dict):
        return {name: _ungrouped(metric) for name, metric in metrics.items()}
    if not hasattr(metrics, "compute_groups"):
        return metrics
    return type(metrics)(
        dict(metrics.items(keep_base=True, copy_state=False)),
        prefix=metrics.prefix,
        postfix=metrics.postfix,
        compute_groups=False,
    )


def _each(prefix: str, metrics: Any) -> Iterator[tuple[str, Metric]]:
    """(name, metric) pairs; those of a collection within a dict as ``collection/name``."""
    for name, metric in metrics.items():
        if hasattr(metric, "items"):
            yield from _each(f"{prefix}{name}/", metric)
        else:
            yield f"{prefix}{name}", metric
