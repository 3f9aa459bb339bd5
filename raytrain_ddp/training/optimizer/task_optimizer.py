"""The optimizer of a task, or the configured one if it has none."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig, group_rules
from raytrain_ddp.config.withdrawn import WITHDRAWN
from raytrain_ddp.errors import CheckpointError, ConfigError, TaskError, did_you_mean, first_names
from raytrain_ddp.tasks.model_parts import head_of, matching, require_matches
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of, refused

_OF_GROUPS = ("params", "lr_scale", "param_names", "name")  # not arguments of optimizers


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """SGD or AdamW over the groups of `param_groups`.

    Fused, as only fused optimizers skip a step on the device: if their `found_inf` is 1.
    """
    groups = param_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    sgd = torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    if config.momentum:
        allocate_momentum(sgd, (p for p in model.parameters() if p.requires_grad))
    return sgd


def allocate_momentum(sgd: torch.optim.SGD, parameters: Iterable[nn.Parameter]) -> None:
    """SGD does so in the first step, but a refused step leaves it unset. The order of parameters is
    that of the state in a checkpoint."""
    for parameter in parameters:
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def optimizer_of(task: Task, model: nn.Module, config: TrainConfig) -> Optimizer:
    """The task's optimizer, or the configured one, over the task's parameter groups if it gives
    some.

    Raises:
        TaskError: it is neither, or it lacks parameters of the model or has others.
    """
    function = task.optimizer
    if function is None:
        return build_optimizer(model, config.optim)
    made: Any = function(model)
    if isinstance(made, Optimizer):
        optimizer = made
    elif isinstance(made, Sequence | Iterator) and not isinstance(made, str):
        optimizer = _configured(function, list(made), model, config)
    else:
        hint = f" Several are withdrawn: {WITHDRAWN['turns']}." if isinstance(made, Mapping) else ""
        wanted = "a torch.optim.Optimizer, or a list of parameter groups"
        raise refused(function, made, wanted, hint)
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
    _require_parameters(function, optimizer, model)
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
    return TaskError(f"{place_of(function)}: the {type(optimizer).__name__} {problem}.")


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


_KERNELS = ("fused", "foreach", "capturable", "differentiable")  # options that are not state


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters, in the order of a `state_dict()`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether it skips a step on the device if its `found_inf` is 1: torch's fused ones do. (Not
    SGD with dampening, whose first step differs from the others.)"""
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    knows = of_torch and getattr(optimizer, "_step_supports_amp_scaling", False)
    groups = optimizer.param_groups
    return bool(knows) and all(g.get("fused") and not g.get("dampening") for g in groups)


def options_of(optimizer: Optimizer) -> set[str]:
    """The options that groups have as the optimizer's arguments; the other values are its state."""
    return {*inspect.signature(type(optimizer)).parameters} - {"params"}


def kept_options(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of a checkpoint's groups, except the learning rate, that the task's code now
    sets otherwise, as ``weight_decay = 0.1 (now 0.5)``."""
    names = options_of(optimizer) - {"lr", *_KERNELS}
    pairs = list(zip(optimizer.param_groups, saved, strict=False))
    found = [
        f"{name} = {old[name]!r} (now {own[name]!r})"
        for own, old in pairs
        for name in own
        if name in names and name in old and str(own[name]) != str(old[name])
    ]
    return list(dict.fromkeys(found))


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
    for key, parameter in zip(keys, parameters_of(optimizer), strict=True):
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


# Last parts of names in torchvision and in models of one's own; those of timm have a list.
_NOT_DECAYED = {
    *("class_token", "cls_token", "pos_embedding", "pos_embed", "position_embedding"),
    *("relative_position_bias_table", "layer_scale", "logit_scale"),
}


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of the parameters that are trained: first those with the learning rate of the
    schedule, and of these first those with weight decay.

    A group whose learning rate is not that of the schedule has its share as "lr_scale", as in
    timm.

    Raises:
        ConfigError: a pattern matches nothing, or the model has no layers to decay by.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = decayed_parameters(model, config)
    decay = {name: config.weight_decay * (name in decayed) for name in trained}
    scale = _layer_scales(model, config.layer_decay)
    if config.head_lr is not None:
        head = trained.keys() & set(head_of(model))
        if not head:
            raise ConfigError(f"optim.head_lr = {config.head_lr}: the head is frozen.")
        scale |= dict.fromkeys(head, config.head_lr / config.lr)
    for pattern, values in group_rules(config.groups):
        found = matching(pattern, trained)
        if not found and matching(pattern, dict(model.named_parameters())):
            raise ConfigError(
                f"optim.groups: all parameters that {pattern!r} matches are frozen (model.freeze)."
            )
        for name in found or require_matches("optim.groups", pattern, trained):
            decay[name] = values.get("weight_decay", decay[name])
            if "lr" in values:
                scale[name] = values["lr"] / config.lr
    groups: dict[tuple[bool, float, float], dict[str, Any]] = {}
    for name in sorted(trained, key=lambda name: (scale.get(name, 1.0) != 1, name not in decayed)):
        kind = name in decayed, decay[name], scale.get(name, 1.0)
        groups.setdefault(kind, {"params": []})["params"].append(trained[name])
    for (_, weight_decay, share), group in groups.items():
        group["weight_decay"] = weight_decay
        if share != 1:
            group["lr_scale"] = share
    return list(groups.values())


def decayed_parameters(model: nn.Module, config: OptimConfig) -> set[str]:
    """Names of the parameters that weight decay applies to; `optim.groups` may still change it."""
    given: Any = getattr(model, "no_weight_decay", tuple)
    listed = given()
    of_norms = {
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        for key, _ in module.named_parameters(recurse=False)
    }

    def is_decayed(name: str, parameter: nn.Parameter) -> bool:
        last = name.rpartition(".")[2]
        if last in _NOT_DECAYED or any(fnmatchcase(name, each) for each in listed):
            return False
        if last.endswith("bias") or last.startswith("bias"):  # also those of LSTMs and attention
            return config.decay_bias
        if name in of_norms:
            return config.decay_norms
        return parameter.ndim > 1 or (config.decay_norms and last == "weight")

    return {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Name -> share of the learning rate, for models that know the depth of their layers."""
    if layer_decay == 1:
        return {}
    if not hasattr(model, "group_matcher"):
        raise ConfigError(
            f"optim.layer_decay = {layer_decay}: the model has no group_matcher, which says how "
            "deep a layer is, as timm's models have: --model.name timm:NAME."
        )
    from timm.optim import param_groups_layer_decay  # seconds

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=layer_decay)
    return {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
