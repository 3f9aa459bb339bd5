"""Describes what happened to a run, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from raytrain_ddp.bottleneck import split_of
from raytrain_ddp.errors import signal_name
from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Failed,
    Note,
    Plan,
    Preempted,
    SweepStop,
    Train,
)
from raytrain_ddp.formatting import (
    error_summary,
    format_count,
    format_ranks,
    format_seconds,
    plural,
)
from raytrain_ddp.tools.report.run_files import RunFiles

Kind = Literal["start", "restart", "resize", "failure", "preempted", "trouble", "note", "end"]
State = Literal["running", "finished", "interrupted", "failed", "gone"]


@dataclass(frozen=True)
class HistoryEntry:
    """One thing that happened; `step` is None if unknown."""

    wall: float
    step: int | None
    kind: Kind
    text: str
    detail: str = ""


@dataclass(frozen=True)
class RunHistory:
    """A run as text.

    Args:
        state: "gone": it ended without an event.
        summary: the state in a sentence.
        cause: the failure in a line; "" unless failed.
    """

    files: RunFiles
    state: State
    summary: str
    cause: str
    happenings: Sequence[HistoryEntry]

    @property
    def limit(self) -> str:
        """The main bottleneck; "" if unknown."""
        return split_of(self.timed).limit()

    @property
    def timed(self) -> list[Train]:
        """The training records with timing."""
        return [r for r in self.files.train if r.timing.split_s]

    @property
    def plans(self) -> list[Plan]:
        """Of all starts."""
        return [event for event, _, _ in self.files.events if isinstance(event, Plan)]

    @property
    def worked_s(self) -> float:
        """Seconds of training in all starts, without work that a later start repeated."""
        return self.files.train[-1].seconds_total if self.files.train else 0.0

    @property
    def speed(self) -> str:
        """``1437 images/s``: of all workers, the median of the newest start; "" before the first
        record of the log."""
        plan = [Plan(), *self.plans][-1]
        start = plan.start_step
        newest = [r for r in self.files.train if r.step > start] or self.files.train
        speed = median(r.samples_per_s for r in newest) if newest else math.nan
        return "" if math.isnan(speed) else f"{format_count(speed)} {plan.unit}/s"


def history_of(files: RunFiles) -> RunHistory:
    """Raises nothing, whatever the files contain."""
    ends = [each for each in files.events if isinstance(each.event, Plan | End)]
    end = ends[-1].event if ends and isinstance(ends[-1].event, End) else None
    running = files.owner is not None
    if files.owner is not None and end is not None:  # "2026-11-20 18:05:31 UTC", with a T and a Z
        running = files.owner.since[:19].replace(" ", "T") > ends[-1].time[:19]
    cause = ""
    state: State = "gone"
    if running:
        state = "running"
    elif end is None:
        state = "finished" if files.manifest and files.manifest.finished else "gone"
    elif end.status == 0 or end.status > 128:
        state = "finished" if end.status == 0 else "interrupted"
    else:
        state = "failed"
        cause = error_summary(end.message) or f"exit status {end.status}"
        if end.rank is not None and f"rank {end.rank}" not in cause:
            cause += f" (rank {end.rank}"
            cause += f" on {end.node}" if end.node else ""
            cause += f", step {end.step})" if end.step else ")"
    summary = _summary(files, state, end)
    return RunHistory(files, state, summary, cause, list(_happenings(files)))


def _summary(files: RunFiles, state: State, end: End | None) -> str:
    step, total = (end.step if end else None) or files.last_step, files.total_steps
    at = f"step {format_count(step)}" + (f" of {format_count(total)}" if total else "")
    if state == "running":
        left_s = _left_s(files)
        left = f", about {format_seconds(left_s)} left" if math.isfinite(left_s) else ""
        return f"Running: {at}{left}." if files.train else "Running: the first step is not done."
    if state == "finished":
        return f"Finished at {at}."
    if state == "interrupted" and end is not None:
        by = f"Interrupted by {_signal(end.status)}"
        resume = "; the same command resumes it."
        return f"Stopped by the sweep at {at}." if _is_by_sweep(files) else f"{by} at {at}{resume}"
    if state == "failed":
        return f"Failed {'after ' + at if step else 'before its first step'}."
    if not step:
        return "Disappeared before its first step: its process was probably killed."
    return (
        f"Disappeared after {at}: its process was probably killed. Run the same command again to "
        "resume from the newest checkpoint."
    )


def _left_s(files: RunFiles) -> float:
    """Seconds that the newest start still needs; nan if unknown."""
    starts = [event.start_step for event, _, _ in files.events if isinstance(event, Plan)]
    last = files.train[-1] if files.train else None
    if last is None or not starts or last.step <= starts[-1]:
        return math.nan
    return (files.total_steps - last.step) * last.seconds / (last.step - starts[-1])


def _is_by_sweep(files: RunFiles) -> bool:
    """Whether a sweep ended the newest start."""
    ends = (event for event, _, _ in reversed(files.events) if isinstance(event, Plan | SweepStop))
    return isinstance(next(ends, None), SweepStop)


def _signal(status: int) -> str:
    name = signal_name(status - 128)
    return f"Ctrl-C ({name})" if name == "SIGINT" else name


def _happenings(files: RunFiles) -> Iterator[HistoryEntry]:
    before: Plan | None = None
    lost_at = math.nan
    stopped = by_sweep = False
    reached = 0
    for event, _, wall in files.events:
        match event:
            case Plan():
                yield _start(event, before, wall, wall - lost_at, reached, stopped)
                before, lost_at, stopped, by_sweep = event, math.nan, False, False
                reached = event.start_step
            case Failed():
                who = "The workers" if event.rank is None else f"Rank {event.rank}"
                reached, lost_at = max(reached, event.step or 0), wall
                yield HistoryEntry(wall, event.step, "failure", f"{who} {event.message}")
            case Preempted():
                lost_at = wall
                yield HistoryEntry(wall, None, "preempted", event.text)
            case Checkpoint():
                reached = max(reached, event.step)
            case CheckpointFailed():
                text = f"The checkpoint of step {event.step} could not be written"
                yield HistoryEntry(wall, event.step, "trouble", text, event.message)
            case SweepStop():
                by_sweep = True
            case Note():
                yield HistoryEntry(wall, None, "note", event.text)
            case End():
                stopped = True
                yield _end(event, wall, by_sweep)


def _start(
    plan: Plan, before: Plan | None, wall: float, lost_s: float, reached: int, stopped: bool
) -> HistoryEntry:
    step, workers = plan.start_step, plural(plan.world_size, "worker")
    on = f"{workers} on {plan.device}"
    if before is None:
        resumed = f"; resumed from {plan.resumed_from}" if plan.resumed_from else ""
        return HistoryEntry(wall, step, "start", f"Started with {on}{resumed}")
    resized = before.world_size != plan.world_size
    if plan.replaced is None:
        text = f"Resumed from step {step} with {on}"
        text += f" (before: {before.world_size})" if resized else ""
        text += f"; {plural(reached - step, 'step')} repeated" if reached > step else ""
    else:  # the step in progress was not done
        new = f"Continuing with {workers}"
        if plan.replaced:
            new = f"{format_ranks(plan.replaced).capitalize()} replaced"
        if plan.world_size > before.world_size:
            new = f"Grew from {before.world_size} to {workers}, nothing repeated"
        text = f"{new}; the others kept their state of step {step}"
    detail = ""
    if math.isfinite(lost_s):
        text += f"; {format_seconds(max(0.0, lost_s))} without training"
    elif plan.replaced is None:
        detail = "a new start of the command"
        detail += "" if stopped else "; the previous one disappeared"
    return HistoryEntry(wall, step, "resize" if resized else "restart", text, detail)


def _end(event: End, wall: float, by_sweep: bool) -> HistoryEntry:
    if event.status == 0:
        return HistoryEntry(wall, event.step, "end", "Finished")
    if event.status > 128:
        by = f"Interrupted by {_signal(event.status)}"
        text = "Stopped by the sweep" if by_sweep else by
        return HistoryEntry(wall, event.step, "trouble", text)
    first, _, rest = event.message.partition("\n")
    text = f"Ended with status {event.status}: {first}"
    return HistoryEntry(wall, event.step, "failure", text, rest)
