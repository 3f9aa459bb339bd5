"""What an optimizer's groups and state are, and how they are loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers, named_optimizers

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
    each = named_optimizers(optimizer).values()
    return {name for one in each for name in inspect.signature(type(one)).parameters} - {"params"}


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
