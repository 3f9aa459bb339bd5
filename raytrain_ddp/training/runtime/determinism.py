"""Finds a layer that has no deterministic kernel, before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from raytrain_ddp.errors import ConfigError

_SAYS = " does not have a deterministic implementation"
_WRAPPER = "DistributedDataParallel.module"


@contextmanager
def naming_nondeterministic(model: nn.Module) -> Iterator[None]:
    """For passes of the model.

    Raises:
        ConfigError: torch has no deterministic kernel for an operation; names it and the layer.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    tracker = Tracker()
    try:
        with tracker:
            yield
    except RuntimeError as error:
        kernel, says, _ = str(error).partition(_SAYS)
        if not says:
            raise
        raise ConfigError(
            "compute.deterministic = True, but torch has no deterministic kernel for "
            f"{_layer(tracker.parents, model)}: {kernel}. Use another layer or operation there, or "
            "--compute.no-deterministic: then the run keeps every promise except the same bits."
        ) from error


class Tracker(ModuleTracker):
    """Does not watch gradients of leaves, which `torch.autograd.grad` in a loss could not compute
    then (in a physics-informed loss, or a gradient penalty)."""

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        super()._fw_pre_hook(mod, _without_leaves(input))

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        super()._fw_post_hook(mod, input, _without_leaves(output))


def _without_leaves(values: Any) -> tuple[Any, ...]:
    """The tensors that have a grad_fn. (torch only flattens what it receives.)"""
    found = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return tuple(each for each in found if not each.is_leaf)


def _layer(parents: Collection[str], model: nn.Module) -> str:
    """``layer1.0.pool (MaxPool3d)``: the innermost one; what is in no module is the loss."""
    tracked = max(parents, key=lambda name: (name != "Global", name.count(".")))
    if tracked == "Global":
        return "the loss"
    _, _, name = tracked.replace(_WRAPPER, "Model", 1).partition(".")
    try:
        kind = type(model.get_submodule(name)).__name__
    except AttributeError:  # a module that is not the model's, such as the loss
        return tracked
    return f"{name} ({kind})" if name else kind
