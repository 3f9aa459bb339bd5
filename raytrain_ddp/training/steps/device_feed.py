"""Feeds each step: this worker's slots on its device, and the sample count of all workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from itertools import chain

import torch
import torch.distributed as dist

from raytrain_ddp import events
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.data.loading.nested import tensors_of, to_device
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import DataError
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.monitoring.step_timing import AGREEING, Clock, Profile
from raytrain_ddp.training.runtime.world import from_all_ranks


def on_device(device: torch.device, clock: Clock) -> Callable[[list[Slot]], list[Slot]]:
    """On a GPU, copies run on a stream of their own, concurrently with the previous step."""
    if device.type != "cuda":
        return lambda slots: slots
    beside = torch.cuda.Stream(device)

    def move(slots: list[Slot]) -> list[Slot]:
        with torch.cuda.stream(beside):
            moved = [replace(slot, batch=to_device(slot.batch, device)) for slot in slots]
        training = torch.cuda.current_stream(device)
        clock.mark("data")
        training.wait_stream(beside)
        clock.mark("copy")
        for tensor in chain.from_iterable(tensors_of(slot.batch) for slot in moved):
            tensor.record_stream(training)
        return moved

    return move


def ahead_on_device(
    batches: Iterable[Batch], device: torch.device
) -> Generator[tuple[Batch, Batch], None, None]:
    """Yields each batch, and its copy on the device. On a GPU the next one is copied, on a stream
    of its own, while this one is computed on; the batches must be in page-locked memory."""
    if device.type != "cuda":
        for batch in batches:
            yield batch, to_device(batch, device)
        return
    beside = torch.cuda.Stream(device)

    def begun(batch: Batch) -> tuple[Batch, Batch, torch.cuda.Event]:
        with torch.cuda.stream(beside):
            return batch, to_device(batch, device), beside.record_event()

    def arrived(batch: Batch, moved: Batch, done: torch.cuda.Event) -> tuple[Batch, Batch]:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(done)
        for tensor in tensors_of(moved):
            tensor.record_stream(computing)
        return batch, moved

    waiting = None
    for batch in batches:
        waiting, now = begun(batch), waiting
        if now is not None:
            yield arrived(*now)
    if waiting is not None:
        yield arrived(*waiting)


def require_few_bad(skipped: int, where: str, most: int) -> None:
    """Raises DataError if more than `most` records were skipped."""
    if skipped > most:
        raise DataError(
            f"{skipped} bad records {where}, more than data.max_bad = {most}. The workers' logs "
            "name them."
        )


class Feed:
    """Turns the loader's steps into slots on the device, with their global sample count."""

    def __init__(self, build: Build, log: Log, clock: Clock) -> None:
        self._build, self._log, self._clock = build, log, clock
        config, world = build.config, build.world
        self._move = on_device(world.device, clock)
        self._count = self._agreed if config.data.may_skip else self._planned
        self._profile = Profile(config.log, world, run_storage(config), clock, log.tell)

    def steps(self, start: int, stop: int) -> Generator[tuple[list[Slot], int], None, None]:
        """Yields (this worker's slots, samples of all workers' slots) of steps start..stop-1.

        All ranks take part in each step. Close it to end the loader's threads and processes.
        """
        build = self._build
        with closing(build.loader.steps(start, stop)) as steps, self._profile as profile:
            try:
                for slots in steps:
                    profile.begin_step(slots[0].step + 1)
                    if build.config.log.audit:
                        self._audit(slots)
                    yield self._move(slots), self._count(slots)
            finally:
                if build.eval_data is not None:
                    build.eval_data.close()

    def _planned(self, slots: list[Slot]) -> int:
        plan = self._build.plan
        return plan.samples(slots[0].step % plan.steps_per_epoch)

    def _agreed(self, slots: list[Slot]) -> int:
        """The number of samples left in the step on all workers when bad records are skipped; all
        ranks take part. Raises DataError on all ranks in the same step if an epoch has more than
        `data.max_bad` bad records."""
        build, state, step = self._build, self._build.state, slots[0].step
        totals = torch.tensor([sum(s.samples for s in slots), sum(s.planned for s in slots)])
        if build.world.size > 1:
            self._clock.mark("data")
            self._clock.doing = AGREEING
            dist.all_reduce(totals)
            self._clock.mark("communication")
        samples, planned = totals.tolist()
        state.skipped_before, state.counted_step = state.skipped, step + 1
        if step % build.plan.steps_per_epoch == 0:
            state.skipped = 0
        state.skipped += planned - samples
        where = f"by step {step + 1} in its epoch"
        require_few_bad(state.skipped, where, build.config.data.max_bad)
        return int(samples)

    def _audit(self, slots: list[Slot]) -> None:
        """Logs a hash of the step's sample ids and pixels, equal for any number of workers and
        threads and after any restart. All ranks take part."""
        mine = [slot.digest for slot in slots]
        digests = chain.from_iterable(from_all_ranks(mine, self._build.world))
        digest = sha256("".join(digests).encode()).hexdigest()
        self._log.add(events.Audit(slots[0].step + 1, digest))
