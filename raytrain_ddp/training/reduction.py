"""How the gradients of all slots become those of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from raytrain_ddp.data.loader import Slot
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.phase_clock import Clock
from raytrain_ddp.training.tree_sum import TreeSum
from raytrain_ddp.training.world import World, broadcast, broadcast_tensor


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
    last backward pass goes on. DDP divides by the world size; `scale` takes that back, if no hook
    does (see `compress`)."""

    def __init__(self, net: nn.Module, scale: float) -> None:
        self._net, self.scale = net, scale

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


class ExactReduction:
    """Sums in the order of a tree over all slots: the same bits on any number of workers.

    Gradients are exchanged in buckets, while the last backward pass goes on: each as soon as its
    own are there and the bucket before it is on its way, so that all ranks keep to one order.

    Args:
        model: not wrapped; its gradients become views of one vector for each bucket.
        bucket_mib: a bucket has parameters of one type, and is full when they are as large.
        clock: is told when only others are waited for.
    """

    scale = 1.0

    def __init__(
        self, model: nn.Module, slots: int, world: World, bucket_mib: float, clock: Clock
    ) -> None:
        self._clock = clock
        self._buckets = [
            _Bucket(parameters, slots, world) for parameters in _divide(model, bucket_mib * 2**20)
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
        self._started = 0  # so many buckets are on their way
        for bucket in self._buckets:
            bucket.sum.begin()

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if slot.samples]

    @contextmanager
    def passing(self, slot: Slot, is_last: bool) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.open()
        hooks = self._watch(slot) if is_last else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets[self._started :]:
            bucket.close(slot)

    def _watch(self, slot: Slot) -> list[RemovableHandle]:
        """Has the buckets start in the slot's backward pass. Hooks that stay would keep the
        parameters alive, and these them."""
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._count, slot, place))
            for place, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def _count(self, slot: Slot, place: int, parameter: Tensor) -> None:
        """The gradient of a parameter is there."""
        if place < self._started:
            raise ConfigError(
                "exact = true: a backward pass adds to a gradient twice, as torch.utils.checkpoint "
                "may with use_reentrant=True: give it use_reentrant=False."
            )
        self._buckets[place].missing.discard(id(parameter))
        for bucket in self._buckets[self._started :]:
            if bucket.missing:
                break
            bucket.close(slot)
            bucket.sum.start()
            self._started += 1

    def finish(self) -> None:
        self._clock.mark("compute")  # of a worker that has no samples, too
        for bucket in self._buckets[self._started :]:
            bucket.sum.start()
        for bucket in self._buckets:
            bucket.sum.share()
        for bucket in self._buckets:
            bucket.lay(bucket.sum.finish())


class _Bucket:
    """Parameters whose gradients are summed together.

    Attributes:
        missing: ids of those whose gradient of the pass that goes on is not there yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], slots: int, world: World) -> None:
        self.parameters = parameters
        # As in memory, or without gaps where that has some, as a part of another tensor.
        self._strides = [torch.empty_like(each, device="meta").stride() for each in parameters]
        length = sum(parameter.numel() for parameter in parameters)
        self.sum = TreeSum(slots, length, parameters[0].dtype, world)

    def open(self) -> None:
        """A slot's gradients are about to come."""
        self._flat = self.sum.take()
        self.lay(self._flat)
        self.missing = {id(parameter) for parameter in self.parameters}

    def close(self, slot: Slot) -> None:
        """All of the slot's gradients are there."""
        self.sum.add(slot.index, self._flat)

    def lay(self, flat: Tensor) -> None:
        """Makes the gradients views of a vector."""
        start = 0
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            parameter.grad = flat.as_strided(parameter.size(), strides, start)
            start += parameter.numel()


def _divide(model: nn.Module, size_bytes: float) -> list[list[nn.Parameter]]:
    """Into buckets, in the order in which a backward pass is likely to come by: the reverse of that
    in which parameters were registered."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    filled: Counter[torch.dtype] = Counter()  # bytes
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(parameter)
        filled[dtype] += parameter.nbytes
        if filled[dtype] >= size_bytes:
            full.append(filling.pop(dtype))
            del filled[dtype]
    return [*full, *filling.values()]


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
        self._sum.start()
        self._sum.share()
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
    for tensor in tensors.values():
        broadcast_tensor(tensor, 0)
