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
from raytrain_ddp.training.monitoring.phase_clock import AGREEING, Clock
from raytrain_ddp.training.monitoring.profiler import Profile
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.state.train_state import TrainState


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


class AgreedCount:
    """Counts a step's samples over all workers when bad records are skipped; all ranks take part.

    Args:
        most: maximum bad records in an epoch; more raise DataError, on all ranks in the same step.
        clock: time spent here waiting for others' data is accounted as such.
    """

    def __init__(
        self, state: TrainState, steps_per_epoch: int, most: int, world: World, clock: Clock
    ) -> None:
        self._state, self._steps_per_epoch = state, steps_per_epoch
        self._most, self._world, self._clock = most, world, clock

    def __call__(self, slots: list[Slot]) -> int:
        totals = torch.tensor(
            [sum(slot.samples for slot in slots), sum(slot.planned for slot in slots)]
        )
        if self._world.size > 1:
            self._clock.mark("data")
            self._clock.doing = AGREEING
            dist.all_reduce(totals)
            self._clock.mark("communication")
        samples, planned = totals.tolist()
        step = slots[0].step
        self._state.skipped_before, self._state.counted_step = self._state.skipped, step + 1
        if step % self._steps_per_epoch == 0:
            self._state.skipped = 0
        self._state.skipped += planned - samples
        require_few_bad(self._state.skipped, f"by step {step + 1} in its epoch", self._most)
        return int(samples)


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
        self._loader, self._eval_data, self._log = build.loader, build.eval_data, log
        config, self._world, self._plan = build.config, build.world, build.plan
        self._audits = config.log.audit
        self._move, self._count = on_device(self._world.device, clock), self._planned
        if config.data.may_skip:
            most, per_epoch = config.data.max_bad, self._plan.steps_per_epoch
            self._count = AgreedCount(build.state, per_epoch, most, self._world, clock)
        self._profile = Profile(config.log, self._world, run_storage(config), clock, log.tell)

    def steps(self, start: int, stop: int) -> Generator[tuple[list[Slot], int], None, None]:
        """Yields (this worker's slots, samples of all workers' slots) of steps start..stop-1.

        All ranks take part in each step. Close it to end the loader's threads and processes.
        """
        with closing(self._loader.steps(start, stop)) as steps, self._profile as profile:
            try:
                for slots in steps:
                    profile.begin_step(slots[0].step + 1)
                    if self._audits:
                        self._audit(slots)
                    yield self._move(slots), self._count(slots)
            finally:
                if self._eval_data is not None:
                    self._eval_data.close()

    def _planned(self, slots: list[Slot]) -> int:
        return self._plan.samples(slots[0].step % self._plan.steps_per_epoch)

    def _audit(self, slots: list[Slot]) -> None:
        """Logs a hash of the step's sample ids and pixels, equal for any number of workers and
        threads and after any restart. All ranks take part."""
        mine = [slot.digest for slot in slots]
        digests = chain.from_iterable(from_all_ranks(mine, self._world))
        digest = sha256("".join(digests).encode()).hexdigest()
        self._log.add(events.Audit(slots[0].step + 1, digest))
