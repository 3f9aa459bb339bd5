"""Exact evaluation: each sample once, the same figures on any number of workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_ddp.data.loader import eval_batches
from raytrain_ddp.data.nests import to_device
from raytrain_ddp.data.plan import deal
from raytrain_ddp.data.source import Data
from raytrain_ddp.data.threads import Threads
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.buffers import KeptBuffers
from raytrain_ddp.training.world import World, seed_slot

if TYPE_CHECKING:
    from torchmetrics import Metric


def evaluate(
    task: Task,
    model: nn.Module,
    data: Data,
    batch_size: int,
    world: World,
    threads: Threads,
    metrics: Mapping[str, Metric] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Metric values over all of `data`, on the CPU. All ranks take part and get the same.

    The rows are cut into chunks of `batch_size` whoever works on them; each chunk's metric state is
    kept apart and merged in the order of the chunks, so that floating-point sums come out the same
    for any number of workers. Random numbers that `Task.evaluate` draws from torch's, numpy's and
    Python's generators are a function of the chunk, and alike in all evaluations.

    "skipped" is among the values if bad records were left out: how many.

    Args:
        beat: is called before each batch.

    Raises:
        ConfigError: a metric's states of two chunks cannot be made one.
    """
    metrics = metrics or task.metrics()
    for name, metric in metrics.items():
        _require_mergeable(name, metric)
        metric.to(world.device)
    chunks = deal(-(-data.rows // batch_size), world.size, world.rank)
    states: list[dict[str, dict[str, Any]]] = []
    samples = 0
    buffers = KeptBuffers(model)
    model.eval()
    with torch.inference_mode(), closing(eval_batches(data, batch_size, chunks, threads)) as loaded:
        for chunk, batch in zip(chunks, loaded, strict=True):
            beat()
            seed_slot(world.device, 0, 0, chunk)
            for metric in metrics.values():
                metric.reset()
            if not data.samples_of(batch):
                continue  # bad records only, and they are skipped
            task.evaluate(model, to_device(batch, world.device), metrics)
            buffers.restore()  # a chunk leaves no trace in the next one, nor in the training
            samples += data.samples_of(batch)
            states.append({name: _kept(metric.metric_state) for name, metric in metrics.items()})
    model.train()
    values = _merged(metrics, _gathered([_to_cpu(state) for state in states], world))
    skipped = data.rows - sum(_gathered([samples], world))
    return {**values, "skipped": torch.tensor(skipped)} if skipped else values


def scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Those of the values that are single numbers."""
    return {name: value.item() for name, value in values.items() if value.numel() == 1}


def _gathered(states: list[Any], world: World) -> list[Any]:
    """The states of all ranks, in the order of the chunks; all ranks take part."""
    if world.size == 1:
        return states
    parts: list[list[Any]] = [[] for _ in range(world.size)]
    dist.all_gather_object(parts, states)
    return [state for part in parts for state in part]


def _require_mergeable(name: str, metric: Metric) -> None:
    """torchmetrics says it at the end only, and of a mean not at all: that becomes infinite."""
    if type(metric).merge_state.__module__ != "torchmetrics.metric":
        return  # it has a way of its own
    reductions, defaults = metric._reductions, metric._defaults
    unweighted = [
        key
        for key, reduction in reductions.items()
        if getattr(reduction, "__name__", "") == "dim_zero_mean"
        or (reduction is None and isinstance(defaults[key], Tensor))
    ]
    if unweighted:
        raise ConfigError(
            f"the metric {name!r} cannot be merged over chunks of the data: its state "
            f"{unweighted[0]!r} is a mean, or has no dist_reduce_fx; keep sum and count instead."
        )
    if metric.full_state_update is not False:
        raise ConfigError(
            f"the metric {name!r} cannot be merged over chunks of the data: "
            f"{type(metric).__name__}.full_state_update is {metric.full_state_update}. Take "
            "another one; or, if its updates do not depend on those before, a subclass with False."
        )


def _merged(metrics: Mapping[str, Metric], states: list[Any]) -> dict[str, Tensor]:
    values = {}
    for name, metric in metrics.items():
        metric.to("cpu").reset()
        metric.distributed_available_fn = lambda: False  # the states are merged already
        for state in states:
            metric.merge_state(state[name])
        with warnings.catch_warnings():  # it counts updates, and has seen merges only
            warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric")
            values[name] = metric.compute()
    return values


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """A metric's state, out of reach of its `reset`, which empties lists in place."""
    return {k: list(v) if isinstance(v, list) else v for k, v in state.items()}


def _to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_cpu(inner) for inner in value]
    return value.cpu() if isinstance(value, Tensor) else value
