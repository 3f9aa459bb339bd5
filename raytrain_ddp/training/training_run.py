"""A run in one process group: it joins, takes steps, and does what may follow each step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ddp import events
from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.recipe import publishable, to_dict
from raytrain_ddp.config.train_config import step_notes, unread_notes
from raytrain_ddp.data.loading.loader import memory_note
from raytrain_ddp.data.splits import Splits
from raytrain_ddp.errors import DivergedError, first_names
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.generations import NoStateLeft
from raytrain_ddp.tasks.model_parts import nonfinite
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.evaluation import chunks_of, evaluation_of
from raytrain_ddp.training.gradients.reduction import broadcast_model
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.monitoring import step_timing
from raytrain_ddp.training.monitoring.watchdog import Watchdog
from raytrain_ddp.training.optimizer.task_optimizer import replaced_fields
from raytrain_ddp.training.rehearsal import rehearse, rehearse_evaluation
from raytrain_ddp.training.runtime.world import (
    device_name,
    require_same_software,
    software_versions,
)
from raytrain_ddp.training.state.live_state import OWED_FILE, LiveCheckpoint, newest_state
from raytrain_ddp.training.steps.device_feed import Feed
from raytrain_ddp.training.steps.nonfinite import REMEDY, handle_nonfinite
from raytrain_ddp.training.steps.step_decisions import (
    Abandoned,
    Cadence,
    EvaluationWatch,
    Patience,
)
from raytrain_ddp.training.steps.stepper import Stepper
from raytrain_ddp.training.steps.warm_up import require_equal_calls, warm_up_notes


class Run:
    """A run in one process group, starting from the newest state.

    All ranks make a Run and take part in every method that does not say otherwise.

    Args:
        build: the parts of the run; those that have been made already are used.
        brought: the state of this process, if it has survived the loss of other ranks.

    Attributes:
        cadence: what is due after which step.
        rates: the learning rates of the parameter groups in a step, counted from 0.
        stepper: takes a step.
        feed: yields the samples of each step.
        clock: measures where time goes.
        has_begun: whether this process has loaded the state with which the training begins.
    """

    def __init__(
        self,
        build: Build,
        membership: Membership,
        checkpoints: Checkpoints,
        log: Log,
        brought: Snapshot | None = None,
    ) -> None:
        self.build, self.membership = build, membership
        self.checkpoints, self.log = checkpoints, log
        self._brought = brought
        self._watchdog: Watchdog | None = None
        self.has_begun = False

    def begin(self) -> None:
        """Prepares the training: reuses what is made already, and loads the newest state."""
        build, membership, log = self.build, self.membership, self.log
        build.join(membership.world)
        self.clock = step_timing.Clock(build.world.device)
        log.doing = self.clock.also
        self._watchdog = membership.watch(self.clock, build.config)
        require_same_software(build.world)
        log.tell(events.Phase("opening the data"))
        build.open_data()
        splits = build.task.splits if build.world.is_main else None
        self._splits = splits if isinstance(splits, Splits) else None
        if self._splits is not None:
            self._splits.begin_counting()  # in the background
        self.cadence = Cadence(build.config, build.plan.steps_per_epoch)
        failpoint("start.opened", build.world.rank)
        log.tell(events.Phase("preparing the model"))
        self._warm_up()
        failpoint("start.warmed_up", build.world.rank)
        self._load()
        self.clock.start()
        membership.confirm()  # the weights that rank 0 sent
        build.is_begun = self.has_begun = True
        self._brought = None

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.state.step

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed."""
        self.close()
        self.checkpoints.finish()
        self.log.close(failed=False)

    def close(self) -> None:
        """Ends the watchdog: from now on, this process is not watched for hangs."""
        if self._watchdog is not None:
            self._watchdog.close()

    # ------------------------------------------------------------------ the start

    def _warm_up(self) -> None:
        """Makes the stepper and the feed; a warm-up shows that they work."""
        build, log, is_tried = self.build, self.log, self.build.warmed_up is not None
        build.agree_on_model()
        rehearse(build, log.tell)
        if not is_tried:
            rehearse_evaluation(build, log.tell)
        self.state, self.rates = build.state, build.rates
        refuse = partial(handle_nonfinite, build, log, self.checkpoints)
        self.stepper = Stepper(build, self.membership, self.clock, refuse)
        self.stepper.warm_up()
        require_equal_calls(build)
        self.feed = Feed(build, log, self.clock)
        if not build.is_begun:
            self._tell(*_notes(build))

    def _load(self) -> None:
        """Loads the newest state, if any, or makes all ranks begin with the same weights."""
        build, task, state = self.build, self.build.task, self.state
        world, identity = build.world, build.identity
        identity.require_alike(world)
        mine, rated_by = self._brought, (task.monitor, task.goal)
        checkpoint = newest_state(self.checkpoints, rated_by, mine, world, state.existing())
        if checkpoint is not None:
            identity.require_same(checkpoint)
        elif build.is_begun:
            self._brought = None
            text = "neither a usable state nor a checkpoint is left: training starts over"
            raise NoStateLeft(text)
        # The state of survivors from which this start continues.
        self._live = checkpoint if isinstance(checkpoint, LiveCheckpoint) else None
        log = [] if checkpoint is None else state.load(checkpoint)
        broadcast_model(state.model, world, is_loaded=checkpoint is not None)
        if checkpoint is None and state.average is not None:
            state.average.restart()
        if state.kept_options and self._live is None:
            self._tell(
                f"the optimizer continues with {first_names(state.kept_options)}, as in the "
                "checkpoint; to use the new value, start a new run with --model.weights "
                f"{build.config.name}."
            )
        self.log.restore(log, has_copies=world.is_main)
        self._end_if_over(log)
        failpoint("start.loaded", world.rank, state.step)
        if self._watchdog is not None:
            self._watchdog.begin(state.step)
        self.log.tell(self._plan_event(checkpoint))
        self._logged_step, self._unlogged_s = state.step, 0.0
        self._stragglers = step_timing.Stragglers(build.plan.slots, world)
        evals = [r for r in log if isinstance(r, events.Eval) and r.step == state.step]
        # The metrics of the evaluation after this step.
        self._metrics: Mapping[str, float] = dict(evals[-1].metrics) if evals else {}

    def _end_if_over(self, log: Sequence[events.LogRecord]) -> None:
        """Ensures that a run that has ended already takes no further steps. The part of its log
        that comes from another run (`TrainState.branched_at`) does not count."""
        config, task, state = self.build.config, self.build.task, self.state
        own = [record for record in log if record.step > state.branched_at]
        times = (r.seconds_total for r in reversed(own) if isinstance(r, events.Train))
        self._trained_s = next(filter(math.isfinite, times), 0.0)  # before this start
        self._patience = Patience(config.stop, task.monitor, task.goal)
        if self._patience.replay(own) or self._trained_s >= config.max_time_s:
            self.cadence.total_steps = min(state.step, self.cadence.total_steps)

    def _plan_event(self, checkpoint: Checkpoint | None) -> events.Plan:
        build, live = self.build, self._live
        config, plan, eval_data = build.config, build.plan, build.eval_data
        epochs = -(-config.total_steps(plan.steps_per_epoch) // plan.steps_per_epoch)
        return events.Plan(
            run=config.name,
            start_step=self.state.step,
            total_steps=self.cadence.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            epochs=epochs,
            batch_size=config.batch_size,
            slots=config.slots,
            micro_batch=config.micro_batch,
            world_size=build.world.size,
            device=device_name(build.world.device),
            parameters=sum(p.numel() for p in build.model.parameters()),
            train_samples=build.data.rows,
            eval_samples=eval_data.rows if eval_data else 0,
            unit=build.task.unit,
            data=self._splits.summary() if self._splits else None,
            resumed_from=str(checkpoint.name) if checkpoint and live is None else None,
            replaced=live.newcomers if live else None,
            hosts=self.membership.hosts,
            versions=software_versions(),
        )

    def _tell(self, *notes: str | None) -> None:
        """Shows the notes that are not empty."""
        for text in filter(None, notes):
            self.log.tell(events.Note(text))

    def make_up(self) -> int:
        """Does what was due after the last step and was interrupted.

        Returns the number of the signal that interrupts the evaluation, else 0."""
        step, live, stop = self.state.step, self._live, 0
        if live is not None and (owed := json.loads(live.read(OWED_FILE))):
            self._logged_step, self._unlogged_s = owed["logged_step"], owed["seconds"]
            self.stepper.shares = torch.tensor(owed["shares"], dtype=torch.float64)
            self.record(self.stepper.shares, self.rates(step - 1)[0])
        last = self.cadence.is_over(step)  # a rerun may have fewer epochs
        # The last commit may have ended with rank 0.
        is_newer = live is not None and live.stored_step < step
        save = is_newer and self._is_to_be_saved(last)
        if self.cadence.evaluates(step) and self._owes_evaluation():
            best, stop = self.evaluate()
            save |= best or (last and not stop) or (stop > 0 and is_newer)
        if save:
            self.save(last or stop > 0)
        self._live = None  # frees its memory
        return stop

    def _is_to_be_saved(self, last: bool) -> bool:
        """Whether the state of survivors is to be saved: if a save was due, or if checkpoints are
        due by time and their timer has been restarted."""
        state = self.state
        best = state.evaluated_step == state.best_step == state.step
        every_s = self.build.config.checkpoint.every_s
        timed = every_s and not (self._live and self._live.timer_runs)
        return state.step > 0 and bool(last or best or timed or self.cadence.saves(state.step))

    # ------------------------------------------------------------------ what may follow a step

    def record(self, shares: Tensor, rate: float) -> None:
        """Logs the step's loss, scalars, and speed since the last record.

        This is the only place where the host waits for the device.
        """
        build, state, step, world = self.build, self.state, self.state.step, self.build.world
        failpoint("train.log", world.rank, step)
        self.stepper.settle()  # so that `nonfinite` includes this step
        trained_s, phases = self.clock.window()
        self._unlogged_s += trained_s
        trained_s = self._unlogged_s
        measured = step_timing.measured(trained_s, phases, world)
        losses, *scalars = zip(*shares.tolist(), strict=True)
        per_epoch, steps = build.plan.steps_per_epoch, range(self._logged_step, step)
        samples_per_s = sum(build.plan.samples(s % per_epoch) for s in steps) / trained_s
        timing = step_timing.summary(
            measured,
            len(steps),
            self.stepper.flops * samples_per_s / world.size,
            step_timing.peak_flops_per_s(device_name(world.device), build.config.compute.precision),
            world.of_run,
        )
        self.log.add(
            events.Train(
                step=step,
                epoch=(step - 1) // per_epoch,
                loss=math.fsum(losses),
                lr=rate,
                samples_per_s=samples_per_s,
                skipped=state.skipped,
                nonfinite=state.nonfinite,
                seconds=self.clock.elapsed(),
                seconds_total=self._trained_s + self.clock.elapsed(),
                timing=timing,
                scalars=dict(zip(self.stepper.scalar_names, map(sum, scalars), strict=True)),
            )
        )
        if world.is_main:
            state.reserve()
        straggler = self._stragglers.look(step, timing.slowest, self.membership.hosts)
        if straggler is not None:
            self.log.tell(straggler)
        self._logged_step, self._unlogged_s = step, 0.0

    def evaluate(self) -> tuple[bool, int]:
        """Evaluates the current model.

        Returns:
            Whether it is the best so far, and the number of the signal that interrupted the
            evaluation, else 0. An interrupted evaluation is repeated when the run resumes.
        """
        build, state, step = self.build, self.state, self.state.step
        config, task, data = build.config, build.task, build.eval_data
        if data is None:
            return False, 0
        chunks = chunks_of(data.rows, config.eval_micro_batch, config.limit_eval_batches)
        watch = EvaluationWatch(self.membership, len(chunks))

        def beat() -> None:
            self.clock.beat()
            watch()

        failpoint("evaluate", build.world.rank, step)
        started = time.monotonic()
        self.log.tell(events.Evaluating(step))
        with self.clock.part("evaluation"), state.evaluated():
            try:
                self._metrics, tables = evaluation_of(build, build.loader.threads, beat)
            except Abandoned as abandoned:
                return False, abandoned.stop
        seconds, state.evaluated_step = time.monotonic() - started, step
        if self._patience.see(self._metrics) and not self.cadence.is_over(step):
            self.cadence.total_steps = step
            reason = f"{self._patience.count} evaluations in a row without improvement"
            self._tell(f"{reason} (stop.patience): the run ends.")
        if math.isnan(self._metrics.get(task.monitor, 0.0)):
            self._tell(
                f"{task.monitor} is not a number after step {step}: this checkpoint cannot be the "
                "best."
            )
        best = state.improve(step, self._metrics, task.monitor, task.goal)
        self.log.add(
            events.Eval(
                step=step,
                epoch=(step - 1) // build.plan.steps_per_epoch,
                metrics=self._metrics,
                tables=tables,
                monitor=task.monitor,
                best=best,
                seconds=seconds,
            )
        )
        return best, 0

    def _owes_evaluation(self) -> bool:
        """Whether there is evaluation data and the current model was not evaluated."""
        state = self.state
        return self.build.eval_data is not None and state.evaluated_step != state.step

    def time_is_up(self) -> bool:
        return self._trained_s + self.clock.elapsed() >= self.build.config.max_time_s

    def save(self, last: bool) -> None:
        """Commits a snapshot in the background.

        Training waits for the copy to the host, and for the previous commit if it is not done.

        Args:
            last: whether the run ends normally with this checkpoint.
        """
        step, world, asked = self.state.step, self.build.world, time.monotonic()
        self.stepper.settle()  # the device finishes its work first, which is not stall time
        began = time.monotonic()
        self.stepper.replica_check.require()
        _require_finite(self.state.model, step)
        metrics = self._metrics if self.state.evaluated_step == step else {}
        with self.clock.part("checkpoint"):
            free = time.monotonic()
            self.checkpoints.drain()
            waited = time.monotonic() - free
            if world.is_main:
                snapshot = replace(self._snapshot(metrics), last=last)
                failpoint("checkpoint.snapshot", world.rank, step)
                self.checkpoints.save(snapshot, time.monotonic() - began - waited)
        self.log.tell(events.Pause(time.monotonic() - asked))

    def _snapshot(self, metrics: Mapping[str, float], to_spare: bool = False) -> Snapshot:
        """`to_spare`: see `TrainState.snapshot`."""
        build, step = self.build, self.state.step
        manifest = Manifest(
            step=step,
            epoch=step // build.plan.steps_per_epoch,
            attempt=0,  # set by the recorder
            world_size=build.world.size,
            config=to_dict(publishable(build.config)),
            data_fingerprint=build.identity.train,
            metrics=metrics,
            finished=self.cadence.is_over(step) and not self._owes_evaluation(),
        )
        taken = self.state.snapshot(manifest, self.log.records, to_spare)
        progress = {**taken.documents["state.json"], **build.identity.document()}
        return replace(taken, documents={**taken.documents, "state.json": progress})

    def live_state(self) -> Snapshot | None:
        """The state after the last complete step, of a rank that has lost a peer; before `begin` is
        done, what it brought. None if others could not continue from it: see `Stepper.roll_back`.
        """
        if not self.has_begun:
            return self._brought
        state, step = self.state, self.state.step
        if not self.stepper.roll_back():
            return None
        if state.counted_step > step:
            state.skipped = state.skipped_before
        owed: dict[str, Any] = {}
        if self._logged_step < step and self.cadence.logs(step) and self.stepper.shares is not None:
            seconds = self._unlogged_s + self.clock.window()[0]
            shares = self.stepper.shares.tolist()
            owed = {"shares": shares, "logged_step": self._logged_step, "seconds": seconds}
        # The memory of other snapshots is in use until the commit is done.
        taken = self._snapshot({}, to_spare=self.checkpoints.is_saving())
        log = [record for record in taken.log if record.step <= step]
        documents = {**taken.documents, OWED_FILE: owed}
        return replace(taken, log=log, documents=documents)

    def outcome(self, signal: int) -> events.Outcome:
        """How the run ended. `signal`: the number of the signal that stopped it, else 0."""
        state, total_steps = self.state, self.cadence.total_steps
        seconds = {**self.clock.seconds, "total": self.clock.elapsed()}
        if state.step == total_steps and not self._owes_evaluation():
            signal = 0
        best = state.best, state.best_step
        return events.Outcome(state.step, total_steps, signal, *best, self._metrics, seconds)


def _notes(build: Build) -> list[str | None]:
    """Notes on settings that are allowed but may not be intended."""
    config, task, model = build.config, build.task, build.model
    compiled = next((name for name in model.state_dict() if "_orig_mod." in name), None)
    notes = [
        *step_notes(config, build.plan.steps_per_epoch),
        *warm_up_notes(build.warmed_up),
        memory_note(build.loader, config.data.memory_mib * 2**20),
        *task.notes,
    ]
    if not any(module.training for module in model.modules()):  # some libraries return it so
        notes.append(
            "model() returned the whole model in evaluation mode, and it stays there: no dropout, "
            "fixed batch norm statistics. If that is not intended, call train() on it in model()."
        )
    if compiled is not None:  # compiling renames parameters
        notes.append(
            f"model() has compiled modules, so names in checkpoints contain _orig_mod. "
            f"({compiled}). To keep the names, use --compute.compile, or module.compile() instead "
            "of torch.compile(module)."
        )
    replaced = replaced_fields(task, build.optimizer, config)
    return [*notes, *unread_notes(config, build.reads, replaced)]


def _require_finite(model: nn.Module, step: int) -> None:
    """Raises DivergedError if weights or buffers, equal on all ranks, are not finite."""
    names = nonfinite(model)
    if not names:
        return
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    what, remedy = "weights are not finite", REMEDY
    if not trained & {*names}:
        what, remedy = "nan in values without updates", "check the task's code, which sets them"
    raise DivergedError(
        f"{what} after step {step}: {first_names(names)}. Committed checkpoints are kept; {remedy}."
    )
