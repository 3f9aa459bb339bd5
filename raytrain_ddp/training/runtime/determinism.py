"""Finds the layers that have no deterministic kernel: all of them, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from raytrain_ddp.errors import ConfigError

_SAYS = " does not have a deterministic implementation"
_WRAPPER = "DistributedDataParallel.module"


@contextmanager
def naming_nondeterministic(model: nn.Module) -> Iterator[None]:
    """Lets passes of the model continue where torch refuses a kernel.

    Raises:
        ConfigError: at the end, if it did; names each such kernel, with its layer.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    tracker = Tracker()
    with tracker, _Finder(tracker) as finder:
        yield
    if finder.found:
        rows = (f"  {_layer(name, model)}: {kernel}" for kernel, name in finder.found)
        raise ConfigError(
            "compute.deterministic = True, but torch has no deterministic kernel for\n"
            + "\n".join(dict.fromkeys(rows))
            + "\nUse other layers or operations there, or --compute.no-deterministic: then the run "
            "keeps every promise except the same bits."
        )


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


class _Finder(TorchDispatchMode):
    """Sees every operation, forward and backward; those that are refused run nevertheless."""

    supports_higher_order_operators = True

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker
        self.found: list[tuple[str, str]] = []  # (kernel, the innermost module)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            kernel, says, _ = str(error).partition(_SAYS)
            if not says:
                raise
        modules = self._tracker.parents - {"Global"}
        self.found.append((kernel, max(modules, key=lambda name: name.count("."), default="")))
        torch.use_deterministic_algorithms(False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.use_deterministic_algorithms(True)


def _layer(tracked: str, model: nn.Module) -> str:
    """``layer1.0.pool (MaxPool3d)``; what is in no module is the loss."""
    if not tracked:
        return "the loss"
    _, _, name = tracked.replace(_WRAPPER, "Model", 1).partition(".")
    try:
        kind = type(model.get_submodule(name)).__name__
    except AttributeError:  # a module that is not the model's, such as the loss
        return tracked
    return f"{name} ({kind})" if name else kind
