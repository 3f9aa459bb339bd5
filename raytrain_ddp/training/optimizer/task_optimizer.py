"""The optimizer of a task, checked before the first step; the configured one if it has none."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.checkpoint.snapshot import flatten_state, unflatten_state
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, TaskError, did_you_mean, first_names
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import optional_method, place_of, refused
from raytrain_ddp.training.optimizer.lr_schedule import allocate_momentum, build_optimizer
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers
from raytrain_ddp.training.runtime.seeding import keeping_generators, seed_slot

_KERNELS = ("fused", "foreach", "capturable", "differentiable")  # options that are not state
_OF_GROUPS = ("params", "lr_scale", "param_names", "name")  # not arguments of optimizers


def optimizer_of(task: Task, model: nn.Module, config: TrainConfig) -> Optimizer:
    """The task's optimizer, or the configured one, over the task's parameter groups if it gives
    some; `Optimizers`, if it gives several by name.

    Raises:
        TaskError: it is neither, it lacks parameters of the model or has others, or it needs a
            closure.
    """
    function = optional_method(task, "optimizer")
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
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise _unfit(function, optimizer, "has no learning rate: give it lr, which schedules need")
    if isinstance(optimizer, torch.optim.SGD) and skips_on_device(optimizer):
        for group in optimizer.param_groups:
            allocate_momentum(optimizer, group["params"] if group["momentum"] else ())
    if type(optimizer) not in (torch.optim.SGD, torch.optim.AdamW):
        _try_steps(function, optimizer, config)
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
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for key, count in Counter(held).items():
        if count > 1:
            raise _unfit(function, optimizer, f"has {named[key]} twice")
    if not {*held} <= named.keys():
        raise _unfit(function, optimizer, "has parameters that are not the model's")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    lacking = [name for key, name in named.items() if key in trained - {*held}]
    if lacking:
        remedy = "freeze what is not trained (requires_grad_(False))"
        raise _unfit(function, optimizer, f"lacks {first_names(lacking, 1)}: {remedy}")


def _unfit(function: Any, optimizer: Optimizer, problem: str) -> TaskError:
    several = isinstance(optimizer, Optimizers)
    kind = "dict of optimizers" if several else type(optimizer).__name__
    return TaskError(f"{place_of(function)}: the {kind} {problem}.")


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether it skips a step on the device if its `found_inf` is 1: torch's fused ones do. (Not
    SGD with dampening, whose first step is another one.)"""
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    knows = of_torch and getattr(optimizer, "_step_supports_amp_scaling", False)
    groups = optimizer.param_groups
    return bool(knows) and all(g.get("fused") and not g.get("dampening") for g in groups)


def replaced_fields(task: Task, optimizer: Optimizer, config: TrainConfig) -> list[str]:
    """The config fields that have no effect as the task has an optimizer or a schedule of its own,
    unless the task reads them."""
    usual = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}.get(config.optim.name)
    own = type(optimizer) is not usual or not optimizer.defaults.get("fused")
    names = ("name", "lr", "momentum", "nesterov", "betas", "weight_decay") if own else ()
    fields = [f"optim.{name}" for name in names]
    if optional_method(task, "schedule") is not None:
        fields += [f"schedule.{each.name}" for each in dataclasses.fields(config.schedule)]
    return fields


def averages(optimizer: Optimizer) -> bool:
    """Whether it trains other weights than those to be evaluated, as schedule-free ones do, and has
    `train()` and `eval()` to change between them."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Loads a state with its own dtypes; torch would convert moments to those of the weights. Which
    kernels compute is not part of the state.

    Raises:
        CheckpointError: it is the state of other parameters.
    """
    if isinstance(optimizer, Optimizers):
        for each, part in optimizer.split(saved):
            load_optimizer(each, part)
        return
    groups = []
    for own, old in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        kept = {name: own[name] for name in _KERNELS if name in own}
        added = {name: value for name, value in own.items() if name not in (*old, "params")}
        groups.append({**old, **added, **kept})
    groups += saved["param_groups"][len(groups) :]
    try:
        optimizer.load_state_dict({**saved, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the optimizer is not the one of the checkpoint: {error}. Restore the task's "
            "optimizer, or start a new run."
        ) from error
    keys = (key for group in saved["param_groups"] for key in group["params"])
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    for key, parameter in zip(keys, parameters, strict=True):
        if key in saved["state"]:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(loaded, saved["state"][key])


def _as_saved(loaded: Any, saved: Any) -> Any:
    """The loaded value, with the dtype and the container types it was saved with."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.dtype == saved.dtype or loaded.shape != saved.shape:
            return loaded
        return torch.empty_like(loaded, dtype=saved.dtype).copy_(saved)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _as_saved(value, saved.get(key)) for key, value in loaded.items()}
    if type(saved) in (list, tuple) and isinstance(loaded, Sequence):
        return type(saved)(_as_saved(a, b) for a, b in zip(loaded, saved, strict=True))
    return loaded


def _try_steps(function: Any, optimizer: Optimizer, config: TrainConfig) -> None:
    """Takes trial steps, without side effects: the state must be storable, and whole, so that a
    resumed run takes the same steps. With shares, a step over some parameters must be that over
    all.

    Raises:
        TaskError: it is not, or a step fails.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    trained = [each for each in parameters if each.requires_grad]
    homes = [each.data for each in parameters]
    initial, blank = _copies(homes), _stored(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    is_dividable = True

    if averages(optimizer):
        optimizer.train()  # type: ignore[attr-defined]

    def step(number: int, part: Sequence[Tensor] = trained, gradient: float = 1e-3) -> None:
        seed_slot(parameters[0].device, config.seed, number, config.slots)
        optimizer.zero_grad(set_to_none=True)
        for parameter in part:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    def begin_again(state: Any, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)
        load_optimizer(optimizer, deepcopy(state))  # it becomes its own

    def take_from_the_start(part: Sequence[Tensor]) -> None:
        begin_again(blank, initial)
        for number, gradient in enumerate((1e-3, 10.0)):  # some clip a large norm
            step(number, part, gradient)

    with keeping_generators(parameters[0].device):
        try:
            step(0)
            middle, weights = _stored(optimizer), _copies(parameters)
            step(1)
            gone_on = _copies(parameters)
            begin_again(middle, weights)
            step(1)
            resumed = _copies(parameters)
            if config.ddp.shard_optimizer:
                is_dividable = _is_dividable(optimizer, trained, take_from_the_start)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            problem = f"cannot be used: {said or type(error).__name__} (closures are not supported)"
            if isinstance(error, CheckpointError):
                problem = f"has a state that cannot be stored: {said}"
            raise _unfit(function, optimizer, problem.rstrip(".")) from error
    if not all(map(_same_bits, resumed, gone_on)):
        problem = "keeps state outside its state_dict(), so a resumed run would differ"
        raise _unfit(function, optimizer, problem)
    if not is_dividable:
        problem = "cannot be divided (ddp.shard_optimizer): its steps depend on all parameters"
        raise _unfit(function, optimizer, problem)
    load_optimizer(optimizer, blank)
    if averages(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
    for parameter, home, value in zip(parameters, homes, initial, strict=True):
        parameter.data = home.copy_(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """On the CPU, as a GPU may have no room for them."""
    return [each.detach().to("cpu", copy=True) for each in tensors]


def _stored(optimizer: Optimizer) -> Any:
    """Its state as a checkpoint returns it."""
    tensors, rest = flatten_state(optimizer.state_dict())
    copies = dict(zip(tensors, _copies([*tensors.values()]), strict=True))
    return unflatten_state(copies, json.loads(json.dumps(rest)))


def _is_dividable(
    optimizer: Optimizer, trained: Sequence[Tensor], take: Callable[[Sequence[Tensor]], None]
) -> bool:
    """Whether it updates each parameter by itself, see optimizer_shares.py.

    Args:
        take: takes steps from the start, with gradients of some of the parameters.
    """
    halves = trained[::2], trained[1::2]
    take(trained)
    state = optimizer.state_dict()
    if (
        averages(optimizer)
        or len(state) != 2
        or not all(isinstance(k, int) for k in state["state"])
    ):
        return False
    whole = [_part_of(optimizer, half) for half in halves]
    for half, before in zip(halves, whole, strict=True):
        take(half)
        if _part_of(optimizer, half) != before:
            return False
    return True


def _part_of(optimizer: Optimizer, part: Sequence[Tensor]) -> list[Any]:
    """These parameters and what the optimizer keeps of them, to compare."""
    state, ids = optimizer.state_dict(), {id(each) for each in part}
    kept: list[Any] = []
    for named, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for key, each in zip(named["params"], group["params"], strict=True):
            if id(each) in ids:
                kept.append([each.data, state["state"].get(key), {**named, "params": key}])
    tensors, rest = flatten_state(kept)
    raw = (each.contiguous().view(-1).view(torch.uint8) for each in _copies([*tensors.values()]))
    return [rest, *(sha256(each.numpy().data).digest() for each in raw)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())
