"""Loads micro-batches in advance and yields them in order. One task makes a whole micro-batch.

Uses threads if the source may be shared: decoding releases the GIL, and no batch crosses a process
boundary. In a Ray actor with two CPUs, they load 1.4 times as many images as two forkserver
processes (1.1 times next to a busy training loop), with half the memory and the first batch after
0.2 s instead of 2.8 s (benchmarks/results/data.md). Otherwise, it uses processes: see
loader_processes.py. What is made in this process then is made while nothing else draws random
numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from raytrain_ddp.data.loading.nested import bytes_of, digest_of, pinned
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order import (
    Draws,
    EpochOrder,
    Plan,
    Rows,
    Shuffle,
    global_state,
    items_of_rank,
)
from raytrain_ddp.errors import DataError, TaskError
from raytrain_ddp.failpoints import failpoint

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

_WINDOW_BYTES = 64 * 2**20
_MOST_BLOCKS = 16

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class LoaderThreads:
    """The number of threads or processes that work in advance, and their limits.

    Args:
        most: the maximum number; 0: none, the consumer does the work.
        ahead: maximum number of prepared results per thread or process.
        ahead_bytes: maximum size of all prepared results, except one per thread or process.
    """

    most: int
    ahead: int = 4
    ahead_bytes: int = 2**30


def prefetched(
    items: Iterable[T],
    work: Callable[[T], R],
    threads: LoaderThreads,
    size_bytes: Callable[[R], int] = lambda _: 1,
) -> Generator[R, None, None]:
    """Yields work(item) in order; an exception of `work` is raised in its position."""
    if threads.most == 0:
        yield from map(work, items)
        return
    pending: deque[Future[R]] = deque()
    room, largest = threads.most, 0  # results that may be prepared; bytes of one
    # None of them may start threads of torch for each image that it resizes.
    with ThreadPoolExecutor(threads.most, "loader", torch.set_num_threads, (1,)) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > room:
                    result = pending.popleft().result()
                    largest = max(largest, size_bytes(result))
                    fitting = threads.ahead_bytes // largest if largest else 0
                    room = max(threads.most, min(threads.most * threads.ahead, fitting))
                    yield result
            while pending:
                yield pending.popleft().result()
        finally:  # after an error, or if the consumer stopped: waits for running work
            for future in pending:
                future.cancel()


def _one_ahead(results: Iterator[R]) -> Generator[R, None, None]:
    """Yields the results; a thread takes the next one meanwhile."""
    with ThreadPoolExecutor(1, "loader") as pool:
        coming = pool.submit(next, results, None)
        while (result := coming.result()) is not None:
            coming = pool.submit(next, results, None)
            yield result


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


class _Task(NamedTuple):
    """A micro-batch to be loaded."""

    draws: Draws
    step: int = 0
    slot: int = 0


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
        tasks = self._tasks(start, stop, slots)
        in_processes = start_processes(self.data, self.threads) is not None
        if in_processes and (self.skip or self.plan.has_empty_slots):
            self._filler  # noqa: B018  # a thread must not make it
        loaded = _loaded(self.data, tasks, self._load, self.threads)
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
        start_processes(self.data, self.threads)
        return self._any(lambda draws: tried(self.data, draws), samples, epoch)

    def _any(self, make: Callable[[Draws], Batch], samples: int | None, epoch: int = 0) -> Batch:
        most = min(self.plan.rows, max(4096, self.plan.micro_batch))
        wanted = min(samples or self.plan.micro_batch, most)
        for start in range(0, most - wanted + 1, wanted):
            rows = np.arange(start, start + wanted, dtype=np.int64)
            draws = Draws(self.seed, epoch, rows)
            batch = make(draws)
            found = self.data.checked_samples(batch, wanted, self.skip)
            if found:
                return batch
        raise DataError(f"none of the first {most} records can be used.")

    @cached_property
    def _filler(self) -> Batch:
        """One sample, for a slot without samples: it gets weight 0."""
        return self._any(self.data.batch, 1)

    def _tasks(self, start: int, stop: int, slots: range) -> Iterator[_Task]:
        """The micro-batches in order; announces each one to the source when it is assigned."""
        epoch, order = -1, None
        places = ((step, slot) for step in range(start, stop) for slot in slots)  # lazily
        for step, slot in places:
            now, step_of_epoch = divmod(step, self.plan.steps_per_epoch)
            if now != epoch or order is None:
                epoch, order = now, self.order(now, 2 * len(slots) + 2)
            of_order, repeats = self.plan.samples_of(step_of_epoch, slot)
            self._tell_ahead(order, of_order, slot)
            draws = Draws(self.seed, epoch, order.at(of_order), repeats)
            yield _Task(draws, step, slot)

    def order(self, epoch: int, windows_kept: int = 64) -> EpochOrder:
        """The order of rows in an epoch."""
        blocks, epoch = self.data.source.blocks, 0 if self.same_order else epoch
        return EpochOrder(blocks, self.shuffle, self.seed, epoch, self.window, windows_kept)

    def _tell_ahead(self, order: EpochOrder, places: Rows, slot: int) -> None:
        """Announces to the source what this lane reads next, and half a window of blocks later."""
        if not self.data.shared:
            return  # copies of it read them
        ahead, places = self.data.source.ahead, np.unique(places)
        ahead(order.at(places))
        if self.shuffle != "none":
            later = self.window * self.plan.rows // (2 * len(self.data.source.blocks))
            ahead(order.at(places[places + later < self.plan.lane(slot)[1]] + later))

    def _load(self, task: _Task, batch: Batch) -> Slot:
        failpoint("data.read", self.rank, task.step + 1)
        planned = len(task.draws.rows)
        samples = self.data.checked_samples(batch, planned, self.skip) if planned else 0
        digest = digest_of(task.draws.rows.tobytes(), batch) if samples and self.digests else ""
        batch = batch if samples else self._filler
        batch = pinned(batch) if self.pin else batch
        return Slot(task.step, task.slot, planned, samples, batch, digest)


def tried(data: Data, draws: Draws) -> Batch:
    """Makes a batch before training, while nothing else draws random numbers.

    Raises:
        TaskError: the batch draws from global generators, which threads would share.
    """
    for _ in range(2):  # a library may draw once, such as before a retry
        before = global_state()
        batch = data.batch(draws)
        moved = [name for name, state in global_state().items() if state != before[name]]
        if not (data.shared and moved):
            if "processes" in vars(data):
                data.processes.measure(batch)
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

    def tasks() -> Iterator[_Task]:
        for chunk in chunks:
            stop = min((chunk + 1) * batch_size, data.rows)
            rows = np.arange(chunk * batch_size, stop, dtype=np.int64)
            if data.shared:
                data.source.ahead(rows)
            yield _Task(Draws(0, 0, rows))

    def load(_: _Task, batch: Batch) -> Batch:
        return pinned(batch) if pin else batch

    try:
        yield from _loaded(data, tasks(), load, threads)
    finally:
        data.source.close()


def start_processes(data: Data, threads: LoaderThreads) -> LoaderProcesses | None:
    """The loader processes, if any. Copies the data set for them before it is used in this process,
    which also starts the fork server earlier.

    Raises:
        TaskError: the data set cannot be copied.
    """
    return data.processes if threads.most and not data.shared else None


def _loaded(
    data: Data, tasks: Iterator[_Task], load: Callable[[_Task, Batch], R], threads: LoaderThreads
) -> Generator[R, None, None]:
    """Yields load(task, its batch) in order. Within another iteration in processes, all batches are
    made here."""
    if data.source.in_order:
        threads = replace(threads, most=min(1, threads.most))
    processes = start_processes(data, threads)

    def made(task: _Task) -> R:
        return load(task, data.batch(task.draws) if len(task.draws.rows) else {})

    if processes is None or processes.in_use:
        threads = threads if data.shared else LoaderThreads(0)
        yield from prefetched(tasks, made, threads, bytes_of)
        return
    sent: deque[_Task] = deque()

    def draws() -> Iterator[Draws]:
        for task in tasks:
            sent.append(task)
            yield task.draws

    processes.in_use = True
    try:
        for task in islice(tasks, 0 if processes.batch_bytes else 1):
            result = made(task)  # while the fork server loads torch
            processes.measure(result)
            yield result
        batches = processes.batches(draws(), threads)
        yield from _one_ahead(load(sent.popleft(), batch) for batch in batches)
    finally:
        processes.in_use = False


def window_for(data: Data, asked: int | Literal["auto"]) -> int:
    """The number of blocks in a window of the block shuffle.

    auto: as many as need 64 MiB of memory, at least 1 and at most 16; depends only on the data.
    """
    if asked != "auto":
        return asked
    sizes = data.source.block_bytes
    fitting = _MOST_BLOCKS if sizes is None else int(_WINDOW_BYTES / sizes.mean())
    return max(1, min(_MOST_BLOCKS, fitting))


def memory_note(loader: TrainLoader, limit_bytes: int) -> str | None:
    """A note if the blocks in use at the same time exceed `limit_bytes`, so that they will be read
    repeatedly; None if they fit or are memory-mapped."""
    sizes = loader.data.source.block_bytes
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
    if data.source.in_order:
        return "none"
    if asked == "auto":
        return "block" if data.source.prefers_blocks else "full"
    return "block" if asked == "block" else "full"
