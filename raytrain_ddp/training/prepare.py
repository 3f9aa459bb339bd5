"""Prepares a run from its config: all choices are made here, none in the loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from raytrain_ddp import events, messages
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.rules import step_notes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.unread import unread_notes
from raytrain_ddp.data.loading.loader import TrainLoader, memory_note, start_processes
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.splits import Splits
from raytrain_ddp.errors import DataError, first_names
from raytrain_ddp.events import LogRecord
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import eval_data_of, train_data_of
from raytrain_ddp.training.gradients.reduction import ExactReduction, broadcast_model
from raytrain_ddp.training.membership.generations import NoStateLeft
from raytrain_ddp.training.membership.same_nodes import require_same_nodes, versions_here
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.step_timing import Stragglers, peak_flops_per_s
from raytrain_ddp.training.optimizer.lr_schedule import LearningRates
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of, replaced_fields
from raytrain_ddp.training.optimizer.weight_average import average_of
from raytrain_ddp.training.prepared_run import PreparedRun
from raytrain_ddp.training.run_identity import RunIdentity
from raytrain_ddp.training.runtime.world import World, device_name, set_up, software_versions
from raytrain_ddp.training.session import Kept, Session, WarmUp
from raytrain_ddp.training.start.initial_model import model_for
from raytrain_ddp.training.start.sanity_check import try_evaluation
from raytrain_ddp.training.state.live_state import LiveCheckpoint
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.device_feed import (
    Feed,
    loader_threads,
    plan_for,
    plan_of,
    train_loader,
)
from raytrain_ddp.training.steps.early_stop import ends_of, last_metrics, require_evaluation
from raytrain_ddp.training.steps.nonfinite import handle_nonfinite
from raytrain_ddp.training.steps.step import Stepper, make_stepper
from raytrain_ddp.training.steps.warm_up import Forward, require_equal_calls, warm_up, warm_up_notes


def prepare(
    config: TrainConfig, task: Task, session: Session, reads: Collection[str] | None = None
) -> PreparedRun:
    """Builds, places, wraps and warms up the model; loads the newest checkpoint. All ranks; one
    with a `Kept` reuses that."""
    world = session.world
    set_up(world, config.compute)
    config.require_slots(world.size)
    config.require_synced(world.size, world.size, world.device.type == "cuda")
    clock = Clock(world.device)
    session.watch(clock)
    require_same_nodes(world)
    session.tell(messages.Phase("opening the data"))
    kept = session.kept
    data, eval_data = kept.data if kept else _open(config, task, world)
    splits = _counted_splits(task, world)
    plan = plan_for(config, data, world.size)

    failpoint("start.opened", world.rank)
    session.tell(messages.Phase("preparing the model"))
    model = model_for(config, task, world, kept, session.survived)
    optimizer = optimizer_of(task, model, config)
    rates = LearningRates(task, optimizer, config, plan.steps_per_epoch)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.compute.precision == "fp16")
    state = TrainState(model, optimizer, scaler)
    loader = train_loader(config, data, plan, world)
    refuse = partial(handle_nonfinite, config, state, session, loader)
    stepper = make_stepper(config, task, state, session, clock, refuse, plan.steps_per_epoch)
    state.average = average_of(model, optimizer, config.ema)
    found = _warm_up(config, task, stepper, loader, kept)
    flops = stepper.adopt(found)
    if eval_data is not None and (kept is None or kept.model is None):
        try_evaluation(config, task, model, eval_data, world, session.tell)
    if kept is None or not kept.has_trained:
        _tell_notes(config, task, loader, state, session, reads, found)
    failpoint("start.warmed_up", world.rank)

    identity = kept.identity if kept else RunIdentity.of(config, data, eval_data, task)
    identity.require_alike(world)
    checkpoint = session.latest(state.existing())
    if checkpoint is not None:
        identity.require_same(checkpoint)
    live = checkpoint if isinstance(checkpoint, LiveCheckpoint) else None
    if checkpoint is None and (session.survived or (kept and kept.has_trained)):
        raise NoStateLeft("neither a usable state nor a checkpoint is left: training starts over")
    log = _loaded(state, checkpoint, world)
    _tell(session, None if live else _kept_note(config, state))
    session.restore_log(log)
    cadence, patience, trained_s = ends_of(config, task, plan, state, log)
    failpoint("start.loaded", world.rank, state.step)
    session.tell(
        events.Plan(
            run=config.name,
            start_step=state.step,
            total_steps=cadence.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            epochs=-(-config.total_steps(plan.steps_per_epoch) // plan.steps_per_epoch),
            batch_size=config.batch_size,
            slots=config.slots,
            micro_batch=config.micro_batch,
            world_size=world.size,
            device=device_name(world.device),
            parameters=sum(p.numel() for p in model.parameters()),
            train_samples=data.rows,
            eval_samples=eval_data.rows if eval_data else 0,
            unit=task.unit,
            data=splits.summary() if splits else None,
            resumed_from=str(checkpoint.name) if checkpoint and live is None else None,
            replaced=live.newcomers if live else None,
            hosts=session.hosts,
            versions=software_versions(),
        )
    )
    clock.start()
    run = PreparedRun(
        config=config,
        task=task,
        session=session,
        state=state,
        plan=plan,
        rates=rates,
        cadence=cadence,
        patience=patience,
        trained_s=trained_s,
        feed=Feed(config, loader, eval_data, state, session, clock),
        stepper=stepper,
        eval_data=eval_data,
        identity=identity,
        logged_step=state.step,
        clock=clock,
        stragglers=Stragglers(plan.slots, world.size, world.of_run),
        flops=flops,
        metrics=last_metrics(log, state.step),
        live=live,
        peak_flops_per_s=peak_flops_per_s(device_name(world.device), config.compute.precision),
    )
    session.confirm()  # the weights that rank 0 sent
    session.begin(run.take_live, _kept(run, model, found))
    return run


def _kept(run: PreparedRun, model: nn.Module, found: Mapping[str, WarmUp]) -> Kept | None:
    """All or nothing: the task, its data and its model may refer to each other."""
    data, eval_data = run.feed.loader.data, run.eval_data
    is_shared = data.shared and (eval_data is None or eval_data.shared)
    # Other data may hold open files by now, which cannot be copied to loader processes.
    if not is_shared or not _keeps_model(run.config, run.task):
        return None
    return Kept((data, eval_data), run.identity, model, found, has_trained=True)


def prepare_alone(config: TrainConfig, task: Task, world: World) -> Kept:
    """Builds what a process can before it joins a run in progress.

    Args:
        world: of this process alone.

    Raises:
        ConfigError, DataError, TaskError: as `prepare`.
    """
    set_up(world, config.compute)
    data, eval_data = _open(config, task, world)
    failpoint("start.alone", world.of_run(0))
    versions_here()  # caches them
    identity = RunIdentity.of(config, data, eval_data, task)
    kept = Kept((data, eval_data), identity, None, {}, has_trained=False)
    if not _keeps_model(config, task):
        return kept
    model = model_for(config, task, world, None)
    loader = train_loader(config, data, plan_of(config, data), world)
    run = Forward(config, task, model, model, world)
    require = partial(ExactReduction.require_all, model)
    found = warm_up(run, require, *_batches(loader, config.data.grow_epochs))
    if eval_data is not None:
        try_evaluation(config, task, model, eval_data, world, lambda _: None)
    return replace(kept, model=model, warm_up={"": found})


def _keeps_model(config: TrainConfig, task: Task) -> bool:
    """Whether nothing that depends on the ranks refers to the model, as DDP does."""
    return config.exact and getattr(task, "optimizer", None) is None


def _loaded(state: TrainState, checkpoint: Checkpoint | None, world: World) -> list[LogRecord]:
    """Loads the checkpoint, if any, or makes all ranks begin with the same weights; all take part.
    Returns the log so far."""
    log = [] if checkpoint is None else state.load(checkpoint)
    broadcast_model(state.model, world, is_loaded=checkpoint is not None)
    if checkpoint is None and state.average is not None:
        state.average.restart()
    return log


def _tell_notes(
    config: TrainConfig,
    task: Task,
    loader: TrainLoader,
    state: TrainState,
    session: Session,
    reads: Collection[str] | None,
    found: Mapping[str, WarmUp],
) -> None:
    """Notes what is allowed, but may not be intended."""
    _tell(session, *step_notes(config, loader.plan.steps_per_epoch), *warm_up_notes(found))
    note = memory_note(loader, config.data.memory_mib * 2**20)
    unread = unread_notes(config, reads, replaced_fields(task, state.optimizer, config))
    of_task = getattr(task, "notes", ())  # of the built-in ones
    _tell(session, note, *of_task, _mode_note(state.model), _compiled_note(state.model), *unread)


def _tell(session: Session, *notes: str | None) -> None:
    """Shows those that are not empty."""
    for text in filter(None, notes):
        session.tell(events.Note(text))


def _counted_splits(task: Task, world: World) -> Splits | None:
    """The task's splits, if it has some, which are counted in the background; on rank 0."""
    splits = getattr(task, "splits", None) if world.is_main else None
    if not isinstance(splits, Splits):
        return None
    splits.begin_counting()
    return splits


def _open(config: TrainConfig, task: Task, world: World) -> tuple[Data, Data | None]:
    """The data to train and to evaluate on, with their loader processes, if any."""
    data, eval_data = train_data_of(task, config.seed), eval_data_of(task, config.seed)
    require_evaluation(config, eval_data)
    if data.source.blocks.min() < 1:
        raise DataError("the training set has a block of 0 rows: remove it from Source.blocks.")
    for each in filter(None, (data, eval_data)):
        start_processes(each, loader_threads(config.data, world.threads))
    return data, eval_data


def _warm_up(
    config: TrainConfig, task: Task, stepper: Stepper, loader: TrainLoader, kept: Kept | None
) -> Mapping[str, WarmUp]:
    """See `Stepper.warm_up` and `require_equal_calls`."""
    found = kept.warm_up if kept is not None else {}
    if not found:  # with images of an epoch that has the largest
        found = stepper.warm_up(*_batches(loader, config.data.grow_epochs))
    require_equal_calls(task, found, config, loader.world_size)
    return found


def _kept_note(config: TrainConfig, state: TrainState) -> str | None:
    if not state.kept_options:
        return None
    return (
        f"the optimizer continues with {first_names(state.kept_options)}, as the checkpoint has "
        f"it; to use the new value, start a new run with --model.weights {config.name}."
    )


def _batches(loader: TrainLoader, epoch: int) -> tuple[Batch, int, Batch, Batch | None]:
    """The batches of a warm-up: a usual one and its samples, the smallest, one sample if needed."""
    batch = loader.any_batch(epoch=epoch)
    smallest = loader.any_batch(loader.plan.smallest_slot, epoch)
    single = loader.any_batch(1, epoch) if loader.skip else None
    return batch, loader.data.samples_of(batch), smallest, single


def _compiled_note(model: nn.Module) -> str | None:
    """A note if the task has compiled the model, or a part of it, which renames its parameters."""
    name = next((name for name in model.state_dict() if "_orig_mod." in name), None)
    if name is None:
        return None
    return (
        f"model() has compiled modules, so names in checkpoints contain _orig_mod. ({name}). To "
        "keep the names, use --compute.compile, or module.compile() instead of "
        "torch.compile(module)."
    )


def _mode_note(model: nn.Module) -> str | None:
    """A note if the whole model is in evaluation mode, as some libraries return it."""
    if any(module.training for module in model.modules()):
        return None
    return (
        "model() returned the whole model in evaluation mode, and it stays there: no dropout, "
        "fixed batch norm statistics. If that is not intended, call train() on it in model()."
    )
