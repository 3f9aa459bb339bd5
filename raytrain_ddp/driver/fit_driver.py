"""The driver of `fit`: from a config to a trained model, with or without Ray."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.lease import holder
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.process import ranks_of_launcher, under_torchrun
from raytrain_ddp.config.recipe import dumps, publishable, settled, settled_note
from raytrain_ddp.config.train_config import TrainConfig, effect_notes
from raytrain_ddp.driver.finish import is_tidy, result_of, tidy, wait_for_rank_0
from raytrain_ddp.driver.preflight import answered, check, try_model
from raytrain_ddp.driver.result import FitResult, Listener
from raytrain_ddp.driver.run_naming import NamedRun, find_run, run_of_rank_0
from raytrain_ddp.driver.run_ownership import Show, driven, owned
from raytrain_ddp.errors import PreflightError, RaytrainError, RetriesExhausted, first_line
from raytrain_ddp.events import End, Event, Note, Outcome, Phase, Plan
from raytrain_ddp.process_state import process_as_found

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
    local: bool = False,
    address: str | None = None,
    dashboard: bool = False,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
    display: Listener | None = None,
    membership: Callable[[World, Show], Membership] | None = None,
) -> FitResult:
    """`raytrain_ddp.fit`, or with `local` `raytrain_ddp.fit_locally`; by default it shows and draws
    nothing. Only rank 0 holds the run, and writes.

    Args:
        membership: if `local`, replaces `Membership`, which has the same arguments.
    """
    started, rank = time.monotonic(), ranks_of_launcher()[0] if local else 0
    config, main = check(TrainConfig() if config is None else config), rank == 0
    if main:
        run = find_run(config, default_name, resume_from)
    else:
        run = run_of_rank_0(config, rank, default_name)
    with (main and display) or Listener() as shown:
        led = driven(run, shown.handle) if main else nullcontext((run, shown.handle))
        with led as (run, tell):
            config, folder = run.config, run.folder
            if run.manifest is not None and run.is_complete:
                result = _complete(run, run.manifest, shown, tell, main)
            else:
                watch = _Starts(tell, started)
                if local:
                    outcome = _train_here(run, main, watch, membership)
                else:
                    outcome = _train_on_ray(run, address, dashboard, watch)
                if main:
                    try:
                        shown.draw(folder, str(config.name))
                    except Exception as error:  # everything is trained and saved
                        watch.note(f"curves.png cannot be drawn: {first_line(error)}")
                else:
                    wait_for_rank_0(folder, outcome.step)
                seconds = watch.seconds(outcome.seconds)
                result = answered(config, lambda: result_of(folder, outcome, seconds))
                tell(End(result.exit_status, result.step))
        flags = f" --address {address}" if address else ""
        if local and not under_torchrun():
            flags = " --local"
        shown.summary(config, result, flags)
    return result


def _train_here(
    run: NamedRun,
    main: bool,
    watch: _Starts,
    membership_of: Callable[[World, Show], Membership] | None,
) -> Outcome:
    config = run.config
    watch(Phase("loading torch"))
    from raytrain_ddp.membership.process_group import nccl_settings
    from raytrain_ddp.tasks.task_loading import BUILT_IN
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import take_part
    from raytrain_ddp.training.membership import Membership
    from raytrain_ddp.training.runtime.world import from_all_ranks, has_bf16, join_world

    with process_as_found():  # restores torch, too
        watch.note(*effect_notes(config))
        tell = watch.note if main else None
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
            watch.note(chosen, _idle_gpus_note(world))
        membership = (membership_of or Membership)(world, watch)
        membership.stop_on_signals()
        try:
            outcome = take_part(membership, config, lambda _: build)
        finally:
            membership.leave()
    assert outcome is not None  # nobody else could have ended the run
    return outcome


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


def write_config(config: TrainConfig, run: Storage) -> None:
    """Writes config.toml: running it again reproduces the run."""
    shown = publishable(config)
    try:
        run.mkdir()
        run.write_atomic(CONFIG_FILE, dumps(shown).encode())
    except OSError as error:
        raise PreflightError(f"storage = {shown.storage}: cannot be written: {error}") from error


class _Starts:
    """Forwards events, and records when training began, at first and after the last failure.

    Args:
        started: when the command started.
    """

    def __init__(self, show: Show, started: float) -> None:
        self._show, self._started = show, started
        self._began: list[float] = []  # each start
        self._survived = False  # whether workers kept their state at the last start

    def __call__(self, event: Event) -> None:
        if isinstance(event, Plan):
            self._began.append(time.monotonic())
            self._survived = event.replaced is not None
        self._show(event)

    def note(self, *texts: str) -> None:
        """Shows these notes, except empty ones."""
        for text in filter(None, texts):
            self._show(Note(text))

    def seconds(self, spent: Mapping[str, float]) -> dict[str, float]:
        """The time of the whole command by part; `spent` is that of an `Outcome`."""
        now = time.monotonic()
        first, *_, last = self._began * 2 or [now, now]
        change = "change of workers" if self._survived else "restart"
        evaluation, checkpoints = (spent.get(each, 0.0) for each in ("evaluation", "checkpoint"))
        return {
            "start-up": first - self._started,
            **({f"until the last {change}": last - first} if last > first else {}),
            "training": spent["total"] - (evaluation + checkpoints),
            "evaluation": evaluation,
            "checkpoints": checkpoints,
            "total": now - self._started,
        }


def _train_on_ray(named: NamedRun, address: str | None, dashboard: bool, watch: _Starts) -> Outcome:
    from raytrain_ddp.ray_backend.cluster import (
        cluster,
        dashboard_note,
        only_one,
        start_warm_server,
    )
    from raytrain_ddp.ray_backend.placement import Layout
    from raytrain_ddp.ray_backend.ray_process import in_ray_process, ray_output_to_file
    from raytrain_ddp.ray_backend.task_transfer import pickled_task
    from raytrain_ddp.ray_backend.training_launch import run_workers
    from raytrain_ddp.tasks.task_loading import BUILT_IN, task_of

    config, run = named.config, named.folder
    committed = named.manifest.step if named.manifest else 0
    watch.note(*effect_notes(config))
    if why := start_warm_server(config, address):
        watch.note(f"workers start without warm processes: {why}")
    if config.task in BUILT_IN:
        try_model(config, is_new=not committed)
    else:  # checked before anything is started; loads torch, which Ray Train does later anyway
        watch(Phase("loading the task"))
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
                watch.note(about, event.note)
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
    return outcomes[0]


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
    return answered(config, lambda: result_of(folder, manifest.step, {}))
