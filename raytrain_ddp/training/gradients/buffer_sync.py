"""Merges the changes that slots make to buffers, such as batch-norm statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.gradients.tree_sum import TreeSum
from raytrain_ddp.training.runtime.world import World

REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BufferLocation(NamedTuple):
    """Where a buffer is; a forward pass may put another tensor there, as by ``self.mean = ...``."""

    name: str
    module: nn.Module
    key: str

    def found(self) -> Tensor:
        """The buffer itself."""
        buffer: Tensor = getattr(self.module, self.key)
        return buffer

    def tensor(self) -> Tensor:
        return self.found().detach()


def buffers_of(model: nn.Module) -> list[BufferLocation]:
    """Each buffer once, in the order of `nn.Module.named_buffers`."""
    places = {
        id(buffer): BufferLocation(f"{name}.{key}" if name else key, module, key)
        for name, module in reversed([*model.named_modules()])
        for key, buffer in module.named_buffers(recurse=False)
    }
    return [places[id(buffer)] for buffer in model.buffers()]


class SavedBuffers:
    """A copy of a model's buffers; `restore` writes them back."""

    def __init__(self, model: nn.Module) -> None:
        self._places = buffers_of(model)
        self._tensors = [each.found() for each in self._places]
        self._values = [tensor.detach().clone() for tensor in self._tensors]

    def changed(self) -> list[str]:
        """The numbers that differ now, by name, but for the statistics of normalization layers."""
        pairs = zip(self._places, self._values, strict=True)
        return [
            place.name
            for place, value in pairs
            if not isinstance(place.module, nn.modules.batchnorm._NormBase)
            and value.dtype is not torch.bool
            and not torch.equal(place.tensor(), value)
        ]

    def restore(self) -> None:
        """Raises ConfigError if one has another size."""
        for place, tensor, value in zip(self._places, self._tensors, self._values, strict=True):
            now = place.found()
            if now is not tensor:
                setattr(place.module, place.key, tensor)
            if now.shape != value.shape:
                raise ConfigError(
                    f"the model's buffer {place.name} changes its size in a forward pass: give it "
                    "its size in model(), for example by calling the model with a batch."
                )
        if self._values:
            torch._foreach_copy_([tensor.detach() for tensor in self._tensors], self._values)


def is_merged(dtype: torch.dtype) -> bool:
    """Whether changes to buffers of this type are merged. Complex numbers, and types without
    arithmetic, such as float8, stay unchanged."""
    return dtype in REALS or dtype in _INTEGERS or dtype is torch.bool


def own_memory(model: nn.Module) -> None:
    """Gives each expanded buffer, which cannot be written to, memory of its own."""
    own: dict[int, Tensor] = {}
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            shape = zip(buffer.shape, buffer.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in shape):
                setattr(module, key, own.setdefault(id(buffer), buffer.contiguous()))


class SlotBuffers:
    """Merges losses and buffers (batch-norm statistics) over all slots, for any number of workers.

    Each slot starts from the buffers before the step; their changes are averaged over all
    slots, weighted by samples. DDP's way, rank 0's buffers for all, would make them depend on the
    number of workers. A bool buffer is inverted if any slot has inverted it. A value that is not
    finite (an observer's minimum starts at inf) is replaced by the mean over the slots in the first
    step in which all of them set it.

    Args:
        with_loss: the ranks also agree on the loss, even if there are no buffers.
        exact_slots: the number of slots, if sums must have the same bits for any number of workers.
        changing: the bool buffers that forward passes change. The others are constant masks, which
            may be large and are never sent.
        scalars: the number of those that are averaged with the loss.

    Attributes:
        means: of the loss and scalars, shape (1 + scalars,), if the ranks have agreed on them.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        with_loss: bool = False,
        exact_slots: int = 0,
        changing: Collection[BufferLocation] = (),
        scalars: int = 0,
    ) -> None:
        by_type: dict[torch.dtype, list[BufferLocation]] = {}
        for place in buffers_of(model):
            dtype = place.tensor().dtype
            if is_merged(dtype) and (dtype is not torch.bool or place in changing):
                by_type.setdefault(dtype, []).append(place)
        self._groups = list(by_type.values())
        self._flags = BoolBuffers(model, without=changing)
        self._lengths = [sum(place.tensor().numel() for place in g) for g in self._groups]
        self._world = world
        self._agrees = with_loss or bool(exact_slots) or bool(self._groups)
        self._shares = 1 + scalars
        self._length = sum(self._lengths) + self._shares
        self._tree: TreeSum | None = None
        if exact_slots:
            self._tree = TreeSum(exact_slots, self._length, torch.float64, world)
        self._is_open = False  # between `begin` and `finish`

    def begin(self) -> None:
        self._start = [_flat(group) for group in self._groups]
        real = torch.Tensor.is_floating_point
        self._base = [s.nan_to_num(0.0, 0.0, 0.0) if real(s) else s for s in self._start]
        self._is_open = True
        self._change: list[Tensor] = []
        self._flags.begin()
        self._own = torch.zeros(self._shares, dtype=torch.float64, device=self._world.device)
        if self._tree is not None:
            self._tree.begin()
        else:
            self._total = self._own.new_zeros(self._length)

    def rewind(self) -> None:
        for group, start in zip(self._groups, self._start, strict=True):
            _spread(start, group)

    def roll_back(self) -> None:
        """Restores the buffers before a step that was not finished."""
        if self._is_open:
            self.rewind()
        self._is_open = False

    def add(self, slot: int, weight: float, losses: Tensor) -> None:
        """Records the changes that a slot made to the buffers, and its loss and scalars, shape
        (1 + scalars,). A slot of weight 0 changes nothing."""
        self._flags.require_constant()
        parts = []
        for group, start, base in zip(self._groups, self._start, self._base, strict=True):
            now = _flat(group) if weight else start
            if start.is_floating_point():
                parts.append((now - base).double())
            elif start.dtype is torch.bool:
                parts.append((now ^ start).double())
            else:  # in 64 bits, as uint8 cannot be negative
                parts.append((now.long() - start.long()).double())
        shares = losses.double().view(-1)
        self._own += shares * weight
        # Values that are not finite must stay so: never multiply them by 0.
        added = torch.cat([*parts, shares if weight else shares * 0]) * (weight or 1.0)
        if self._tree is not None:
            self._tree.put(slot, added)
        elif self._agrees:
            self._total += added

    def agree(self) -> tuple[Tensor, Tensor]:
        """All ranks take part.

        Returns:
            This worker's shares of the mean loss and scalars, float64, shape (1 + scalars,): the
            shares of all workers add up to them. Also the sum of the loss and of all changes to
            finite values, shape (): finite if all of them are; 0 if there are no buffers, and
            nothing to agree on.
        """
        if not self._agrees:
            return self._own, self._own.new_zeros(())
        if self._tree is not None:
            self._total = self._tree.total()
        elif self._world.size > 1:
            dist.all_reduce(self._total)
        *self._change, losses = self._total.split([*self._lengths, self._shares])
        self.means = losses
        if self._tree is not None:
            # One share holds all of it, so that its sum has the same bits, too.
            self._own = losses if self._world.is_main else torch.zeros_like(losses)
        pairs = zip(self._start, self._change, strict=True)
        judged = [torch.where(start.isfinite(), change, 0) for start, change in pairs]
        return self._own, torch.cat([*judged, losses[:1]]).sum()

    def finish(self, refused: Tensor) -> None:
        """Sets the buffers after the step; those before it if `refused`, shape (), is true."""
        self._is_open = False
        each = zip(self._groups, self._start, self._base, self._change, strict=True)
        for group, start, base, change in each:
            if start.is_floating_point():
                new = (base + change).to(start.dtype)
                keeps = refused | new.isnan() & ~start.isnan()  # such as inf + -inf
                _spread(torch.where(keeps, start, new), group)
                continue
            applied = torch.where(refused, 0, change)
            if start.dtype is torch.bool:
                _spread(start ^ (applied > 0), group)
            else:  # float64 cannot hold all 64-bit integers, but it holds changes
                _spread(start.long() + applied.round().long(), group)


class BoolBuffers:
    """Detects which bool buffers were written to since `begin`. The host knows this without
    waiting for the device: torch counts in-place changes of a tensor."""

    def __init__(self, model: nn.Module, without: Collection[BufferLocation] = ()) -> None:
        places = [p for p in buffers_of(model) if p.tensor().dtype is torch.bool]
        self._places = [place for place in places if place not in without]
        self.begin()

    def begin(self) -> None:
        self._written = [self._state(place) for place in self._places]

    @staticmethod
    def _state(place: BufferLocation) -> tuple[int, int]:
        tensor = place.found()
        return id(tensor), tensor._version

    def changed(self) -> list[BufferLocation]:
        pairs = zip(self._places, self._written, strict=True)
        return [place for place, written in pairs if self._state(place) != written]

    def require_constant(self) -> None:
        """Raises ConfigError if any was written to."""
        for place in self.changed():
            raise ConfigError(
                f"the model's bool buffer {place.name} changes in this step but did not in the "
                "first one, so it was treated as a constant mask: make it an integer buffer."
            )


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def spread(values: Tensor, tensors: list[Tensor]) -> None:
    """Writes a flat vector into the tensors, in one kernel on a GPU."""
    pieces = values.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])


def _flat(places: list[BufferLocation]) -> Tensor:
    return flat(place.tensor() for place in places)


def _spread(values: Tensor, places: list[BufferLocation]) -> None:
    spread(values, [place.tensor() for place in places])
