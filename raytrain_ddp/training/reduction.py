"""How the gradients of all slots become those of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.data.loader import Slot
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.tree import TreeSum
from raytrain_ddp.training.world import World, broadcast


class Reduction(Protocol):
    """Sums gradients over slots and workers.

    Attributes:
        scale: a loss is multiplied by, besides its share of the step, before its backward pass.
    """

    scale: float

    def require_all(self, model: nn.Module) -> None:
        """Raises ConfigError if a parameter has no gradient after a backward pass, and must."""

    def begin(self) -> None:
        """A step begins; there are no gradients."""

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of this worker's slots that are passed through the model, in their order."""

    def passing(self, slot: Slot, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds a slot's forward and backward pass."""

    def finish(self) -> None:
        """Gradients are the sum over all slots, on all ranks; all take part."""


class DdpReduction:
    """Sums as they come: over a worker's slots in the gradients, over workers by DDP, while the
    last backward pass goes on. DDP divides by the world size; `scale` takes that back."""

    def __init__(self, net: nn.Module, world: World) -> None:
        self._net, self.scale = net, float(world.size)

    def require_all(self, model: nn.Module) -> None:
        pass  # DDP has its own say

    def begin(self) -> None:
        pass

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        # All ranks make a backward pass; one without samples leaves no trace.
        return [slot for slot in slots if slot.samples] or list(slots[:1])

    def passing(self, slot: Slot, is_last: bool) -> AbstractContextManager[None]:
        if is_last or not isinstance(self._net, DistributedDataParallel):
            return nullcontext()
        no_sync: AbstractContextManager[None] = self._net.no_sync()
        return no_sync

    def finish(self) -> None:
        pass


class _Laid(NamedTuple):
    parameter: nn.Parameter
    strides: tuple[int, ...]  # of its gradient


class ExactReduction:
    """Sums in the order of a tree over all slots: the same bits on any number of workers.

    Args:
        model: not wrapped; its gradients become views of one vector for each type.
    """

    scale = 1.0

    def __init__(self, model: nn.Module, slots: int, world: World) -> None:
        by_type: dict[torch.dtype, list[_Laid]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                # As in memory, or without gaps where that has some, as a part of another tensor.
                strides = torch.empty_like(parameter, device="meta").stride()
                by_type.setdefault(parameter.dtype, []).append(_Laid(parameter, strides))
        self._groups = list(by_type.values())
        self._sums = [
            TreeSum(slots, sum(laid.parameter.numel() for laid in group), dtype, world)
            for dtype, group in by_type.items()
        ]

    def require_all(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        unused = [name for name, parameter in named if parameter.grad is None]
        if unused:
            raise ConfigError(
                f"exact = true: the loss does not depend on {', '.join(unused[:3])}"
                f"{' and more' if unused[3:] else ''}: freeze what is not trained "
                "(requires_grad_(False)), as weight decay would be applied to it."
            )

    def begin(self) -> None:
        for total in self._sums:
            total.begin()

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if slot.samples]

    @contextmanager
    def passing(self, slot: Slot, is_last: bool) -> Iterator[None]:
        flats = [total.take() for total in self._sums]
        for flat, group in zip(flats, self._groups, strict=True):
            _lay(flat, group)
        yield
        for flat, total in zip(flats, self._sums, strict=True):
            total.add(slot.index, flat)

    def finish(self) -> None:
        for total, group in zip(self._sums, self._groups, strict=True):
            _lay(total.finish(), group)


class Sum(Protocol):
    """Sums a vector of each slot over all workers."""

    def begin(self) -> None:
        """A step begins."""

    def add(self, slot: int, vector: Tensor) -> None:
        """Of one of this worker's slots, in their order."""

    def finish(self) -> Tensor:
        """The sum; all ranks take part."""


class PlainSum:
    """Over a worker's slots as they come, then by an all-reduce."""

    def __init__(self, length: int, world: World) -> None:
        self._length, self._world = length, world

    def begin(self) -> None:
        self._total = torch.zeros(self._length, dtype=torch.float64, device=self._world.device)

    def add(self, slot: int, vector: Tensor) -> None:
        self._total += vector

    def finish(self) -> Tensor:
        if self._world.size > 1:
            dist.all_reduce(self._total)
        return self._total


class ExactSum:
    """In the order of the tree, as ExactReduction."""

    def __init__(self, slots: int, length: int, world: World) -> None:
        self._sum = TreeSum(slots, length, torch.float64, world)

    def begin(self) -> None:
        self._sum.begin()

    def add(self, slot: int, vector: Tensor) -> None:
        own = self._sum.take()
        own.copy_(vector)
        self._sum.add(slot, own)

    def finish(self) -> Tensor:
        return self._sum.finish()


def make_alike(model: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers, as DDP does; all take part.

    Raises:
        ConfigError: the model is another one on this rank.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]
    if broadcast(shapes, world) != shapes:
        raise ConfigError(f"the model of rank {world.rank} has other parameters than rank 0's.")
    with torch.no_grad():
        for tensor in tensors.values():
            dist.broadcast(tensor.detach(), 0)


def _lay(flat: Tensor, group: Sequence[_Laid]) -> None:
    """Makes the gradients views of a vector."""
    start = 0
    for parameter, strides in group:
        parameter.grad = flat.as_strided(parameter.size(), strides, start)
        start += parameter.numel()
