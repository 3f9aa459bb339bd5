"""Loads micro-batches in advance and yields them in order. One task makes a whole micro-batch.

Uses threads if the source may be shared: decoding releases the GIL, and no batch crosses a process
boundary. In a Ray actor with two CPUs, they load 1.4 times as many images as two forkserver
processes (1.1 times next to a busy training loop), with half the memory and the first batch after
0.2 s instead of 2.8 s (benchmarks/results/data.md). Otherwise, it uses processes: see
loader_processes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from raytrain_ddp.data.loading.loader_threads import Gate, LoaderThreads, prefetched
from raytrain_ddp.data.loading.nested import bytes_of, digest_of, pinned
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan, Shuffle, items_of_rank
from raytrain_ddp.data.order.sample_rng import Draws, Rows, global_state, kept_globals
from raytrain_ddp.errors import DataError, TaskError
from raytrain_ddp.failpoints import failpoint

_WINDOW_BYTES = 64 * 2**20
_MOST_BLOCKS = 16


@dataclass(frozen=True)
class Slot:
    """One micro-batch of a step.

    Args:
        step: global step, from 0.
        planned: how many samples the plan assigns to it; 0 in a slot that is empty in the short
            last step.
        samples: how many samples it has; fewer than planned if bad records were skipped.
        batch: of those samples; if there are none, any batch of the same structure.
        digest: sha256 of ids and batch, if the loader computes it; "" if there are no samples.
    """

    step: int
    index: int
    planned: int
    samples: int
    batch: Batch
    digest: str = ""


Pending = Callable[[], Batch]


class _Task(NamedTuple):
    """A micro-batch to be loaded."""

    step: int
    slot: int
    rows: Rows
    batch: Pending | None  # None: there are no rows


@dataclass(frozen=True)
class TrainLoader:
    """The slots of one worker, step by step, starting at any step.

    Args:
        skip: bad records may be skipped.
        pin: page-locks batches, so that copies to a GPU run concurrently with other work.
        digests: computes the digest of each `Slot`.
        same_order: each epoch has the order of the first one.
    """

    data: Data
    plan: Plan
    shuffle: Shuffle
    window: int
    seed: int
    world_size: int
    rank: int
    threads: LoaderThreads
    skip: bool = False
    pin: bool = False
    digests: bool = False
    same_order: bool = False

    def steps(self, start: int, stop: int) -> Generator[list[Slot], None, None]:
        """Yields this worker's slots of global steps start..stop-1. Close the iterator to end the
        threads or processes."""
        slots = items_of_rank(self.plan.slots, self.world_size, self.rank)
        threads, gate = _workers_for(self.data, self.threads)
        loaded = prefetched(
            self._tasks(start, stop, slots, gate),
            self._load,
            threads,
            lambda slot: bytes_of(slot.batch),
            gate,
        )
        try:
            for _ in range(start, stop):
                yield [next(loaded) for _ in slots]
        finally:
            loaded.close()
            self.data.close()

    def any_batch(self, samples: int | None = None, epoch: int = 0) -> Batch:
        """A micro-batch for the warm-up, of the usual size unless given or shortened by bad
        records.

        Args:
            epoch: as whose it is augmented.

        Raises:
            DataError: there is no readable record among the first few thousand.
            TaskError: see `tried`.
        """
        return self._any(tried, samples, epoch)

    def _any(self, make: Callable[..., Batch], samples: int | None, epoch: int = 0) -> Batch:
        wanted = min(samples or self.plan.micro_batch, len(self._first_rows))
        for start in range(0, len(self._first_rows) - wanted + 1, wanted):
            draws = Draws(self.seed, epoch, self._first_rows[start : start + wanted])
            batch = make(self.data, draws, _workers_for(self.data, self.threads)[1])
            found = self.data.checked_samples(batch, wanted, self.skip)
            if found:
                return batch
        raise DataError(f"none of the first {len(self._first_rows)} records can be used.")

    @property
    def _first_rows(self) -> Rows:
        return np.arange(min(self.plan.rows, max(4096, self.plan.micro_batch)), dtype=np.int64)

    @cached_property
    def _filler(self) -> Batch:
        """One sample, for a slot without samples: it gets weight 0."""
        return self._any(lambda *of: _begun(*of)(), 1)

    def _tasks(self, start: int, stop: int, slots: range, gate: Gate | None) -> Iterator[_Task]:
        """The micro-batches in order; announces each one to the source when it is assigned, or
        submits it to a process."""
        epoch, order = -1, None
        places = ((step, slot) for step in range(start, stop) for slot in slots)  # lazily
        for step, slot in places:
            now, step_of_epoch = divmod(step, self.plan.steps_per_epoch)
            if now != epoch or order is None:
                epoch, order = now, self.order(now, 2 * len(slots) + 2)
            of_order, repeats = self.plan.samples_of(step_of_epoch, slot)
            self._tell_ahead(order, of_order, slot)
            draws = Draws(self.seed, epoch, order.at(of_order), repeats)
            begun = _begun(self.data, draws, gate) if len(draws.rows) else None
            yield _Task(step, slot, draws.rows, begun)

    def order(self, epoch: int, windows_kept: int = 64) -> EpochOrder:
        """The order of rows in an epoch."""
        blocks, epoch = self.data.source.blocks, 0 if self.same_order else epoch
        return EpochOrder(blocks, self.shuffle, self.seed, epoch, self.window, windows_kept)

    def _tell_ahead(self, order: EpochOrder, places: Rows, slot: int) -> None:
        """Announces to the source what this lane reads next, and half a window of blocks later."""
        ahead = _ahead_of(self.data)
        if ahead is None:
            return
        places = np.unique(places)
        ahead(order.at(places))
        if self.shuffle != "none":
            later = self.window * self.plan.rows // (2 * len(self.data.source.blocks))
            ahead(order.at(places[places + later < self.plan.lane(slot)[1]] + later))

    def _load(self, task: _Task) -> Slot:
        failpoint("data.read", self.rank, task.step + 1)
        batch: Batch = {} if task.batch is None else task.batch()
        planned = len(task.rows)
        samples = self.data.checked_samples(batch, planned, self.skip) if planned else 0
        digest = digest_of(task.rows.tobytes(), batch) if samples and self.digests else ""
        batch = batch if samples else self._filler
        batch = pinned(batch) if self.pin else batch
        return Slot(task.step, task.slot, planned, samples, batch, digest)


def tried(data: Data, draws: Draws, gate: Gate | None = None) -> Batch:
    """Makes a batch before training, while nothing else draws random numbers.

    Raises:
        TaskError: the batch draws from global generators, which threads would share.
    """
    for _ in range(2):  # a library may draw once, such as before a retry
        before = global_state()
        batch = _begun(data, draws, gate)()
        moved = [name for name, state in global_state().items() if state != before[name]]
        if not (data.shared and moved):
            return batch
    kind = type(data.source).__name__
    remedy = (
        f"remove shared=True from {kind}"
        if hasattr(data.source, "dataset")
        else (f"set shared = False in {kind}")
    )
    raise TaskError(
        f"reading {kind} and collating draw random numbers from the global generator of "
        f"{' and '.join(moved)}, which the loader's threads share with dropout, so runs would not "
        f"be repeatable: {remedy}, or take them from the draws of collate(records, draws)."
    )


def eval_batches(
    data: Data, batch_size: int, chunks: Iterable[int], threads: LoaderThreads, pin: bool = False
) -> Generator[Batch, None, None]:
    """Yields rows [chunk * batch_size, (chunk + 1) * batch_size) for each chunk, in stored order.

    Loader processes are kept for the next evaluation, until `data.close()`.

    Args:
        pin: see TrainLoader.
    """
    ahead = _ahead_of(data)
    threads, gate = _workers_for(data, threads)

    def begun() -> Iterator[Pending]:
        for chunk in chunks:
            stop = min((chunk + 1) * batch_size, data.rows)
            rows = np.arange(chunk * batch_size, stop, dtype=np.int64)
            if ahead is not None:
                ahead(rows)
            yield _begun(data, Draws(0, 0, rows), gate)

    def load(batch: Pending) -> Batch:
        return pinned(batch()) if pin else batch()

    try:
        yield from prefetched(begun(), load, threads, bytes_of, gate)
    finally:
        data.rest()


def start_processes(data: Data, threads: LoaderThreads) -> None:
    """Copies the data set for the loader processes, if any, before it is used in this process,
    which also starts them earlier.

    Raises:
        TaskError: the data set cannot be copied.
    """
    if _workers_for(data, threads)[1] is not None:
        data.processes()


def _workers_for(data: Data, threads: LoaderThreads) -> tuple[LoaderThreads, Gate | None]:
    """How many threads or processes work, and their gate if they are processes. One, if the source
    can only be read in order."""
    if getattr(data.source, "in_order", False):
        threads = replace(threads, most=min(1, threads.most), begin=None)
    in_processes = threads.most > 0 and not data.shared
    return threads, Gate(threads) if in_processes else None


def _begun(data: Data, draws: Draws, gate: Gate | None) -> Pending:
    """The pending batch, or a function that makes it in the calling thread."""
    if gate is not None:
        return data.processes().submit(draws, gate.active).result
    return partial(data.batch if data.shared else partial(_made_here, data), draws)


def _made_here(data: Data, draws: Draws) -> Batch:
    """Runs as in a loader process: with one thread, and temporarily with the data's own
    generators."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept_globals():
            return data.batch(draws)
    finally:
        torch.set_num_threads(threads)


def _ahead_of(data: Data) -> Callable[[Rows], None] | None:
    """The source's method for announcing rows to read; None if it has none, or if copies of it read
    them."""
    ahead: Callable[[Rows], None] | None = getattr(data.source, "ahead", None)
    return ahead if data.shared else None


def window_for(data: Data, asked: int | Literal["auto"]) -> int:
    """The number of blocks in a window of the block shuffle.

    auto: as many as need 64 MiB of memory, at least 1 and at most 16; depends only on the data.
    """
    if asked != "auto":
        return asked
    sizes = getattr(data.source, "block_bytes", None)
    fitting = _MOST_BLOCKS if sizes is None else int(_WINDOW_BYTES / sizes.mean())
    return max(1, min(_MOST_BLOCKS, fitting))


def memory_note(loader: TrainLoader, limit_bytes: int) -> str | None:
    """A note if the blocks in use at the same time exceed `limit_bytes`, so that they will be read
    repeatedly; None if they fit or are memory-mapped."""
    sizes = getattr(loader.data.source, "block_bytes", None)
    if sizes is None or loader.shuffle == "none":
        return None
    slots = len(items_of_rank(loader.plan.slots, loader.world_size, loader.rank))
    in_use = len(sizes) if loader.shuffle == "full" else min(len(sizes), slots * loader.window)
    needed = int(1.5 * sizes.mean() * in_use)  # including read-ahead
    if needed <= limit_bytes:
        return None
    remedy = "--data.shuffle block" if loader.shuffle == "full" else "lower --data.shuffle-window"
    return (
        f"{in_use} row groups are in use at a time, which need {needed / 2**20:.0f} MiB, more "
        f"than data.memory_mib = {limit_bytes / 2**20:.0f}: they will be read several times. Raise "
        f"--data.memory-mib to {needed / 2**20:.0f}, or {remedy}."
    )


def shuffle_for(data: Data, asked: str) -> Shuffle:
    """How an epoch of `data` is shuffled when the config asks for full, block or auto.

    It depends only on the data, never on the machine. A source has `in_order = True` if it
    can only be read in order, and `prefers_blocks = True` if reading a row requires reading
    its block, and they do not all fit into memory.
    """
    if getattr(data.source, "in_order", False):
        return "none"
    if asked == "auto":
        return "block" if getattr(data.source, "prefers_blocks", False) else "full"
    return "block" if asked == "block" else "full"
