"""Micro-batches in order, prepared ahead by threads.

Threads, not processes: decoding releases the GIL, a batch crosses no process border, and nothing is
forked inside a Ray worker (where that can deadlock). A whole micro-batch is one task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

import numpy as np

from raytrain_ddp.data.draws import Draws, Rows
from raytrain_ddp.data.plan import EpochOrder, Plan, Shuffle, deal
from raytrain_ddp.data.source import Batch, Data
from raytrain_ddp.data.threads import Threads, prefetched
from raytrain_ddp.errors import DataError


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


@dataclass(frozen=True)
class TrainLoader:
    """The slots of one worker, step after step, from any step on.

    Args:
        plan: of all samples of an epoch: the rows, `repeats` times.
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
    repeats: int = 1
    pin: bool = False
    digests: bool = False

    def steps(self, start: int, stop: int) -> Generator[list[Slot], None, None]:
        """Yields this worker's slots of global steps start..stop-1. Close it to end the threads."""
        slots = deal(self.plan.slots, self.world_size, self.rank)
        order = lru_cache(maxsize=2)(self._order)  # threads read ahead into the next epoch

        def load(place: tuple[int, int]) -> Slot:
            step, slot = place
            epoch, step_of_epoch = divmod(step, self.plan.steps_per_epoch)
            span = self.plan.span(step_of_epoch, slot)
            rows, repeats = self._rows(order(epoch), *span)
            self._tell_ahead(order(epoch), rows, *span)
            batch = self._batch(epoch, rows, repeats) if len(rows) else {}
            samples = samples_of(batch)
            digest = _digest(rows, repeats, batch) if samples and self.digests else ""
            batch = batch if samples else self._filler
            if self.pin:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            return Slot(step, slot, len(rows), samples, batch, digest)

        places = ((step, slot) for step in range(start, stop) for slot in slots)
        loaded = prefetched(places, load, self.threads, lambda slot: bytes_of(slot.batch))
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
        return np.arange(min(self.data.rows, max(4096, self.plan.micro_batch)), dtype=np.int64)

    @cached_property
    def _filler(self) -> Batch:
        """One sample, for a slot without any: its pass counts for nothing."""
        return self.any_batch(1)

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.data.source.blocks, self.shuffle, self.seed, epoch, self.window)

    def _tell_ahead(self, order: EpochOrder, rows: Rows, start: int, stop: int) -> None:
        """Tells the source what this lane reads now, and half a window of blocks later."""
        ahead = getattr(self.data.source, "ahead", None)
        if ahead is not None:
            later = self.window * self.data.rows // (2 * len(self.data.source.blocks))
            places = (place // self.repeats + later for place in (start, stop))
            ahead(rows)
            ahead(order.read(*(min(place, self.data.rows) for place in places)))

    def _rows(self, order: EpochOrder, start: int, stop: int) -> tuple[Rows, Rows]:
        """Rows at places [start, stop) of the epoch's samples, and which repeat each is."""
        places = np.arange(start, stop)
        first = start // self.repeats
        rows = order.read(first, -(-stop // self.repeats))
        return rows[places // self.repeats - first], places % self.repeats

    def _batch(self, epoch: int, rows: Rows, repeats: Rows | None) -> Batch:
        draws = Draws(self.seed, epoch, rows, repeats)
        return self.data.collate(self.data.source.read(rows), draws)


def eval_batches(
    data: Data, batch_size: int, chunks: Iterable[int], threads: Threads
) -> Generator[Batch, None, None]:
    """Rows [chunk * batch_size, (chunk + 1) * batch_size) of each chunk, in the stored order."""

    def load(chunk: int) -> Batch:
        stop = min((chunk + 1) * batch_size, data.rows)
        rows = np.arange(chunk * batch_size, stop, dtype=np.int64)
        return data.collate(data.source.read(rows), Draws(0, 0, rows))

    try:
        yield from prefetched(chunks, load, threads, bytes_of)
    finally:
        _close(data)


def samples_of(batch: Batch) -> int:
    """The first dimension of a batch's tensors; 0 without any."""
    return next((len(tensor) for tensor in batch.values()), 0)


def bytes_of(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.values())


def memory_note(loader: TrainLoader, limit_bytes: int) -> str | None:
    """What to do if the blocks that are in use at a time do not fit into `limit_bytes`, which
    has them read again and again; None if they fit, or stay where they are."""
    sizes = getattr(loader.data.source, "block_bytes", None)
    if sizes is None or loader.shuffle == "none":
        return None
    slots = len(deal(loader.plan.slots, loader.world_size, loader.rank))
    in_use = len(sizes) if loader.shuffle == "full" else min(len(sizes), slots * loader.window)
    needed = int(sizes.mean() * in_use)
    if needed <= limit_bytes:
        return None
    remedy = "--data.shuffle block" if loader.shuffle == "full" else "lower --data.shuffle-window"
    return (
        f"{in_use} row groups are in use at a time, {needed / 2**20:.0f} MiB, more than the "
        f"{limit_bytes / 2**20:.0f} MiB of data.memory_mib: they will be read several times. Raise "
        f"--data.memory-mib to {needed / 2**20 * 2:.0f}, or {remedy}."
    )


def _close(data: Data) -> None:
    close = getattr(data.source, "close", None)
    if close is not None:
        close()


def _digest(rows: Rows, repeats: Rows, batch: Batch) -> str:
    digest = sha256(rows.tobytes() + repeats.tobytes())
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
