"""The forward pass of a turn, and its warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.nested import to_device
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import loss_of_task, place_of, refused
from raytrain_ddp.training.gradients.buffer_sync import BoolBuffers, SavedBuffers
from raytrain_ddp.training.monitoring.step_timing import counting_flops
from raytrain_ddp.training.runtime.determinism import naming_nondeterministic
from raytrain_ddp.training.runtime.world import World, autocast
from raytrain_ddp.training.session import WarmUp

_TOO_SMALL = "more than 1 value per channel"  # for batch norm, says torch


@dataclass(frozen=True)
class Forward:
    """The task's loss of a batch, in the config's precision.

    Args:
        net: `model`, possibly wrapped in DDP.
        name: of the optimizer whose loss it is, if there are several.
    """

    config: TrainConfig
    task: Task
    model: nn.Module
    net: nn.Module
    world: World
    name: str = ""

    def __call__(self, batch: Batch, is_wrapped: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, shape (), and the scalars with it.

        Raises:
            TaskError: the task's loss is not a valid loss.
        """
        task, net = self.task, self.net if is_wrapped else self.model
        with autocast(self.world.device, self.config.compute.precision):
            moved = to_device(batch, self.world.device)
            result = task.loss(net, moved, self.name) if self.name else task.loss(net, moved)  # type: ignore[call-arg]
        return loss_of_task(task, result, needs_gradient=torch.is_grad_enabled())


def forward(
    config: TrainConfig, task: Task, model: nn.Module, batch: Batch, world: World, name: str = ""
) -> Tensor:
    """The loss of a batch, shape (); see `Forward`."""
    return Forward(config, task, model, model, world, name)(batch)[0]


def warm_up(
    run: Forward,
    require_gradients: Callable[[], None],
    batch: Batch,
    samples: int,
    smallest: Batch,
    single: Batch | None = None,
) -> WarmUp:
    """Makes a pass without side effects, and a second one for static graphs; all ranks take part if
    the model is wrapped.

    Also finds what cannot work: kernels, or a `smallest` micro-batch too small for batch norm.

    Args:
        require_gradients: called after the backward pass.
        samples: number of samples in `batch`.
        single: one sample, if bad records may leave a slot only one. If batch norm refuses
            it, such a slot passes in evaluation mode, for any number of workers.

    DDP rebuilds its gradient buckets before the second forward pass (with a static graph, after
    the second backward pass), which changes the order of its sums. As the first step follows
    that, a resumed run sums in the same order as an uninterrupted one.

    Raises:
        ConfigError, TaskError: the model or the loss could not be trained.
    """
    buffers, flags = SavedBuffers(run.model), BoolBuffers(run.model)
    try:
        with (
            counting_flops(run.config.compute.compile) as counter,
            naming_nondeterministic(run.model),
        ):
            names = _pass(run, batch, require_gradients)
        if run.config.ddp.static_graph:
            _pass(run, batch, require_gradients)
        run(smallest, is_wrapped=False)
        fewest = 1 if single is None else 1 + _is_too_small(run, single)
    except (RuntimeError, ValueError, AttributeError) as error:
        remedy = _remedy_of(str(error))
        if remedy is None:
            raise
        raise ConfigError(remedy) from error
    flops, averaged = counter.get_total_flops() / samples, buffers.changed()
    found = WarmUp(names, fewest, flags.changed(), flops, averaged)
    buffers.restore()
    return found


def _is_too_small(run: Forward, single: Batch) -> bool:
    try:
        run(single, is_wrapped=False)
    except ValueError as error:
        if _TOO_SMALL not in str(error):
            raise
        return True
    return False


def _pass(run: Forward, batch: Batch, require_gradients: Callable[[], None]) -> tuple[str, ...]:
    """Returns the names of the scalars with the loss."""
    with _counting_calls(run.net) as calls:
        loss, scalars = run(batch)
    if not calls and run.net is not run.model:
        raise TaskError(
            f"{place_of(run.task.loss)}: does not call the model that it receives. Call "
            "model(...): otherwise, gradients are not summed over the workers."
        )
    loss.backward()
    if all(each.grad is None for each in run.model.parameters()):
        wanted = "a loss that depends on the model's parameters"
        raise refused(run.task.loss, loss, wanted)
    require_gradients()
    run.model.zero_grad()
    return (*scalars,)


@contextmanager
def _counting_calls(net: nn.Module) -> Iterator[list[None]]:
    """An entry for each call of a wrapped model. (One that is not wrapped may be compiled.)"""
    calls: list[None] = []
    if not isinstance(net, DistributedDataParallel):
        yield calls
        return
    forward: Callable[..., Any] = net.forward

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(None)
        return forward(*args, **kwargs)

    net.forward = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del net.forward


def _remedy_of(text: str) -> str | None:
    """The config-level remedy for an error of torch's, if there is one."""
    if _TOO_SMALL in text:
        return (
            "the last step of an epoch has a micro-batch of one sample, too few for this model's "
            "batch norm: use another --micro-batch or --batch-size."
        )
    if text.startswith("'DistributedDataParallel' object has no attribute"):
        name = text.rpartition("attribute ")[2].strip("'")
        return (
            f"the task's loss uses model.{name}, but with several workers model is wrapped in DDP "
            "and can only be called. Move this into the model's forward, or use --exact, which "
            "does not wrap the model."
        )
    return None
