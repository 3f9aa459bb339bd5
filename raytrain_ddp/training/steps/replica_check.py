"""Checks that all workers still have the same weights, to the last bit.

They start equal and apply equal updates. A faulty device or memory shows in no other way: the
loss keeps falling, and the checkpoint has only rank 0's weights. They are compared by hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import DivergedError, first_names
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.connections import all_gather
from raytrain_ddp.training.gradients.buffer_sync import is_merged
from raytrain_ddp.training.gradients.reduction import model_tensors
from raytrain_ddp.training.membership import Membership


class Replicated(Protocol):
    """What all workers have alike: a model after `step` steps."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def step(self) -> int: ...


class ReplicaCheck:
    """Compares parameters and buffers of all workers; ends the run if they differ."""

    def __init__(self, scaling: ScalingConfig, state: Replicated, membership: Membership) -> None:
        self._every = scaling.check_every_steps if membership.world.size > 1 else 0
        self._state, self._membership = state, membership

    def _named(self) -> dict[str, Tensor]:
        """The tensors that are compared, by name: all but complex buffers and types without
        arithmetic."""
        named = model_tensors(self._state.model)
        return {name: each.detach() for name, each in named.items() if is_merged(each.dtype)}

    def follow(self) -> None:
        """Compares the weights if that is due; called at the end of a step, by all ranks."""
        rank, step = self._membership.world.rank, self._state.step
        turned = failpoint("train.weights", rank, step)  # 1 except in tests
        if turned != 1:
            next(iter(self._named().values())).view(-1)[0] *= turned
        if self._every and step % self._every == 0:
            self.require()

    def require(self) -> None:
        """Compares now, unless the check is off; all ranks take part.

        Raises:
            DivergedError: they differ. It names the ranks that differ from most.
        """
        world, hosts, step = self._membership.world, self._membership.hosts, self._state.step
        failpoint("train.compare", world.rank, step)
        if not self._every:
            return
        named = self._named()
        mine = fingerprints([*named.values()]).cpu()
        every = mine.new_empty(world.size, len(mine))
        all_gather(every, mine)
        rows = [tuple(row) for row in every.tolist()]
        if len({*rows}) == 1:
            return
        usual = Counter(rows).most_common(1)[0][0]  # in a tie, rank 0's
        ranks = [rank for rank, row in enumerate(rows) if row != usual]
        columns = zip(named, zip(*rows, strict=True), strict=True)
        names = [name for name, column in columns if len({*column}) > 1]
        who = ", ".join(f"{world.of_run(r)}" + (f" ({hosts[r]})" if hosts else "") for r in ranks)
        subject = f"ranks {who} have" if len(ranks) > 1 else f"rank {who} has"
        others = f"rank {world.of_run(0)}" if world.size == 2 else "the others"
        raise DivergedError(
            f"{subject} different weights from {others} after step {step}: in "
            f"{first_names(names, 1)}. A device, memory or kernel of that host computes wrong "
            "results, or the task changes weights on its own. The last checkpoint, made earlier, "
            "is kept. Exclude that host, and start again."
        )


_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements per piece: fits a cache, or one kernel
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit hash of the bits of each tensor, shape (tensors,), on their device.

    Each element is multiplied by an odd number that depends on its position, so changing one or
    swapping two changes the sum; the 32-bit products and the sums wrap around.
    """
    device = tensors[0].device
    piece = min(_PIECE.get(device.type, 1 << 16), max(tensor.numel() for tensor in tensors))
    odd = _odd_numbers(max(1, piece), device)
    return torch.stack([_fingerprint(tensor, odd) for tensor in tensors])


@lru_cache(maxsize=2)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd numbers, shape (count,), spread by Knuth's multiplicative hash."""
    places = torch.arange(count, dtype=torch.int64, device=device)
    return (places * 2654435761 * 2 + 1).to(torch.int32)


def _fingerprint(tensor: Tensor, odd: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[min(8, tensor.element_size())])
    parts = [
        (part * odd[: len(part)]).sum(dtype=torch.int64) * (2 * number + 1)
        for number, part in enumerate(bits.split(len(odd)))
    ]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]
