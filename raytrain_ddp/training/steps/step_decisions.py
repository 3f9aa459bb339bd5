"""Decides what follows a step: actions that are due, requests on which the ranks vote while the
step computes, and an early end of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.config.sections import StopConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Eval, LogRecord
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.membership import Membership, Requests


def is_due(number: int, every: int) -> bool:
    """Whether something happens after this one of the steps or epochs; `every` 0: never."""
    return every > 0 and number % every == 0


class Cadence:
    """Decides by the number of steps done; for saving by time, see checkpoint_interval.py.

    Attributes:
        total_steps: after which the run ends. It is lowered when the run is to end early.
    """

    def __init__(self, config: TrainConfig, steps_per_epoch: int) -> None:
        self.total_steps = config.total_steps(steps_per_epoch)
        self._epoch = steps_per_epoch
        self._config = config

    def logs(self, step: int) -> bool:
        """Every `log.every_steps` steps, at the end of each epoch, and after the first step."""
        return step == 1 or self._is_due(step, 1, self._config.log.every_steps)

    def evaluates(self, step: int) -> bool:
        when = self._config.eval
        return self.is_over(step) or self._is_due(step, when.every_epochs, when.every_steps)

    def saves(self, step: int) -> bool:
        when = self._config.checkpoint
        return step == self.total_steps or self._is_due(step, when.every_epochs, when.every_steps)

    def is_over(self, step: int) -> bool:
        return step >= self.total_steps

    def _is_due(self, step: int, every_epochs: int, every_steps: int) -> bool:
        every = (every_epochs * self._epoch, every_steps)
        return any(is_due(step, n) for n in every)


class Patience:
    """Counts evaluations without improvement. A restart replays the log, so it counts the same.

    Args:
        goal: "min" or "max", for the metric `monitor`.
    """

    def __init__(self, config: StopConfig, monitor: str, goal: str) -> None:
        self._config, self._monitor = config, monitor
        self._sign = 1 if goal == "max" else -1
        self._best = -math.inf
        self.count = 0

    def replay(self, log: Iterable[LogRecord]) -> bool:
        """Counts the evaluations in a log; returns whether the run is to end after the last one."""
        ends = [self.see(record.metrics) for record in log if isinstance(record, Eval)]
        return bool(ends) and ends[-1]

    def see(self, metrics: Mapping[str, float]) -> bool:
        """Counts an evaluation; returns whether the run is to end after it."""
        value = self._sign * metrics.get(self._monitor, math.nan)
        if value > self._best + self._config.min_delta:
            self._best, self.count = value, 0
        else:
            self.count += 1
        return 0 < self._config.patience <= self.count


class Ballot:
    """Lets all ranks agree on what follows a step, without a barrier.

    The largest vote wins. It is computed during the step, in a collective on the CPU; every
    rank casts and counts once per step. Where only rank 0 has wishes, its vote is broadcast: in
    log2(ranks) hops, where an all-reduce of gloo's takes 2 * (ranks - 1).
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._work: Any = None

    def cast(self, requests: Requests, end: bool = False) -> None:
        self._votes = torch.tensor([*requests, end], dtype=torch.int32)
        if self._membership.world.size == 1:
            return
        if self._membership.only_main_asks:
            self._work = dist.broadcast(self._votes, 0, async_op=True)
        else:
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, async_op=True)

    def count(self) -> tuple[int, bool, bool]:
        """(signal number of a requested stop or 0, whether to save, to end the run). If any rank
        wants to look, all do."""
        if self._work is not None:
            self._work.wait()
        stop, save, look, end = self._votes.tolist()
        if look:
            self._membership.look()
        return stop, bool(save), bool(end)


class Decision(NamedTuple):
    """The actions after a step. `stop` is the number of a signal, or 0."""

    log: bool
    evaluate: bool
    save: bool
    stop: int


class Abandoned(Exception):
    """An evaluation was interrupted, on all ranks, because the run is stopping."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


class EvaluationWatch:
    """Checks before each chunk of an evaluation whether the run must stop; all ranks take part.

    The ranks agree while a chunk computes, and act before the next one. Each has `least` chunks
    or one more, so the last votes are cast before the last chunk that all of them have.
    """

    def __init__(self, membership: Membership, chunks: int) -> None:
        self._membership, self._ballot = membership, Ballot(membership)
        self._least = chunks // membership.world.size
        self._chunk = 0

    def __call__(self) -> None:
        """Raises Abandoned if the run must stop."""
        chunk, self._chunk = self._chunk, self._chunk + 1
        if 0 < chunk < self._least:
            stop, _, _ = self._ballot.count()
            if stop:
                raise Abandoned(stop)
        if chunk < self._least - 1:
            self._ballot.cast(self._membership.requests(None)._replace(save=False))


class StepDecisions:
    """Combines what is due by the number of steps, by time, and by requests of the ranks.

    Each rank asks before the compute of a step and decides after it.

    Args:
        time_is_up: whether the run is to end by `max_time`.
    """

    def __init__(
        self,
        cadence: Cadence,
        membership: Membership,
        checkpoints: Checkpoints,
        time_is_up: Callable[[], bool],
    ) -> None:
        self._cadence, self._time_is_up = cadence, time_is_up
        self._membership, self._checkpoints = membership, checkpoints
        self._ballot = Ballot(membership)

    def ask(self, step: int) -> None:
        """Casts this rank's votes on what follows `step`; all ranks take part."""
        # A new process group needs the storage.
        requests = self._membership.requests(step, not self._checkpoints.fails)
        is_time = self._checkpoints.time_to_save()
        self._ballot.cast(requests._replace(save=requests.save or is_time), self._time_is_up())
        failpoint("train.before_step", self._membership.world.rank, step)

    def decide(self, step: int) -> Decision:
        """Decides what follows `step`, which is computed; all ranks take part and get the same."""
        failpoint("train.after_step", self._membership.world.rank, step)
        stop, save, end = self._ballot.count()
        due = self._cadence
        if end:
            due.total_steps = min(step, due.total_steps)
        return Decision(
            log=due.logs(step),
            # A run that is stopping does not wait for an evaluation: it is repeated on resume.
            evaluate=due.evaluates(step) and not stop,
            save=save or stop > 0 or due.saves(step),
            stop=stop,
        )
