"""Describes what happened to a run, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

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
)
from raytrain_ddp.formatting import (
    error_summary,
    format_count,
    format_ranks,
    format_seconds,
    plural,
)
from raytrain_ddp.tools.report.run_files import Run


class Happening(NamedTuple):
    """One thing that happened.

    Args:
        time: as in events.jsonl; "" if unknown. step: None if unknown. flag: a sign for charts.
        detail: a traceback.
    """

    time: str
    step: int | None
    kind: Literal["start", "restart", "failure", "trouble", "note", "end"]
    text: str
    flag: str = ""
    detail: str = ""


class State(NamedTuple):
    """How a run is. "stopped": by its sweep. "gone": it ended without an event. `cause`: of a
    failure, in a line."""

    name: Literal["running", "finished", "stopped", "interrupted", "failed", "gone"]
    summary: str
    cause: str = ""


def state_of(run: Run) -> State:
    """Raises nothing, whatever the files contain."""
    known = [each for each in run.events if isinstance(each.event, Plan | SweepStop | End)]
    end = known[-1].event if known and isinstance(known[-1].event, End) else None
    step, total = (end.step if end else None) or run.last_step, run.plan.total_steps
    at = f"step {format_count(step)}" + (f" of {format_count(total)}" if total else "")
    after = f"after {at}" if step else "before its first step"
    # "2026-11-20 18:05:31 UTC", with a T and a Z
    if run.owner and not (end and run.owner.since[:19].replace(" ", "T") <= known[-1].time[:19]):
        left, last = "", run.newest[-1] if run.newest else None
        if last and math.isfinite(last.seconds):
            left_s = (total - last.step) * last.seconds / (last.step - run.plan.start_step)
            left = f", about {format_seconds(left_s)} left"
        return State("running", f"Running: {at if run.train else 'before the first step'}{left}.")
    if end.status == 0 if end else run.manifest and run.manifest.finished:
        return State("finished", f"Finished at {at}.")
    if end is None:
        again = "its process was probably killed; the same command continues it"
        return State("gone", f"Disappeared {after}: {again}.")
    if isinstance(known[-2:][0].event, SweepStop):
        return State("stopped", f"Stopped by the sweep at {at}.")
    if end.status > 128:
        return State("interrupted", f"{_interrupted(end)} at {at}.")
    cause = error_summary(end.message) or f"exit status {end.status}"
    first = "" if end.rank is None else f", first on rank {end.rank} of node {end.node or '?'}"
    return State("failed", f"Failed {after}{first}.", cause)


def _interrupted(end: End) -> str:
    name = signal_name(end.status - 128)
    return f"Interrupted by {f'Ctrl-C ({name})' if name == 'SIGINT' else name}"


def happenings(run: Run) -> Iterator[Happening]:
    """What happened, in chronological order."""
    before: Plan | End | None = None  # the start, or the end of its command
    size, lost_at, reached = 0, math.nan, 0
    for event, time, wall in run.events:
        match event:
            case Plan():
                text = _start(event, before, size, reached)
                if math.isfinite(lost_at):
                    text += f"; {format_seconds(max(0.0, wall - lost_at))} without training"
                flag = "↻" if size == event.world_size else f"{size}→{event.world_size}"
                yield Happening(
                    time, event.start_step, "restart" if before else "start", text, flag
                )
                before, size, lost_at = event, event.world_size, math.nan
                reached = event.start_step
            case Failed():
                who = "The workers" if event.rank is None else f"Rank {event.rank}"
                reached, lost_at = max(reached, event.step or 0), wall
                yield Happening(time, event.step, "failure", f"{who} {event.message}")
            case Preempted():
                lost_at = wall
                yield Happening(time, None, "trouble", event.text)
            case Checkpoint():
                reached = max(reached, event.step)
            case CheckpointFailed():
                text = f"The checkpoint of step {event.step} could not be written"
                yield Happening(time, event.step, "trouble", text, detail=event.message)
            case Note():
                yield Happening(time, None, "note", event.text)
            case SweepStop():
                yield Happening(time, None, "note", "Stopped by the sweep")
            case End():
                before = event
                yield _end(event, time)


def _start(plan: Plan, before: Plan | End | None, size: int, reached: int) -> str:
    step, workers = plan.start_step, plural(plan.world_size, "worker")
    on = f"with {workers} on {plan.device}"
    if before is None:
        return f"Started {on}" + (f"; resumed from {plan.resumed_from}" * bool(plan.resumed_from))
    if plan.replaced is not None:  # the step in progress was not done
        text = f"Continuing with {workers}"
        if plan.world_size > size:
            text = f"Grew from {size} to {workers}, nothing repeated"
        elif plan.replaced:
            text = f"{format_ranks(plan.replaced).capitalize()} replaced"
        return f"{text}; the others kept their state of step {step}"
    text = f"Resumed from step {step} {on}"
    text += f" (before: {size})" if size != plan.world_size else ""
    text += f"; {plural(reached - step, 'step')} repeated" if reached > step else ""
    return text


def _end(event: End, time: str) -> Happening:
    if event.status == 0:
        return Happening(time, event.step, "end", "Finished")
    if event.status > 128:
        return Happening(time, event.step, "trouble", _interrupted(event))
    first, _, rest = event.message.partition("\n")
    text = f"Ended with status {event.status}: {first}"
    return Happening(time, event.step, "failure", text, detail=rest)
