"""The optimizer of a task, or the configured one if it has none."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import TaskError, did_you_mean, first_names
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of, refused
from raytrain_ddp.training.optimizer.lr_schedule import allocate_momentum, build_optimizer
from raytrain_ddp.training.optimizer.optimizer_state import (
    averages,
    parameters_of,
    skips_on_device,
)
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers

_OF_GROUPS = ("params", "lr_scale", "param_names", "name")  # not arguments of optimizers


def optimizer_of(task: Task, model: nn.Module, config: TrainConfig) -> Optimizer:
    """The task's optimizer, or the configured one, over the task's parameter groups if it gives
    some; `Optimizers`, if it gives several by name.

    Raises:
        TaskError: it is neither, or it lacks parameters of the model or has others.
    """
    function = task.optimizer
    if function is None:
        return build_optimizer(model, config.optim)
    made: Any = function(model)
    if isinstance(made, Mapping) and made and all(isinstance(name, str) and name for name in made):
        several = Optimizers({n: _checked(function, o, model, config) for n, o in made.items()})
        for each in several.named.values():
            if averages(each) or each.state_dict().keys() != {"state", "param_groups"}:
                raise unfit(function, each, "cannot be one of several: it averages the weights")
        _require_parameters(function, several, model)
        return several
    optimizer = _checked(function, made, model, config)
    _require_parameters(function, optimizer, model)
    return optimizer


def _checked(function: Any, made: Any, model: nn.Module, config: TrainConfig) -> Optimizer:
    """One optimizer that the task's function gave."""
    if isinstance(made, Optimizer):
        optimizer = made
    elif isinstance(made, Sequence | Iterator) and not isinstance(made, str):
        optimizer = _configured(function, list(made), model, config)
    else:
        raise refused(function, made, "a torch.optim.Optimizer, or a list of parameter groups")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise unfit(
            function,
            optimizer,
            "has a learning rate scheduler, which would be ignored. Remove it, and set "
            "--schedule.name or define schedule(step)",
        )
    for rate in (group.get("lr") for group in optimizer.param_groups):
        if rate is None:
            problem = "has no learning rate: give it lr, which schedules need"
            raise unfit(function, optimizer, problem)
        if not isinstance(rate, Real | Tensor) or not 0 <= float(rate) < math.inf:
            problem = f"has the learning rate {rate!r} for a group: give a number of 0 or more"
            raise unfit(function, optimizer, problem)
    if isinstance(optimizer, torch.optim.SGD) and skips_on_device(optimizer):
        for group in optimizer.param_groups:
            allocate_momentum(optimizer, group["params"] if group["momentum"] else ())
    if averages(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _configured(
    function: Any, groups: list[Any], model: nn.Module, config: TrainConfig
) -> Optimizer:
    """The configured optimizer over these groups; what a group leaves out is as configured."""
    usual = build_optimizer(model, config.optim)
    kind: Any = type(usual)
    takes = inspect.signature(kind).parameters
    for key in (key for group in groups if isinstance(group, dict) for key in group):
        if key not in (*takes, *_OF_GROUPS):
            problem = f" The {kind.__name__} knows no {key!r}.{did_you_mean(key, [*takes])}"
            raise refused(function, groups, "parameter groups", problem)
    options = {name: value for name, value in usual.defaults.items() if name in takes}
    try:
        made: Optimizer = kind(groups, **options | {"weight_decay": config.optim.weight_decay})
    except (KeyError, TypeError, ValueError) as error:
        raise refused(
            function, groups, "parameter groups: dicts with 'params'", f" torch says: {error}"
        ) from error
    return made


def _require_parameters(function: Any, optimizer: Optimizer, model: nn.Module) -> None:
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [*map(id, parameters_of(optimizer))]
    if not {*held} <= named.keys():
        raise unfit(function, optimizer, "has parameters that are not the model's")
    for key, count in Counter(held).items():
        if count > 1:
            raise unfit(function, optimizer, f"has {named[key]} twice")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    lacking = [name for key, name in named.items() if key in trained - {*held}]
    if lacking:
        remedy = "freeze what is not trained (requires_grad_(False))"
        raise unfit(function, optimizer, f"lacks {first_names(lacking, 1)}: {remedy}")


def unfit(function: Any, optimizer: Optimizer, problem: str) -> TaskError:
    """Returns the error for an optimizer that the task's `function` has given."""
    several = isinstance(optimizer, Optimizers)
    kind = "dict of optimizers" if several else type(optimizer).__name__
    return TaskError(f"{place_of(function)}: the {kind} {problem}.")


def replaced_fields(task: Task, optimizer: Optimizer, config: TrainConfig) -> list[str]:
    """The config fields that have no effect as the task has an optimizer or a schedule of its own,
    unless the task reads them."""
    usual = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}.get(config.optim.name)
    own = type(optimizer) is not usual or not optimizer.defaults.get("fused")
    names: tuple[str, ...] = ()
    if own:
        names = ("name", "lr", "momentum", "nesterov", "betas", "weight_decay")
    if task.optimizer is not None:  # it gives the groups
        names += ("head_lr", "groups", "layer_decay", "decay_norms", "decay_bias")
    fields = [f"optim.{name}" for name in names]
    if task.schedule is not None:
        fields += [f"schedule.{each.name}" for each in dataclasses.fields(config.schedule)]
    return fields
