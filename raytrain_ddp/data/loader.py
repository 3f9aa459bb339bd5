"""Micro-batches in order, prepared ahead by threads.

Threads, not processes: decoding releases the GIL, a batch crosses no process border, and nothing is
forked inside a Ray worker (where that can deadlock). In a Ray actor of two CPUs they load 1.4 times
the images of two forkserver processes, 1.1 times beside a busy training loop, with half the memory
and the first batch after 0.2 s instead of 2.8 (benchmarks/results/data.md). A whole micro-batch is
one task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal, NamedTuple

import numpy as np

from raytrain_ddp.data.draws import Draws, Rows
from raytrain_ddp.data.plan import EpochOrder, Plan, Shuffle, deal
from raytrain_ddp.data.source import Batch, Data
from raytrain_ddp.data.threads import Threads, prefetched
from raytrain_ddp.errors import DataError
from raytrain_ddp.failpoints import failpoint

_WINDOW_BYTES = 64 * 2**20
_MOST_BLOCKS = 16


@dataclass(frozen=True)
class Slot:
    """One micro-batch of a step.

    Args:
        step: global step, from 0.
        planned: how many samples the plan has for it; 0 in a slot that the short last step leaves
            empty.
        samples: how many of them there are; less than planned where bad records were left out.
        batch: of those samples; if there are none, some batch of the right kind.
        digest: sha256 of ids and batch, if the loader makes one; "" if there are no samples.
    """

    step: int
    index: int
    planned: int
    samples: int
    batch: Batch
    digest: str = ""


class _Task(NamedTuple):
    """A micro-batch to be loaded."""

    step: int
    slot: int
    epoch: int
    rows: Rows  # without repeats


@dataclass(frozen=True)
class TrainLoader:
    """The slots of one worker, step after step, from any step on.

    Args:
        skip: bad records may be left out of batches.
        pin: page-locked batches, whose copy to a GPU runs beside other work.
        digests: make those of `Slot`.
    """

    data: Data
    plan: Plan
    shuffle: Shuffle
    window: int
    seed: int
    world_size: int
    rank: int
    threads: Threads
    skip: bool = False
    pin: bool = False
    digests: bool = False

    def steps(self, start: int, stop: int) -> Generator[list[Slot], None, None]:
        """Yields this worker's slots of global steps start..stop-1. Close it to end the threads."""
        slots = deal(self.plan.slots, self.world_size, self.rank)
        loaded = prefetched(
            self._tasks(start, stop, slots),
            self._load,
            _threads_for(self.data, self.threads),
            lambda slot: bytes_of(slot.batch),
        )
        try:
            for _ in range(start, stop):
                yield [next(loaded) for _ in slots]
        finally:
            loaded.close()
            _close(self.data)

    def any_batch(self, samples: int | None = None) -> Batch:
        """A micro-batch to warm up with; of the usual size unless told, or bad records shorten it.

        Raises:
            DataError: there is no good record among the first few thousand.
        """
        wanted = min(samples or self.plan.micro_batch, len(self._first_rows))
        for start in range(0, len(self._first_rows) - wanted + 1, wanted):
            batch = self._batch(0, self._first_rows[start : start + wanted], None)
            if samples_of(batch):
                return batch
        raise DataError(f"none of the first {len(self._first_rows)} records is any good.")

    @property
    def _first_rows(self) -> Rows:
        return np.arange(min(self.plan.rows, max(4096, self.plan.micro_batch)), dtype=np.int64)

    @cached_property
    def _filler(self) -> Batch:
        """One sample, for a slot without any: its pass counts for nothing."""
        return self.any_batch(1)

    def _tasks(self, start: int, stop: int, slots: range) -> Iterator[_Task]:
        """The micro-batches in their order; tells the source of each when it is handed out."""
        epoch, order = -1, None
        places = ((step, slot) for step in range(start, stop) for slot in slots)  # a lazy product
        for step, slot in places:
            now, step_of_epoch = divmod(step, self.plan.steps_per_epoch)
            if now != epoch or order is None:
                epoch, order = now, self._order(now, len(slots))
            rows = order.read(*self.plan.span(step_of_epoch, slot))
            self._tell_ahead(order, rows, step_of_epoch, slot)
            yield _Task(step, slot, epoch, rows)

    def _order(self, epoch: int, lanes: int) -> EpochOrder:
        blocks = self.data.source.blocks
        return EpochOrder(blocks, self.shuffle, self.seed, epoch, self.window, 2 * lanes + 2)

    def _tell_ahead(self, order: EpochOrder, rows: Rows, step: int, slot: int) -> None:
        """Tells the source what this lane reads next, and half a window of blocks later."""
        ahead = getattr(self.data.source, "ahead", None)
        if ahead is None:
            return
        ahead(rows)
        if self.shuffle != "none":
            later = self.window * self.plan.rows // (2 * len(self.data.source.blocks))
            end = self.plan.lane(slot)[1]
            start, stop = (min(place + later, end) for place in self.plan.span(step, slot))
            ahead(order.read(start, stop))

    def _load(self, task: _Task) -> Slot:
        failpoint("data.read", self.rank, task.step + 1)
        repeats = self.plan.repeats
        rows = np.repeat(task.rows, repeats)
        batch: Batch = {}
        if len(rows):
            each = np.tile(np.arange(repeats), len(task.rows))
            batch = self._batch(task.epoch, rows, each)
        samples = samples_of(batch)
        if samples < len(rows) and not self.skip:
            raise DataError(
                f"{len(rows) - samples} of {len(rows)} samples of a micro-batch were left out, and "
                "data.bad_records is error: collate must return all of them."
            )
        digest = _digest(rows, batch) if samples and self.digests else ""
        batch = batch if samples else self._filler
        if self.pin:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return Slot(task.step, task.slot, len(rows), samples, batch, digest)

    def _batch(self, epoch: int, rows: Rows, repeats: Rows | None) -> Batch:
        draws = Draws(self.seed, epoch, rows, repeats)
        return self.data.collate(self.data.source.read(rows), draws)


def eval_batches(
    data: Data, batch_size: int, chunks: Iterable[int], threads: Threads
) -> Generator[Batch, None, None]:
    """Rows [chunk * batch_size, (chunk + 1) * batch_size) of each chunk, in the stored order."""

    ahead = getattr(data.source, "ahead", None)

    def runs() -> Iterator[Rows]:
        for chunk in chunks:
            stop = min((chunk + 1) * batch_size, data.rows)
            rows = np.arange(chunk * batch_size, stop, dtype=np.int64)
            if ahead is not None:
                ahead(rows)
            yield rows

    def load(rows: Rows) -> Batch:
        return data.collate(data.source.read(rows), Draws(0, 0, rows))

    try:
        yield from prefetched(runs(), load, _threads_for(data, threads), bytes_of)
    finally:
        _close(data)


def samples_of(batch: Batch) -> int:
    """The first dimension of a batch's tensors; 0 without any."""
    return next((len(tensor) for tensor in batch.values()), 0)


def bytes_of(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.values())


def window_for(data: Data, asked: int | Literal["auto"]) -> int:
    """Blocks per window of the block shuffle.

    auto: as many as take 64 MiB of memory, 1 to 16 of them; a function of the data alone.
    """
    if asked != "auto":
        return asked
    sizes = getattr(data.source, "block_bytes", None)
    fitting = _MOST_BLOCKS if sizes is None else int(_WINDOW_BYTES / sizes.mean())
    return max(1, min(_MOST_BLOCKS, fitting))


def memory_note(loader: TrainLoader, limit_bytes: int) -> str | None:
    """What to do if the blocks that are in use at a time do not fit into `limit_bytes`, which
    has them read again and again; None if they fit, or stay where they are."""
    sizes = getattr(loader.data.source, "block_bytes", None)
    if sizes is None or loader.shuffle == "none":
        return None
    slots = len(deal(loader.plan.slots, loader.world_size, loader.rank))
    in_use = len(sizes) if loader.shuffle == "full" else min(len(sizes), slots * loader.window)
    needed = int(1.5 * sizes.mean() * in_use)  # and those that are read ahead
    if needed <= limit_bytes:
        return None
    remedy = "--data.shuffle block" if loader.shuffle == "full" else "lower --data.shuffle-window"
    return (
        f"{in_use} row groups are in use at a time, which takes {needed / 2**20:.0f} MiB, more "
        f"than data.memory_mib = {limit_bytes / 2**20:.0f}: they will be read several times. Raise "
        f"--data.memory-mib to {needed / 2**20:.0f}, or {remedy}."
    )


def _threads_for(data: Data, threads: Threads) -> Threads:
    """One, if the source can be read in its own order only."""
    in_order = getattr(data.source, "in_order", False)
    return replace(threads, most=min(1, threads.most), begin=None) if in_order else threads


def _close(data: Data) -> None:
    close = getattr(data.source, "close", None)
    if close is not None:
        close()


def _digest(rows: Rows, batch: Batch) -> str:
    digest = sha256(rows.tobytes())
    for name, tensor in sorted(batch.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def shuffle_for(data: Data, asked: str) -> Shuffle:
    """How an epoch of `data` is shuffled when the config asks for full, block or auto.

    It is a function of the data alone, never of the machine. A source says `in_order = True` if it
    can be read in its own order only, and `prefers_blocks = True` if reading a row means reading
    its block, and they do not all fit into memory.
    """
    if getattr(data.source, "in_order", False):
        return "none"
    if asked == "auto":
        return "block" if getattr(data.source, "prefers_blocks", False) else "full"
    return "block" if asked == "block" else "full"
