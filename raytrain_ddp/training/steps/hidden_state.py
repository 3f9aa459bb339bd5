"""Finds state that forward passes keep outside parameters and buffers, so not in checkpoints."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.data.loading.nested import PLAIN, leaves_of
from raytrain_ddp.errors import TaskError, first_names
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of

Attributes = dict[str, list[Any]]
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_MAX_LEAVES = 1000  # of an attribute
_MAX_COPIED = 2**16  # elements


def attributes_of(task: Task, model: nn.Module) -> Attributes:
    """Returns the plain values and tensors in attributes of the task and the modules, by attribute,
    including those in lists, tuples, dicts and dataclasses.

    A large tensor is kept as its memory and version, others as a copy.
    """
    owners: dict[str, object] = {"task": task, "model": model}
    owners |= {f"model.{name}": each for name, each in model.named_modules() if name}
    found: Attributes = {}
    for owner, each in owners.items():
        for key, value in [*getattr(each, "__dict__", {}).items()]:
            # A config cannot change; to look at its fields would count as reading them.
            if key not in _OF_MODULES and not isinstance(value, Section):
                nest = [*value] if isinstance(value, deque | set) else value
                leaves = (leaf for _, leaf in islice(leaves_of(nest), _MAX_LEAVES))
                found[f"{owner}.{key}"] = [_kept(leaf) for leaf in leaves]
    return found


def changed(before: Attributes, after: Attributes) -> list[str]:
    """Returns the attributes that differ."""
    none: list[Any] = []
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _alike(before.get(name, none), after.get(name, none))]


def require_repeatable(task: Task, first: Tensor, second: Tensor, names: list[str]) -> None:
    """Raises TaskError if two losses of one batch differ, which were computed from the same
    weights, buffers and seeds.

    Args:
        names: attributes that the first pass has changed.
    """
    if _alike([_kept(first)], [_kept(second)]):
        return
    where = first_names(names) if names else "a global variable, an object or a generator"
    raise TaskError(
        f"{place_of(task.loss)}: the same batch has a different loss in a second pass, because of "
        f"what the first one kept in {where}. Checkpoints do not contain this state, and each "
        "worker has its own: keep it in a buffer of the model (register_buffer), and draw random "
        "numbers from torch's, numpy's or Python's global generators."
    )


def _kept(leaf: Any) -> Any:
    """Returns what to compare two states of a leaf by; None for an object that is not a value."""
    if isinstance(leaf, PLAIN):
        return repr(leaf)
    is_usual = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    if not is_usual or leaf.is_meta or leaf.is_inference():
        return None
    if leaf.numel() <= _MAX_COPIED:
        return leaf.detach().clone(), 0
    return leaf.detach(), leaf._version


def _alike(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(_same, before, after))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return bool(one == other)
    (first, version), (second, later) = one, other
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    if first.data_ptr() == second.data_ptr() and first.numel():
        return bool(version == later)
    if first.is_floating_point() or first.is_complex():
        first, second = first.nan_to_num(), second.nan_to_num()
    return torch.equal(first, second)
