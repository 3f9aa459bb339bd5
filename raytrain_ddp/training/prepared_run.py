"""A prepared run: its parts, and the actions that may follow a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raytrain_ddp import events, messages
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.config.recipe import publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.data.order.epoch_order import Plan
from raytrain_ddp.errors import DivergedError, first_names
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.tasks.model_parts import nonfinite
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.metrics.evaluation import chunks_of, evaluation_of
from raytrain_ddp.training.monitoring import step_timing
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.step_timing import Stragglers
from raytrain_ddp.training.optimizer.lr_schedule import LearningRates
from raytrain_ddp.training.run_identity import RunIdentity
from raytrain_ddp.training.session import Session, Snapshot
from raytrain_ddp.training.state.live_state import OWED_FILE, LiveCheckpoint
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.device_feed import Feed
from raytrain_ddp.training.steps.early_stop import Patience
from raytrain_ddp.training.steps.nonfinite import REMEDY
from raytrain_ddp.training.steps.step import Stepper
from raytrain_ddp.training.steps.step_decisions import Abandoned, Cadence, EvaluationWatch


@dataclass
class PreparedRun:
    """The parts of a prepared run, and the actions that may follow a step."""

    config: TrainConfig
    task: Task
    session: Session
    state: TrainState
    plan: Plan
    rates: LearningRates
    cadence: Cadence
    patience: Patience
    trained_s: float  # before this start
    feed: Feed
    stepper: Stepper
    eval_data: Data | None
    identity: RunIdentity
    logged_step: int
    clock: Clock
    stragglers: Stragglers
    flops: float  # of a sample, forward and backward
    peak_flops_per_s: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the evaluation after this step
    live: LiveCheckpoint | None = None  # that this start went on from
    unlogged_s: float = 0.0  # training time since the last log record, as far as it was measured

    def log(self, shares: Tensor, rate: float) -> None:
        """Logs the step's loss, scalars, and speed since the last record; all ranks take part.

        The one place where the host waits for the device.
        """
        step, world = self.state.step, self.session.world
        failpoint("train.log", world.rank, step)
        self.stepper.settle()  # so that `nonfinite` includes this step
        trained_s, phases = self.clock.window()
        self.unlogged_s += trained_s
        trained_s = self.unlogged_s
        memory = step_timing.peak_memory_bytes(world.device)
        in_order = step_timing.in_order(phases)
        mine = step_timing.Reading(trained_s, in_order, memory)
        readings = step_timing.gathered(mine, world)
        losses, *scalars = zip(*shares.tolist(), strict=True)
        per_epoch = self.plan.steps_per_epoch
        samples = sum(self.plan.samples(s % per_epoch) for s in range(self.logged_step, step))
        samples_per_s = samples / trained_s
        flops_per_s = self.flops * samples_per_s / world.size
        steps, peak = step - self.logged_step, self.peak_flops_per_s
        timing = step_timing.summary(readings, steps, flops_per_s, peak, world.of_run)
        self.session.log(
            events.Train(
                step=step,
                epoch=(step - 1) // per_epoch,
                loss=math.fsum(losses),
                lr=rate,
                samples_per_s=samples_per_s,
                skipped=self.state.skipped,
                nonfinite=self.state.nonfinite,
                seconds=self.clock.elapsed(),
                seconds_total=self.trained_s + self.clock.elapsed(),
                timing=timing,
                scalars=dict(zip(self.stepper.scalar_names, map(sum, scalars), strict=True)),
            )
        )
        if world.is_main:
            self.state.reserve()
        # Not logged: the log would grow with the number of workers.
        if world.is_main and 1 < world.size <= events.Ranks.MOST:
            split_s = step_timing.by_rank(readings, steps, world.of_run)
            self.session.tell(events.Ranks(step, split_s))
        straggler = self.stragglers.look(step, timing.slowest, self.session.hosts)
        if straggler is not None:
            self.session.tell(straggler)
        self.logged_step, self.unlogged_s = step, 0.0

    def evaluate(self) -> tuple[bool, int]:
        """Evaluates the current model; all ranks take part.

        Returns:
            Whether it is the best so far, and the number of the signal that interrupted the
            evaluation, else 0. An interrupted evaluation is repeated when the run resumes.
        """
        data, step = self.eval_data, self.state.step
        if data is None:
            return False, 0
        chunks = chunks_of(data.rows, self.config.eval_micro_batch, self.config.limit_eval_batches)
        watch = EvaluationWatch(self.session, len(chunks))

        def beat() -> None:
            self.clock.beat()
            watch()

        failpoint("evaluate", self.session.world.rank, step)
        started = time.monotonic()
        self.session.tell(messages.Evaluating(step))
        with self.clock.part("evaluation"), self.state.evaluated():
            try:
                self.metrics, tables = evaluation_of(
                    self.config,
                    self.task,
                    self.state.model,
                    data,
                    self.session.world,
                    replace(self.feed.loader.threads, begin=None),  # nothing runs meanwhile
                    beat,
                )
            except Abandoned as abandoned:
                return False, abandoned.stop
        seconds, self.state.evaluated_step = time.monotonic() - started, step
        if self.patience.see(self.metrics) and not self.cadence.is_over(step):
            self.cadence.total_steps = step
            reason = f"{self.patience.count} evaluations in a row without improvement"
            self.session.tell(events.Note(f"{reason} (stop.patience): the run ends."))
        monitor = self.task.monitor
        if math.isnan(self.metrics.get(monitor, 0.0)):
            text = (
                f"{monitor} is not a number after step {step}: this checkpoint cannot be the best."
            )
            self.session.tell(events.Note(text))
        best = self.state.improve(step, self.metrics, monitor, self.task.goal)
        self.session.log(
            events.Eval(
                step=step,
                epoch=(step - 1) // self.plan.steps_per_epoch,
                metrics=self.metrics,
                tables=tables,
                monitor=monitor,
                best=best,
                seconds=seconds,
            )
        )
        return best, 0

    def owes_evaluation(self) -> bool:
        """Whether there is evaluation data and the current model was not evaluated."""
        return self.eval_data is not None and self.state.evaluated_step != self.state.step

    def time_is_up(self) -> bool:
        return self.trained_s + self.clock.elapsed() >= self.config.max_time_s

    def make_up(self) -> int:
        """Does what was due after the last step and was interrupted; all ranks take part.
        Returns the number of the signal that interrupts the evaluation, else 0."""
        step, live, stop = self.state.step, self.live, 0
        if live is not None and (owed := json.loads(live.read(OWED_FILE))):
            self.logged_step, self.unlogged_s = owed["logged_step"], owed["seconds"]
            self.stepper.shares = torch.tensor(owed["shares"], dtype=torch.float64)
            self.log(self.stepper.shares, self.rates(step - 1)[0])
        last = self.cadence.is_over(step)  # a rerun may have fewer epochs
        # The last commit may have ended with rank 0.
        is_newer = live is not None and live.stored_step < step
        save = is_newer and self.is_to_be_saved(last)
        if self.cadence.evaluates(step) and self.owes_evaluation():
            best, stop = self.evaluate()
            save |= best or (last and not stop) or (stop > 0 and is_newer)
        if save:
            self.save(last or stop > 0)
        self.live = None  # frees its memory
        return stop

    def is_to_be_saved(self, last: bool) -> bool:
        """Whether the state of survivors is to be saved: if that was due, or if checkpoints are due
        by time and their timer has started anew."""
        state = self.state
        best = state.evaluated_step == state.best_step == state.step
        timed = self.config.checkpoint.every_s and not (self.live and self.live.timer_runs)
        return state.step > 0 and bool(last or best or timed or self.cadence.saves(state.step))

    def save(self, last: bool) -> None:
        """Commits a snapshot in the background; all ranks take part.

        Training waits for the copy to the host, and for the previous commit if it is not done.

        Args:
            last: the run ends normally with it.
        """
        step, world, asked = self.state.step, self.session.world, time.monotonic()
        self.stepper.settle()  # the device finishes its work first, which is not stall time
        began = time.monotonic()
        self.stepper.replica_check.require()
        if names := nonfinite(self.state.model):  # the same on all ranks, as are weights
            trained = {n for n, p in self.state.model.named_parameters() if p.requires_grad}
            what, remedy = "weights are not finite", REMEDY
            if not trained & {*names}:
                what, remedy = (
                    "nan in values without updates",
                    "check the task's code, which set them",
                )
            raise DivergedError(
                f"{what} after step {step}: {first_names(names)}. Committed checkpoints are kept; "
                f"{remedy}."
            )
        metrics = self.metrics if self.state.evaluated_step == step else {}
        snapshot = None
        with self.clock.part("checkpoint"):
            free = time.monotonic()
            self.session.drain()
            waited = time.monotonic() - free
            if world.is_main:
                snapshot = replace(self._snapshot(metrics), last=last)
                failpoint("checkpoint.snapshot", world.rank, step)
            self.session.commit(snapshot)
        self.session.saved(time.monotonic() - began - waited)
        self.session.tell(messages.Pause(time.monotonic() - asked))

    def _snapshot(self, metrics: Mapping[str, float], to_spare: bool = False) -> Snapshot:
        """`to_spare`: see `TrainState.snapshot`."""
        step = self.state.step
        manifest = Manifest(
            step=step,
            epoch=step // self.plan.steps_per_epoch,
            attempt=0,  # set by the recorder
            world_size=self.session.world.size,
            config=to_dict(publishable(self.config)),
            data_fingerprint=self.identity.train,
            metrics=metrics,
            finished=self.cadence.is_over(step) and not self.owes_evaluation(),
        )
        taken = self.state.snapshot(manifest, self.session.records(), to_spare)
        progress = {**taken.documents["state.json"], **self.identity.document()}
        return replace(taken, documents={**taken.documents, "state.json": progress})

    def take_live(self) -> Snapshot | None:
        """The state after the last complete step, of a rank that has lost a peer. None if others
        could not continue from it: see `Stepper.roll_back`."""
        state, step = self.state, self.state.step
        if not self.stepper.roll_back():
            return None
        if state.counted_step > step:
            state.skipped = state.skipped_before
        owed: dict[str, Any] = {}
        if self.logged_step < step and self.cadence.logs(step) and self.stepper.shares is not None:
            seconds = self.unlogged_s + self.clock.window()[0]
            shares = self.stepper.shares.tolist()
            owed = {"shares": shares, "logged_step": self.logged_step, "seconds": seconds}
        # The memory of other snapshots is in use until the commit is done.
        taken = self._snapshot({}, to_spare=self.session.is_committing())
        log = [record for record in taken.log if record.step <= step]
        return replace(taken, log=log, documents={**taken.documents, OWED_FILE: owed})

    def outcome(self, signal: int) -> messages.Outcome:
        state, seconds = self.state, dict(self.clock.seconds)
        total_steps = self.cadence.total_steps
        seconds["total"] = self.clock.elapsed()
        if state.step == total_steps and not self.owes_evaluation():
            signal = 0
        return messages.Outcome(
            state.step, total_steps, signal, state.best, state.best_step, self.metrics, seconds
        )
