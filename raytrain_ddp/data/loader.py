"""Micro-batches in order, prepared ahead by threads.

Threads, not processes: decoding releases the GIL, a batch crosses no process border, and nothing is
forked inside a Ray worker (where that can deadlock). A whole micro-batch is one task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np

from raytrain_ddp.data.draws import Draws
from raytrain_ddp.data.plan import EpochOrder, Plan, deal
from raytrain_ddp.data.source import Batch, Data

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Slot:
    """One micro-batch of a step; `samples` is 0 for a slot left empty by the short last step."""

    step: int  # global step, from 0
    index: int
    samples: int
    batch: Batch


@dataclass(frozen=True)
class TrainLoader:
    """The slots of one worker, step after step, from any step on."""

    data: Data
    plan: Plan
    shuffle: Literal["full", "block"]
    window: int
    seed: int
    world_size: int
    rank: int
    threads: int
    prefetch: int
    pin: bool = False  # page-locked batches, whose copy to a GPU runs beside other work

    def steps(self, start: int, stop: int) -> Generator[list[Slot], None, None]:
        """Yields this worker's slots of global steps start..stop-1. Close it to end the threads."""
        slots = deal(self.plan.slots, self.world_size, self.rank)
        order = lru_cache(maxsize=2)(self._order)  # threads read ahead into the next epoch

        def load(place: tuple[int, int]) -> Slot:
            step, slot = place
            epoch, step_of_epoch = divmod(step, self.plan.steps_per_epoch)
            span = self.plan.span(step_of_epoch, slot)
            rows = order(epoch).read(*span)
            samples = len(rows)
            if not samples:  # a batch of the right shape for a pass that counts for nothing
                rows = order(epoch).read(0, 1)
            draws = Draws(self.seed, epoch, rows)
            batch = self.data.collate(self.data.source.read(rows), draws)
            if self.pin:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            return Slot(step, slot, samples, batch)

        places = ((step, slot) for step in range(start, stop) for slot in slots)
        loaded = prefetched(places, load, self.threads, self.prefetch)
        try:
            for _ in range(start, stop):
                yield [next(loaded) for _ in slots]
        finally:
            loaded.close()

    def any_batch(self, samples: int | None = None) -> Batch:
        """A micro-batch to warm up with; of the usual size unless told."""
        rows = np.arange(min(samples or self.plan.micro_batch, self.plan.rows), dtype=np.int64)
        return self.data.collate(self.data.source.read(rows), Draws(self.seed, 0, rows))

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.data.source.blocks, self.shuffle, self.seed, epoch, self.window)


def eval_batches(
    data: Data, batch_size: int, chunks: Iterable[int], threads: int
) -> Generator[Batch, None, None]:
    """Rows [chunk * batch_size, (chunk + 1) * batch_size) of each chunk, in the stored order."""

    def load(chunk: int) -> Batch:
        stop = min((chunk + 1) * batch_size, data.rows)
        rows = np.arange(chunk * batch_size, stop, dtype=np.int64)
        return data.collate(data.source.read(rows), Draws(0, 0, rows))

    yield from prefetched(chunks, load, threads, ahead=4)


def prefetched(
    items: Iterable[T], work: Callable[[T], R], threads: int, ahead: int
) -> Generator[R, None, None]:
    """Yields work(item) in order, `ahead` results per thread prepared; 0 threads: no thread."""
    if threads == 0:
        yield from map(work, items)
        return
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > threads * ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # an error, or the consumer stopped: the pool waits for running tasks only
            for future in pending:
                future.cancel()
