"""The driver of `fit`: from a config to a trained model, with or without Ray."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from raytrain_ddp.checkpoint.lease import holder
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.automatic import settled, settled_note
from raytrain_ddp.config.environment import ranks_of_launcher, under_torchrun
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.config.rules import effect_notes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.branching import run_and_branch
from raytrain_ddp.driver.finish import (
    is_tidy,
    result_of,
    run_summary,
    tidy,
    wait_for_rank_0,
)
from raytrain_ddp.driver.preflight import answered, check, is_complete, try_model
from raytrain_ddp.driver.result import FitResult, Listener
from raytrain_ddp.driver.run_naming import NamedRun, run_of_rank_0
from raytrain_ddp.driver.run_ownership import Show, driven, owned
from raytrain_ddp.errors import PreflightError, RaytrainError, RetriesExhausted, first_line
from raytrain_ddp.events import End, Event, Note, Outcome, Phase, Plan
from raytrain_ddp.process_state import process_as_found
from raytrain_ddp.ray_backend.ray_output import ray_output_to_file

if TYPE_CHECKING:
    from raytrain_ddp.training.membership import Membership
    from raytrain_ddp.training.runtime.world import World

# New objects, 700 by default. The collector takes an eighth of the CPU of importing torch and Ray
# Train; the driver of a run on Ray keeps neither tensors nor much else.
_COLLECT_AFTER = 200_000


@process_as_found()
def fit(
    config: TrainConfig | None = None,
    *,
    address: str | None = None,
    dashboard: bool = False,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
    display: Listener | None = None,
) -> FitResult:
    """`raytrain_ddp.fit.fit`, which has the same arguments; shows and draws nothing by default."""

    def train(run: NamedRun, show: Show) -> tuple[Outcome, _Starts]:
        return _train_on_ray(run, address, dashboard, show)

    flags = f" --address {address}" if address else ""
    return _fit(config, default_name, resume_from, display or Listener(), train, flags)


@process_as_found()
def fit_locally(
    config: TrainConfig | None = None,
    *,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
    display: Listener | None = None,
    membership: Callable[[World, Show], Membership] | None = None,
) -> FitResult:
    """`raytrain_ddp.fit.fit_locally`; shows and draws nothing by default.

    Args:
        membership: replaces `Membership`, which has the same arguments.
    """
    rank, _, _ = ranks_of_launcher()

    def train(run: NamedRun, show: Show) -> tuple[Outcome, _Starts]:
        show(Phase("loading torch"))
        from raytrain_ddp.training import loop  # noqa: F401

        with process_as_found():  # restores torch, too
            return _train_here(run, rank == 0, show, membership)

    flags = "" if under_torchrun() else " --local"
    shown = (rank == 0 and display) or Listener()
    return _fit(config, default_name, resume_from, shown, train, flags, rank)


def _fit(
    config: TrainConfig | None,
    default_name: str | None,
    resume_from: str | os.PathLike[str] | None,
    display: Listener,
    train: Callable[[NamedRun, Show], tuple[Outcome, _Starts]],
    flags: str,
    rank: int = 0,
) -> FitResult:
    """The part that all ways to train have in common: only rank 0 holds the run, and writes."""
    started = time.monotonic()
    config = check(TrainConfig() if config is None else config)
    main = rank == 0
    if main:
        run, branch = run_and_branch(config, default_name, resume_from)
    else:
        run, branch = run_of_rank_0(config, rank, default_name), None
    with display as shown:
        led = driven(run, shown.handle, branch) if main else nullcontext((run, shown.handle))
        with led as (run, tell):
            config, folder = run.config, run.folder
            if run.manifest is not None and is_complete(config, run.manifest):
                result = _complete(run, run.manifest, shown, tell, main)
            else:
                outcome, watch = train(run, tell)
                if main:
                    _draw(config, folder, shown, tell)
                else:
                    wait_for_rank_0(folder, outcome.step)
                result = _end(config, folder, outcome, watch, started)
                tell(End(result.exit_status, result.step))
        shown.summary(str(config.name), result, *run_summary(config, result, flags))
    return result


def _train_here(
    run: NamedRun,
    main: bool,
    show: Show,
    membership_of: Callable[[World, Show], Membership] | None,
) -> tuple[Outcome, _Starts]:
    config = run.config
    _note_idle(config, show)
    from raytrain_ddp.membership.process_group import nccl_settings
    from raytrain_ddp.tasks.task_loading import BUILT_IN
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import take_part
    from raytrain_ddp.training.membership import Membership
    from raytrain_ddp.training.runtime.world import from_all_ranks, has_bf16, join_world

    tell = (lambda text: show(Note(text))) if main else None
    world = join_world(config.scaling, config.exact, nccl_settings(config), tell)
    asked = config
    config = settled(config, all(from_all_ranks(has_bf16(world.device), world)))
    build = Build(config, world)
    _ = build.task  # checked before anything is written
    if main:
        if config.task in BUILT_IN:
            try_model(config, is_new=run.manifest is None)
        write_config(config, run.folder)
        chosen = settled_note(asked, config) if world.device.type == "cuda" else ""
        for text in filter(None, (chosen, _idle_gpus_note(world))):
            show(Note(text))
    watch = _Starts(show)
    membership = (membership_of or Membership)(world, watch)
    membership.stop_on_signals()
    try:
        outcome = take_part(membership, config, lambda _: build)
    finally:
        membership.leave()
    assert outcome is not None  # nobody else could have ended the run
    return outcome, watch


def _idle_gpus_note(world: World) -> str:
    """A note if a process that trains alone leaves other GPUs of its machine idle."""
    import torch

    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.size > 1 or gpus < 2:
        return ""
    return (
        f"1 of {gpus} GPUs is used: this is one process. To use all of them, omit --local, or "
        f"use torchrun --nproc-per-node {gpus}."
    )


def _note_idle(config: TrainConfig, show: Show) -> None:
    for text in effect_notes(config):
        show(Note(text))


def write_config(config: TrainConfig, run: Storage) -> None:
    """Writes config.toml: running it again reproduces the run."""
    shown = publishable(config)
    try:
        run.mkdir()
        run.write_atomic(CONFIG_FILE, dumps(shown).encode())
    except OSError as error:
        raise PreflightError(f"storage = {shown.storage}: cannot be written: {error}") from error


class _Starts:
    """Forwards events, and records when training began, at first and after the last failure."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self.first_began = self.began = time.monotonic()
        self._none_yet = True
        self.survived = False  # whether workers kept their state at the last start

    def __call__(self, event: Event) -> None:
        if isinstance(event, Plan):
            self.began = time.monotonic()
            self.survived = event.replaced is not None
            if self._none_yet:
                self.first_began, self._none_yet = self.began, False
        self._show(event)


def _train_on_ray(
    named: NamedRun, address: str | None, dashboard: bool, show: Show
) -> tuple[Outcome, _Starts]:
    from raytrain_ddp.ray_backend.cluster import (
        cluster,
        dashboard_note,
        only_one,
        start_warm_server,
    )
    from raytrain_ddp.ray_backend.placement import Layout
    from raytrain_ddp.ray_backend.ray_process import in_ray_process
    from raytrain_ddp.ray_backend.task_transfer import pickled_task
    from raytrain_ddp.ray_backend.training_launch import run_workers
    from raytrain_ddp.tasks.task_loading import BUILT_IN, task_of

    config, run, watch = named.config, named.folder, _Starts(show)
    committed = named.manifest.step if named.manifest else 0
    _note_idle(config, show)
    if why := start_warm_server(config, address):
        show(Note(f"workers start without warm processes: {why}"))
    if config.task in BUILT_IN:
        try_model(config, is_new=not committed)
    else:  # checked before anything is started; loads torch, which Ray Train does later anyway
        show(Phase("loading the task"))
        task_of(config)
    lease, outcomes = holder(run), list[Outcome]()

    def work(tell: Callable[[object], None]) -> None:
        gc.set_threshold(_COLLECT_AFTER)
        phase = lambda name: tell(Phase(name))  # noqa: E731
        with cluster(config, address, dashboard, phase) as layout:
            tell(layout)
            chosen, task = settled(config, layout.has_bf16), pickled_task(config)
            if note := dashboard_note():
                tell(note)
            tell(run_workers(chosen, run, layout, tell, committed, task, lease))

    def take(event: Layout | Outcome | Event) -> None:
        match event:
            case Layout():
                config.require_synced(event.least, event.most, event.use_gpu)
                chosen = settled(config, event.has_bf16)
                write_config(chosen, run)
                about = settled_note(config, chosen) if event.use_gpu else ""
                for text in filter(None, (about, event.note)):
                    show(Note(text))
            case Outcome():
                outcomes.append(event)
            case _:
                watch(event)

    with only_one(), ray_output_to_file(run):
        try:
            in_ray_process(work, take)
        except RetriesExhausted:
            if not outcomes:
                raise
    return outcomes[0], watch


def _end(
    config: TrainConfig, run: Storage, outcome: Outcome, watch: _Starts, started: float
) -> FitResult:
    parts, again = outcome.seconds, watch.began - watch.first_began
    change = "change of workers" if watch.survived else "restart"
    not_training_s = parts.get("evaluation", 0.0) + parts.get("checkpoint", 0.0)
    seconds = {
        "start-up": watch.first_began - started,
        **({f"until the last {change}": again} if again else {}),
        "training": parts["total"] - not_training_s,
        "evaluation": parts.get("evaluation", 0.0),
        "checkpoints": parts.get("checkpoint", 0.0),
        "total": time.monotonic() - started,
    }
    signal, done, in_all = outcome.signal, outcome.step, outcome.total_steps
    status: Literal["finished", "interrupted"] = "interrupted" if signal else "finished"
    result = answered(config, lambda: result_of(run, status, done, in_all, seconds, signal))
    return replace(result, of_ray=outcome.of_ray)


def _draw(config: TrainConfig, run: Storage, listener: Listener, show: Show) -> None:
    try:
        listener.draw(run, str(config.name))
    except Exception as error:  # not a reason to fail: everything is trained and saved
        show(Note(f"curves.png cannot be drawn: {first_line(error)}"))


def _complete(
    run: NamedRun, manifest: Manifest, listener: Listener, show: Show, main: bool
) -> FitResult:
    """Nothing is left to train, but the start that finished it may have been killed right after."""
    config, folder = run.config, run.folder
    if main and not answered(config, lambda: is_tidy(folder)):
        # Another process that drives the run tidies it as well; a read-only storage stays as it is.
        with suppress(RaytrainError, OSError), owned(run, show) as tell:
            tidy(config, folder, manifest)
            listener.draw(folder, str(config.name))
            tell(End(0, manifest.step))
    step = manifest.step
    return answered(config, lambda: result_of(folder, "already complete", step, step, {}))
