"""``--dry-run``: what would be done, in numbers. Takes no worker and does not start Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.run_folder import newest_checkpoint
from raytrain_ddp.config.recipe import dumps, publishable, settled
from raytrain_ddp.config.train_config import TrainConfig, effect_notes, step_notes, unread_notes
from raytrain_ddp.data.splits import Splits
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.driver.run_naming import NamedRun, find_run, new_code_note
from raytrain_ddp.driver.run_ownership import require_free
from raytrain_ddp.events import Event, Note
from raytrain_ddp.ray_backend.placement import (
    Layout,
    choose_layout,
    embedded_resources,
    lack_of_room,
    local_resources,
)
from raytrain_ddp.tools.formatting import format_data

if TYPE_CHECKING:
    from raytrain_ddp.training.build import Build

_SAMPLES = 8  # in the trial batch


def dry_run(
    config: TrainConfig,
    default_name: str | None = None,
    resume_from: str | None = None,
    local: bool = False,
) -> str:
    """The fields that are not the defaults, then what follows from the config.

    Args:
        local: of a run in this process, without Ray.

    Raises:
        RaytrainError: any error that `fit` would raise before it takes workers, except for their
            number.
    """
    named = config.data.classes  # classes found in the data are listed below
    run = find_run(check(config), default_name, resume_from)
    config, manifest = run.config, run.manifest
    if not run.is_complete:
        require_free(run.folder)
    have = local_resources()
    layout, where = _workers(config, have, local)
    asked = replace(config, data=replace(config.data, classes=named))
    config = settled(config, has_bf16=False)  # for the trial batch, which is on the CPU
    import torch

    from raytrain_ddp.data.order import items_of_rank
    from raytrain_ddp.training.build import Build, plan_for
    from raytrain_ddp.training.optimizer.task_optimizer import replaced_fields
    from raytrain_ddp.training.runtime.world import World

    world = World(0, 1, 0, torch.device("cpu"), torch.get_num_threads())
    plain = replace(config, compute=replace(config.compute, compile=False))
    build = Build(plain, world, is_begun=manifest is not None)
    build.open_data()
    task, data, eval_data = build.task, build.data, build.eval_data
    build.plan = plan = plan_for(config, data, layout.most)
    per_epoch, repeats = plan.steps_per_epoch, config.augment.repeats
    steps = config.total_steps(per_epoch)
    size_bytes, tried = _tried(build)
    notes = [
        *effect_notes(config),
        *step_notes(config, per_epoch),
        *filter(None, (layout.note, new_code_note(run))),
        *tried,
        *task.notes,
        *unread_notes(config, build.reads, replaced_fields(task, build.optimizer, config)),
    ]
    if checkpoint := newest_checkpoint(run.folder):
        build.identity.require_same(checkpoint)
        size_bytes = checkpoint.manifest.size_bytes
    least, epochs = min(layout.least, layout.most), steps / per_epoch
    per_worker = [len(items_of_rank(config.slots, least, rank)) for rank in range(least)]
    rates = {
        f"{epoch:g}": build.rates(min(steps - 1, int(epoch * per_epoch)))[0]
        for epoch in sorted({0.0, min(config.schedule.warmup_epochs, epochs), epochs / 2, epochs})
    }
    rows = data.rows // repeats if config.augment.spread_repeats else data.rows
    times = f" of {rows} x {repeats} {task.unit}" if repeats > 1 else ""
    summary = task.splits.summary() if isinstance(task.splits, Splits) else None
    data_lines = format_data(summary, task.unit) or [
        ("training set", f"{data.rows} {task.unit}"),
        ("evaluation", f"{eval_data.rows} {task.unit}" if eval_data else "none"),
    ]
    lacking = "" if local else lack_of_room(layout, [embedded_resources(config, layout, have)])
    lines = [
        "# Fields that differ from the defaults; --print-config prints all.",
        dumps(publishable(asked), TrainConfig()).rstrip(),
        "",
        f"batch          {config.batch_size} = {config.slots} slots x {config.micro_batch} "
        f"{task.unit}",
        f"workers        {where}; slots per worker: {', '.join(map(str, per_worker))}",
        *(f"{title:<14} {text}" for title, text in data_lines),
        f"steps          {per_epoch} per epoch{times} (the last has {plan.samples(per_epoch - 1)} "
        f"{task.unit}), {steps} in {epochs:.4g} epoch{'s' * (epochs != 1)}",
        "learning rate  " + ", ".join(f"epoch {e}: {r:.3g}" for e, r in rates.items()),
        f"model          {sum(p.numel() for p in build.model.parameters()):,} parameters",
        f"checkpoint     {f'{size_bytes / 2**20:.1f} MiB, ' if size_bytes else ''}in {run.folder}",
        f"run            {config.name} {_run_state(run)}",
        *(f"note           {text}" for text in notes),
        *([f"note           this machine has no room: {lacking}"] if lacking else []),
    ]
    return "\n".join(lines)


def _workers(config: TrainConfig, have: Mapping[str, float], local: bool) -> tuple[Layout, str]:
    """The workers, and what they are called."""
    layout = choose_layout(config, have)
    if not local:
        # This machine may lack the GPUs that the run is for.
        config.require_synced(layout.least, layout.most, config.scaling.use_gpu is not False)
        each = " + ".join(f"{amount:g} {name}" for name, amount in layout.per_worker.items())
        return layout, f"{layout.said}, each {each}, over {layout.backend}"
    of_gpu = {name: count for name, count in layout.per_worker.items() if name == "GPU"}
    place = f"this process, on {'cuda' if layout.use_gpu else 'cpu'}"
    return replace(layout, least=1, most=1, per_worker=of_gpu, note=""), place


def _run_state(run: NamedRun) -> str:
    """Says whether the run would be created, resumed, or found complete."""
    state = "would be created"
    if run.manifest is not None:
        what = "is complete at" if run.is_complete else "would resume from"
        state = f"{what} step {run.manifest.step}"
    if run.branch is not None:
        state += f", and {run.branch}"
    return f"{state} ({run.note})" if run.note else state


def _tried(build: Build) -> tuple[int, list[str]]:
    """Rehearses a new run, and warms up with small batches. Returns the size of a checkpoint in
    bytes (0 if unknown), and notes."""
    from raytrain_ddp.training.rehearsal import rehearse, rehearse_evaluation
    from raytrain_ddp.training.steps.warm_up import warm_up, warm_up_notes

    told: list[Event] = []
    size_bytes = rehearse(build, told.append, _SAMPLES)
    rehearse_evaluation(build, told.append, _SAMPLES)
    build.warmed_up = warm_up(build, build.model, lambda _: None, _SAMPLES)
    notes = [event.text for event in told if isinstance(event, Note)]
    return size_bytes, [*warm_up_notes(build.warmed_up), *notes]
