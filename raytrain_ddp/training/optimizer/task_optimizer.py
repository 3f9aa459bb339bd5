"""The optimizer of a task, checked before the first step; the configured one if it has none."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.checkpoint.snapshot import flatten_state, unflatten_state
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, TaskError, did_you_mean, first_names
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of, refused
from raytrain_ddp.training.optimizer.lr_schedule import allocate_momentum, build_optimizer
from raytrain_ddp.training.optimizer.optimizer_state import (
    averages,
    load_optimizer,
    parameters_of,
    skips_on_device,
)
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers
from raytrain_ddp.training.runtime.seeding import keeping_generators, seed_slot

_OF_GROUPS = ("params", "lr_scale", "param_names", "name")  # not arguments of optimizers


def optimizer_of(task: Task, model: nn.Module, config: TrainConfig) -> Optimizer:
    """The task's optimizer, or the configured one, over the task's parameter groups if it gives
    some; `Optimizers`, if it gives several by name.

    Raises:
        TaskError: it is neither, it lacks parameters of the model or has others, or it needs a
            closure.
    """
    function = task.optimizer
    if function is None:
        return build_optimizer(model, config.optim)
    made: Any = function(model)
    if isinstance(made, Mapping) and made and all(isinstance(name, str) and name for name in made):
        several = Optimizers({n: _checked(function, o, model, config) for n, o in made.items()})
        for each in several.named.values():
            if averages(each) or each.state_dict().keys() != {"state", "param_groups"}:
                raise _unfit(function, each, "cannot be one of several: it averages the weights")
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
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _unfit(function, optimizer, "needs a closure, that is several passes per step")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise _unfit(
            function,
            optimizer,
            "has a learning rate scheduler, which would be ignored. Remove it, and set "
            "--schedule.name or define schedule(step)",
        )
    for rate in (group.get("lr") for group in optimizer.param_groups):
        if rate is None:
            problem = "has no learning rate: give it lr, which schedules need"
            raise _unfit(function, optimizer, problem)
        if not isinstance(rate, Real | Tensor) or not 0 <= float(rate) < math.inf:
            problem = f"has the learning rate {rate!r} for a group: give a number of 0 or more"
            raise _unfit(function, optimizer, problem)
    if isinstance(optimizer, torch.optim.SGD) and skips_on_device(optimizer):
        for group in optimizer.param_groups:
            allocate_momentum(optimizer, group["params"] if group["momentum"] else ())
    if type(optimizer) not in (torch.optim.SGD, torch.optim.AdamW):
        _require_steps(function, optimizer, config)
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
        raise _unfit(function, optimizer, "has parameters that are not the model's")
    for key, count in Counter(held).items():
        if count > 1:
            raise _unfit(function, optimizer, f"has {named[key]} twice")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    lacking = [name for key, name in named.items() if key in trained - {*held}]
    if lacking:
        remedy = "freeze what is not trained (requires_grad_(False))"
        raise _unfit(function, optimizer, f"lacks {first_names(lacking, 1)}: {remedy}")


def _unfit(function: Any, optimizer: Optimizer, problem: str) -> TaskError:
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


def _require_steps(function: Any, optimizer: Optimizer, config: TrainConfig) -> None:
    """Raises TaskError if trial steps fail, or if a resumed run would take others."""
    try:
        problem = problem_of(optimizer, config)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        problem = f"cannot be used: {said or type(error).__name__} (closures are not supported)"
        if isinstance(error, CheckpointError):
            problem = f"has a state that cannot be stored: {said}"
        raise _unfit(function, optimizer, problem.rstrip(".")) from error
    if problem:
        raise _unfit(function, optimizer, problem)


def problem_of(optimizer: Optimizer, config: TrainConfig) -> str:
    """Why the optimizer cannot be used; "" if it can. Its state must be storable and complete, so
    that a resumed run takes the same steps. The trial steps have no side effects.

    Raises:
        Exception: a step fails, or the state cannot be stored.
    """
    trial = _Trial(optimizer, config)
    with keeping_generators(trial.parameters[0].device):
        trial.step(0)
        middle, weights = _stored(optimizer), _copies(trial.parameters)
        trial.step(1)
        gone_on = _copies(trial.parameters)
        trial.begin_again(middle, weights)
        trial.step(1)
        resumed = _copies(trial.parameters)
    if not all(map(_same_bits, resumed, gone_on)):
        return "keeps state outside its state_dict(), so a resumed run would differ"
    trial.undo()
    return ""


class _Trial:
    def __init__(self, optimizer: Optimizer, config: TrainConfig) -> None:
        groups = optimizer.param_groups
        self._optimizer, self._config = optimizer, config
        self.parameters = parameters_of(optimizer)
        self.trained = [each for each in self.parameters if each.requires_grad]
        self._homes = [each.data for each in self.parameters]
        self._initial, self._blank = _copies(self._homes), _stored(optimizer)
        self._names = [{*group} for group in groups]
        self._rates = [group["lr"] for group in groups]
        if averages(optimizer):
            optimizer.train()  # type: ignore[attr-defined]

    def step(self, number: int) -> None:
        seed_slot(self.parameters[0].device, self._config.seed, number, self._config.slots)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self.trained:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._optimizer.step()

    def begin_again(self, state: Any, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, weights, strict=True):
                parameter.copy_(value)
        load_optimizer(self._optimizer, deepcopy(state))  # the optimizer keeps the copy

    def undo(self) -> None:
        optimizer = self._optimizer
        load_optimizer(optimizer, self._blank)
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            for name in group.keys() - names:  # such as a counter, added by a step
                del group[name]
        if averages(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        for parameter, home, value in zip(self.parameters, self._homes, self._initial, strict=True):
            parameter.data = home.copy_(value)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, as a GPU may have no room for them."""
    return [each.detach().to("cpu", copy=True) for each in tensors]


def _stored(optimizer: Optimizer) -> Any:
    """The optimizer's state as it would be loaded from a checkpoint."""
    tensors, rest = flatten_state(optimizer.state_dict())
    copies = dict(zip(tensors, _copies([*tensors.values()]), strict=True))
    return unflatten_state(copies, json.loads(json.dumps(rest)))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())
