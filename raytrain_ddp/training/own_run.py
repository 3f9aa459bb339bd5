"""A loop of one's own: what a train function receives, so that it can resume at any step.

A survivor of a death, a newcomer and a restart are one case: the function is called from its
beginning, and finds its state when it registers what has one. The position in the data is two
numbers, (epoch, step of the epoch); whatever may change the state lies between two *boundaries*,
where the state can be saved: after each step, and after the code that follows an epoch's steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp import events
from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import LOG_FILE
from raytrain_ddp.checkpoint.snapshot import HostSnapshot, Snapshot
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.config.recipe import publishable, to_dict
from raytrain_ddp.config.sections import EvalConfig
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.data.order import Plan
from raytrain_ddp.errors import TaskError
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.generations import RankLost
from raytrain_ddp.records import log_records
from raytrain_ddp.tasks.task import OwnLoop
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.evaluation import evaluate, scalars
from raytrain_ddp.training.gradients.buffer_sync import own_memory
from raytrain_ddp.training.gradients.reduction import broadcast_model, in_ddp, require_same_model
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.monitoring import step_timing
from raytrain_ddp.training.monitoring.watchdog import Watchdog
from raytrain_ddp.training.own_data import Given, Loader, Scored, data_of, update_all
from raytrain_ddp.training.own_state import Registered, unwrapped
from raytrain_ddp.training.own_step import Gradients, OwnStep, watching_updates
from raytrain_ddp.training.runtime.world import (
    device_name,
    require_same_software,
    seed_all,
    seed_slot,
    set_up,
    software_versions,
)
from raytrain_ddp.training.state.live_state import LiveCheckpoint, newest_state
from raytrain_ddp.training.steps.replica_check import ReplicaCheck
from raytrain_ddp.training.steps.step_decisions import Ballot, is_due

if TYPE_CHECKING:
    from torchmetrics import Metric

_BEGIN, _END = -1, -2  # of an epoch: take the place of a slot's number in seeds


class _Interrupted(BaseException):
    """Ends the train function after a checkpoint; not an Exception, so that it is not caught."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class OwnRun:
    """What a train function receives: the run that it is part of, in one process group.

    All ranks call its methods alike; `save`, `stop` and the attributes are for any rank.

    Attributes:
        rank, world_size, device: this worker's place.
        epoch: the current one, from 0. step: the number of steps done.
    """

    def __init__(
        self,
        build: Build,
        membership: Membership,
        checkpoints: Checkpoints,
        log: Log,
        brought: Snapshot | None = None,
    ) -> None:
        self._config, self._membership = build.config, membership
        self._checkpoints, self._log, self._brought = checkpoints, log, brought
        assert isinstance(build.task, OwnLoop)
        self._train = build.task.train
        self._world = world = membership.world
        set_up(world, build.config.compute)
        self.clock = step_timing.Clock(world.device)
        self._loader = Loader(build.config, world, self.clock)
        self._nets: list[nn.Module] = []
        self._epochs = self._per_epoch = 0
        self._gradients: Gradients | None = None
        self._current: OwnStep | None = None
        self._watchdog: Watchdog | None = None
        self._host, self._spare, self._at_end = HostSnapshot(), HostSnapshot(), HostSnapshot()
        self._pending: dict[str, Any] = {}
        self._kept: Snapshot | None = None  # before the code that follows an epoch's steps
        self._saves = self._ends = self._owes_save = False
        self._is_between = self._announced = False
        self.has_begun = False

    # ------------------------------------------------------------------ for the train function

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def device(self) -> torch.device:
        return self._world.device

    @property
    def epoch(self) -> int:
        return self._at.epoch

    @property
    def step(self) -> int:
        return self._at.step

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on this worker's device, with rank 0's weights, and wrapped in DDP unless
        there is one worker, or with ``exact``; make its optimizer afterward.

        Raises:
            TaskError, ConfigError: it is wrapped already, or differs between the ranks.
        """
        is_known = any(unwrapped(net) is model for net in self._nets)
        if unwrapped(model) is not model or is_known or self.has_begun:
            raise TaskError("run.prepare(): give a module once, not wrapped, before the loop.")
        own_memory(model)
        model = model.to(self.device)
        require_same_model(model, self._world)
        broadcast_model(model, self._world, is_loaded=False)
        self._nets.append(model if self._config.exact else in_ddp(model, self._config, self._world))
        return self._nets[-1]

    def register(self, **objects: Any) -> None:
        """Restores the state of these objects if the run has one, and saves it from now on.

        Args:
            objects: by a name for each: models, optimizers, schedulers, a GradScaler, and anything
                else with `state_dict` and `load_state_dict`.

        Raises:
            TaskError, CheckpointError, ConfigError: the state cannot be stored, or does not fit.
        """
        if self.has_begun:
            raise TaskError("run.register(): call it before the loop over epochs.")
        for name, each in objects.items():
            self._objects.add(name, each)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs, from 0, beginning with the one where the run stopped.

        Code after the loop over an epoch's steps runs once; code before it may run again when a
        run is resumed within the epoch, and must not change what is registered.
        """
        self._begin_loop()
        self._epochs, at = count, self._at
        at.is_over = at.is_over or at.epoch >= count
        while at.epoch < count and not at.is_over:
            self._is_between, self._before = True, None if at.of_epoch else self._objects.numbers()
            seed_slot(self.device, self._config.seed, at.epoch, _BEGIN)
            yield at.epoch
            if self._is_between or (at.of_epoch < self._per_epoch and not at.is_over):
                raise TaskError(
                    "an epoch needs one loop over run.steps(), to its end: to end the run, call "
                    "run.stop()."
                )
            at.epoch, at.of_epoch, self._kept = at.epoch + 1, 0, None
            at.is_over = at.is_over or at.epoch >= count
            self._record_evaluation()
            self._owes_save |= is_due(at.epoch, self._config.checkpoint.every_epochs)
            self._ballot()
            self._decide(may_save=not at.is_over)
        self._is_between = False

    def steps(
        self,
        dataset: Any,
        batch_size: int,
        micro_batch: int,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[OwnStep]:
        """Yields the steps of the epoch that are left. Each sample is used once per epoch, also by
        the smaller last step, in an order that depends only on the seed and the epoch.

        Args:
            dataset: with `__len__` and `__getitem__`, as for a DataLoader; or a `Source` or `Data`.
            batch_size: samples of a step, of all workers together.
            micro_batch: samples of a batch that a step yields, on any number of workers.
            num_workers: processes that load batches; 0: none.

        Raises:
            ConfigError, DataError, TaskError: the sizes or the data cannot be used, or they differ
                from those with which the epoch began.
        """
        if not self._is_between:
            raise TaskError("run.steps(): once within each `for epoch in run.epochs(n)`.")
        self._is_between = False
        if self._before not in (None, self._objects.numbers()):
            raise TaskError(
                "registered state changes before run.steps() in an epoch, which a run that resumes "
                "there would repeat: move scheduler.step() and the like after the loop over steps."
            )
        given = Given(dataset, batch_size, micro_batch, shuffle, collate_fn, num_workers)
        at = self._at
        plan, loaded = self._loader.epoch(given, at, self._epochs)
        self._per_epoch = plan.steps_per_epoch
        if self._gradients is None or (self._config.exact and plan.slots != self._gradients.slots):
            self._gradients = Gradients(
                self._nets, plan.slots, self._config, self._scaler, self._membership, self.clock
            )
        self._gradients.slots = plan.slots
        if not self._announced:
            self._announce(plan)
        while at.of_epoch < plan.steps_per_epoch and not at.is_over:
            self._ballot()
            failpoint("train.before_step", self.rank, at.step + 1)
            slots = next(loaded)
            assert self._gradients is not None
            self._rate = next(
                (o.param_groups[0]["lr"] for o in self._objects.of_kind(Optimizer)), 0.0
            )
            samples = plan.samples(at.of_epoch)
            self._current = step = OwnStep(slots, at.step, samples, self._gradients)
            yield step
            if step.is_open or not step.turns:
                raise TaskError("the loop over a step's batches was left early: use all of them.")
            self._gradients.require_dropped(at.step)
            at.step, at.of_epoch, self._current = at.step + 1, at.of_epoch + 1, None
            self.clock.mark("optimizer")
            failpoint("train.after_step", self.rank, at.step)
            is_last = at.of_epoch == plan.steps_per_epoch
            self._record(step, is_last)
            self._replicas.follow()
            self._owes_save |= is_due(at.step, self._config.checkpoint.every_steps)
            self._decide(may_save=not is_last)
        if self._membership.goes_on(RankLost()):  # survivors must not repeat what follows
            self._kept = self._snapshot(self._at_end)
        seed_slot(self.device, self._config.seed, at.epoch, _END)

    def log(self, **values: float | Tensor) -> None:
        """Logs numbers that are equal on all ranks: within a step, if it is to be logged
        (``log.every_steps``, and the last of each epoch); else, those of an evaluation."""
        self._pending |= values

    def evaluate(
        self,
        metrics: Mapping[str, Metric],
        model: nn.Module,
        dataset: Any,
        *,
        batch_size: int = 64,
        update: Callable[[nn.Module, Any, Any], None] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
    ) -> dict[str, float]:
        """The values of torchmetrics metrics over a data set, each sample counted once; the same
        bits on any number of workers.

        Args:
            update: ``update(model, batch, metrics)`` updates each metric with one batch. Default:
                ``metric.update(model(x), y)`` for ``x, y = batch``.
        """
        config = replace(self._config, eval=EvalConfig(micro_batch=batch_size))
        build = Build(config, self._world, Scored(metrics, update or update_all))
        build.eval_data, build.model = data_of(dataset, collate_fn), unwrapped(model)
        failpoint("evaluate", self.rank, self.step)
        self._log.tell(events.Evaluating(self.step))
        with self.clock.part("evaluation"):
            values = evaluate(build, LoaderThreads(num_workers), metrics, self.clock.beat)
        build.eval_data.close()
        return scalars(values)

    def save(self) -> None:
        """Requests a checkpoint after this step, by any rank."""
        self._saves = True

    def stop(self) -> None:
        """Requests the end of the run after this step, by any rank: both loops end."""
        self._ends = True

    # ------------------------------------------------------------------ the start and the end

    def lead(self) -> events.Outcome:
        """Calls the train function; returns how the run has ended."""
        signal = 0
        self._begin()
        with watching_updates(self._objects, lambda: self._current):
            try:
                self._train(self)
            except _Interrupted as interrupted:
                signal = interrupted.signal
        if not signal:
            self._complete()
        self.close()
        self._checkpoints.finish()
        self._log.close(failed=False)
        at, seconds = self._at, {**self.clock.seconds, "total": self.clock.elapsed()}
        left = 0 if at.is_over else (self._epochs - at.epoch) * self._per_epoch - at.of_epoch
        return events.Outcome(at.step, at.step + left, signal, None, 0, {}, seconds)

    def _begin(self) -> None:
        """Joins the others, and receives the newest state."""
        world, config, log = self._world, self._config, self._log
        self._membership.only_main_asks = False  # any rank may ask to save or to stop
        log.doing = self.clock.also
        self._watchdog = self._membership.watch(self.clock, config)
        require_same_software(world)
        failpoint("start.opened", world.rank)
        log.tell(events.Phase("preparing the model"))
        self._checkpoint = newest_state(self._checkpoints, ("", "max"), self._brought, world)
        records: list[events.LogRecord] = []
        if self._checkpoint is not None:
            records = log_records(json.loads(self._checkpoint.read(LOG_FILE)))
        self._objects = Registered(self._checkpoint)
        self._at = self._objects.position
        # Nothing is left to do, or to save.
        self._is_done = self._at.is_over and not isinstance(self._checkpoint, LiveCheckpoint)
        log.restore(records, has_copies=world.is_main)
        times = (r.seconds_total for r in reversed(records) if isinstance(r, events.Train))
        self._trained_s, self._samples, self._logged = next(times, 0.0), 0, self.step
        seed_all(config.seed)

    def _begin_loop(self) -> None:
        """Requires that all that must be registered is; then, this process has the run's state."""
        if self.has_begun:
            raise TaskError("run.epochs(): there is one loop over epochs in a train function.")
        self._objects.require_all(self._nets)
        none = torch.amp.GradScaler(self.device.type, enabled=False)
        self._scaler = (*self._objects.of_kind(torch.amp.GradScaler), none)[0]
        self._scaler.scale(torch.zeros((), device=self.device))  # a rank without samples never does
        self.model: nn.Module = nn.ModuleList(self._objects.of_kind(nn.Module))
        self._replicas = ReplicaCheck(self._config.scaling, self, self._membership)
        if self._watchdog is not None:
            self._watchdog.begin(self.step)
        failpoint("start.loaded", self.rank, self.step)
        self.clock.start()
        self._membership.confirm()
        self.has_begun, self._brought = True, None

    def _complete(self) -> None:
        """Saves the last state, of a function that has returned."""
        if self._current is not None or not self.has_begun or not self._at.is_over:
            raise TaskError(
                "the train function returned before its loops were over: call run.stop() to end "
                "the run."
            )
        if not self._is_done:
            self._record_evaluation()
            self._commit(last=True)

    def close(self) -> None:
        """Ends the watchdog and the loader."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._loader.close()

    def live_state(self) -> Snapshot | None:
        """The state at the last boundary, of a rank that has lost a peer; None if it has changed
        since then."""
        if not self.has_begun:
            return self._brought
        if self._kept is not None:
            return self._kept
        if self._current is not None:
            if self._current.turns > 1 or (self._current.turns and not self._current.is_open):
                return None
            assert self._gradients is not None
            self._gradients.buffers.roll_back()
        return self._snapshot(self._spare if self._checkpoints.is_saving() else self._host)

    # ------------------------------------------------------------------ what follows a step

    def _ballot(self) -> None:
        """Casts this rank's votes on what follows the step; all ranks take part."""
        requests = self._membership.requests(self.step + 1, not self._checkpoints.fails)
        saves = requests.save or self._saves or self._checkpoints.time_to_save()
        self._votes = Ballot(self._membership)
        self._votes.cast(requests._replace(save=saves), self._ends)
        self._saves = False

    def _decide(self, may_save: bool) -> None:
        """Does what the ranks have agreed on, at a boundary.

        Args:
            may_save: False: a checkpoint that is due follows at the next boundary, which has the
                same number of steps.
        """
        signal, save, end = self._votes.count()
        self._owes_save |= save
        self._at.is_over |= end
        if signal and not self._at.is_over:
            self._commit(last=True)
            raise _Interrupted(signal)
        if self._owes_save and may_save and not self._at.is_over:
            self._commit()

    def _commit(self, last: bool = False) -> None:
        """Commits the state in the background."""
        self._owes_save = False
        self._replicas.require()
        with self.clock.part("checkpoint"):
            self._checkpoints.drain()
            name = CheckpointName(self.step, self._checkpoints.attempt)
            if self._world.is_main and name not in self._checkpoints.store.names():
                snapshot = replace(self._snapshot(self._host), last=last)
                failpoint("checkpoint.snapshot", self.rank, self.step)
                self._checkpoints.save(snapshot)

    def _snapshot(self, memory: HostSnapshot) -> Snapshot:
        manifest = Manifest(
            step=self.step,
            epoch=self.epoch,
            attempt=0,  # set by the recorder
            world_size=self.world_size,
            config=to_dict(publishable(self._config)),
            data_fingerprint=self._at.data,
            finished=self._at.is_over,
        )
        return self._objects.snapshot(manifest, self._log.records, memory)

    def _announce(self, plan: Plan) -> None:
        self._announced, at, world = True, self._at, self._world
        found, live = self._checkpoint, isinstance(self._checkpoint, LiveCheckpoint)
        self._log.tell(
            events.Plan(
                run=self._config.name,
                start_step=at.step,
                total_steps=at.step + (self._epochs - at.epoch) * self._per_epoch - at.of_epoch,
                steps_per_epoch=self._per_epoch,
                epochs=self._epochs,
                batch_size=plan.slots * plan.micro_batch,
                slots=plan.slots,
                micro_batch=plan.micro_batch,
                world_size=world.size,
                device=device_name(world.device),
                parameters=sum(each.numel() for each in self.model.parameters()),
                train_samples=plan.rows,
                resumed_from=str(found.name) if found and not live else None,
                replaced=found.newcomers if isinstance(found, LiveCheckpoint) else None,
                hosts=self._membership.hosts,
                versions=software_versions(),
            )
        )
        self._checkpoint = None  # frees its memory

    def _record(self, step: OwnStep, is_last: bool) -> None:
        """Logs the step if that is due."""
        values, self._pending = self._pending, {}
        self._samples += step.samples
        if not (self.step == 1 or is_last or is_due(self.step, self._config.log.every_steps)):
            return
        failpoint("train.log", self.rank, self.step)
        steps, self._logged = self.step - self._logged, self.step
        trained_s, phases = self.clock.window()
        table = step_timing.measured(trained_s, phases, replace(self._world, size=1))
        samples, self._samples = self._samples, 0
        numbers = {"loss": step.loss, **values}
        record = events.Train(
            step=self.step,
            epoch=self.epoch,
            loss=float(numbers.pop("loss")),
            lr=self._rate,
            samples_per_s=samples / trained_s,
            seconds=self.clock.elapsed(),
            seconds_total=self._trained_s + self.clock.elapsed(),
            timing=step_timing.summary(table, steps, 0.0, None),
            scalars={name: float(value) for name, value in numbers.items()},
        )
        self._log.add(record)

    def _record_evaluation(self) -> None:
        """Logs what was given outside of steps."""
        values, self._pending = self._pending, {}
        if values:
            metrics = {name: float(value) for name, value in values.items()}
            self._log.add(events.Eval(self.step, max(0, self.epoch - 1), metrics))
