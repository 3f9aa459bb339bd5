"""Sums over the slots of a step in one order, for any number of workers.

Floating-point sums depend on their order. An all-reduce sums by worker, so its last bits
depend on the number of workers. Here the slots are the leaves of one binary tree, which depends
only on their number. Each worker sums the subtrees of which it has all leaves; the nodes above them
are summed by each worker for a part of the vector, and gathered. (EasyScale, Li et al., SC'23,
showed that fixing such an order makes training independent of the number of workers.)

Each of n workers sends 2 (n - 1) / n times the vector, as in a ring all-reduce, if the slots
of each form one subtree, such as 1, 2, 4 ...; otherwise, up to log(slots) / 2 times as much more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_ddp.data.order import items_of_rank
from raytrain_ddp.membership.connections import all_gather
from raytrain_ddp.training.runtime.world import World

Span = tuple[int, int]  # leaves start .. stop-1


@lru_cache(maxsize=64)
def nodes(leaves: int) -> frozenset[Span]:
    """The nodes of the tree over `leaves`: the left branch of each has the largest power of two of
    leaves that leaves some to the right."""
    found: set[Span] = set()
    todo = [(0, leaves)]
    while todo:
        start, stop = todo.pop()
        found.add((start, stop))
        if stop - start > 1:
            middle = start + (1 << (stop - start - 1).bit_length() - 1)
            todo += [(start, middle), (middle, stop)]
    return frozenset(found)


def subtrees(leaves: int, mine: range) -> list[Span]:
    """The largest subtrees that have no leaf outside of `mine`."""
    stack: list[Span] = []
    for leaf in mine:
        stack.append((leaf, leaf + 1))
        while joinable(stack, leaves):
            (start, _), (_, stop) = stack[-2:]
            stack[-2:] = [(start, stop)]
    return stack


def joinable(stack: Sequence[Span], leaves: int) -> bool:
    """Whether the last two are the branches of one node."""
    return len(stack) > 1 and (stack[-2][0], stack[-1][1]) in nodes(leaves)


class TreeSum:
    """Sums one vector per slot. A slot without one counts as zeros.

    `start` and `share` begin operations that `finish` waits for, leaving time for other work, such
    as other sums. All ranks take part in all three, in the same order for several sums.

    Args:
        length: of the vectors, which are on `world.device` and of type `dtype`.
    """

    def __init__(self, slots: int, length: int, dtype: torch.dtype, world: World) -> None:
        self._slots, self._length, self._dtype, self._world = slots, length, dtype, world
        self._mine = items_of_rank(slots, world.size, world.rank)
        self._part = -(-length // world.size)  # the part that each worker sums
        self._dealt = [
            subtrees(slots, items_of_rank(slots, world.size, r)) for r in range(world.size)
        ]
        self._spans: list[Span] = []
        self._sums: list[Tensor] = []
        self._free: list[Tensor] = []
        self._works: list[Any] = []  # dist.Work; in torch's types possibly None

    def begin(self) -> None:
        """Resets the sum; the result of the previous step becomes invalid."""
        self._free += self._sums
        self._spans, self._sums, self._next = [], [], self._mine.start

    def take(self) -> Tensor:
        """A zeroed vector to be filled and passed to `add`, shape (length,)."""
        if self._free:
            return self._free.pop().zero_()[: self._length]
        size = self._part * self._world.size
        return torch.zeros(size, dtype=self._dtype, device=self._world.device)[: self._length]

    def add(self, slot: int, vector: Tensor) -> None:
        """Adds the vector of this worker's next slot; skipped slots have none."""
        while self._next < slot:
            self._push(self.take())
        self._push(vector)

    def put(self, slot: int, vector: Tensor) -> None:
        """Adds a copy of the vector; see `add`."""
        own = self.take()
        own.copy_(vector)
        self.add(slot, own)

    def start(self) -> None:
        """Starts sending each rank its part of the subtrees; called when all vectors are added."""
        while self._next < self._mine.stop:
            self._push(self.take())
        size, part, mine = self._world.size, self._part, len(self._sums)
        if size == 1:
            return
        parts = [whole.view(size, part) for whole in self._sums]
        sent = parts[0] if mine == 1 else torch.stack(parts, 1)  # (ranks, subtrees, part)
        counts = [len(spans) for spans in self._dealt]
        self._got = torch.empty(sum(counts) * part, dtype=self._dtype, device=self._world.device)
        self._works = [
            dist.all_to_all_single(
                self._got,
                sent.view(-1),
                [count * part for count in counts],
                [mine * part] * size,
                async_op=True,
            )
        ]

    def share(self) -> None:
        """Waits for its own part of all subtrees, sums them, and starts gathering the result."""
        size, part = self._world.size, self._part
        if size == 1:
            return
        self._wait()
        spans: list[Span] = []
        sums: list[Tensor] = []
        every = [span for each in self._dealt for span in each]
        for span, vector in zip(every, self._got.view(-1, part), strict=True):
            spans.append(span)
            sums.append(vector)
            join(spans, sums, self._slots)
        total, *free = self._sums
        self._works = start_gather(total.view(size, part), sums[0], self._world)
        del self._got
        self._spans, self._sums = [(0, self._slots)], [total]
        self._free += free

    def finish(self) -> Tensor:
        """The sum over all slots, shape (length,), the same on all ranks."""
        self._wait()
        (total,) = self._sums
        return total[: self._length]

    def total(self) -> Tensor:
        """Runs `start`, `share` and `finish` in a row."""
        self.start()
        self.share()
        return self.finish()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _push(self, vector: Tensor) -> None:
        # The whole buffer of which `take` gave the vector, with its padding.
        whole = vector.as_strided((self._part * self._world.size,), (1,), 0)
        self._spans.append((self._next, self._next + 1))
        self._sums.append(whole)
        self._next += 1
        self._free += join(self._spans, self._sums, self._slots)


def start_gather(parts: Tensor, own: Tensor, world: World) -> list[Any]:
    """Starts gathering each rank's `own` into its row of `parts`, shape (ranks, ...); all take
    part.

    gloo's own all_gather takes four times as long.
    """
    if parts.is_cuda:
        return [all_gather(parts, own, async_op=True)]
    parts[world.rank] = own
    others = [(world.rank + n) % world.size for n in range(1, world.size)]
    ways = [dist.P2POp(dist.isend, own, other) for other in others]
    ways += [dist.P2POp(dist.irecv, parts[other], other) for other in reversed(others)]
    return list(dist.batch_isend_irecv(ways))


def join(spans: list[Span], sums: list[Tensor], leaves: int) -> list[Tensor]:
    """Sums pairs that are branches of one node, in place; returns the vectors that became free."""
    free = []
    while joinable(spans, leaves):
        (start, _), (_, stop) = spans[-2:]
        sums[-2].add_(sums[-1])
        spans[-2:] = [(start, stop)]
        free.append(sums.pop())
    return free
