"""How the gradients of all slots become those of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.data.loader import Slot
from raytrain_ddp.training.tree import TreeSum
from raytrain_ddp.training.world import World


class Reduction(Protocol):
    """Sums gradients over slots and workers.

    Attributes:
        scale: a loss is multiplied by, besides its share of the step, before its backward pass.
    """

    scale: float

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


class ExactReduction:
    """Sums in the order of a tree over all slots: the same bits on any number of workers.

    Args:
        model: not wrapped; its gradients become views of one vector for each type.
    """

    scale = 1.0

    def __init__(self, model: nn.Module, slots: int, world: World) -> None:
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        self._groups = list(by_type.values())
        self._sums = [
            TreeSum(slots, sum(p.numel() for p in group), dtype, world)
            for dtype, group in by_type.items()
        ]

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


def _lay(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Makes the gradients views of a vector, each laid out in memory as its parameter."""
    start = 0
    for parameter in parameters:
        parameter.grad = flat.as_strided(parameter.size(), parameter.stride(), start)
        start += parameter.numel()
