"""Reads the folder of a run without changing it, even while the run is in progress, and describes
what happened to the run, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    FOLLOWED_FILE,
    METRICS_FILE,
    newest_manifest,
    open_run,
    parsed_lines,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of, parse
from raytrain_ddp.errors import PreflightError, first_line, signal_name
from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Eval,
    Failed,
    Note,
    Plan,
    Preempted,
    SweepStop,
    Train,
)
from raytrain_ddp.records import Timed, log_records, stored_events
from raytrain_ddp.tools.formatting import (
    error_summary,
    format_count,
    format_metric,
    format_ranks,
    format_seconds,
    plural,
)
from raytrain_ddp.tools.report.bottleneck import split_of


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        train, evals: of its log, by step; and the evaluations of `evaluate --follow`.
        events: in the order in which they were written.
        config: the fields in config.toml, by their full names.
        manifest: of the newest readable checkpoint.
        owner: the process that drives the run, as far as known.
        damage: a line for each of its files that cannot be read in full.
    """

    name: str
    train: Sequence[Train]
    evals: Sequence[Eval]
    place: str = ""
    events: Sequence[Timed] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    owner: Owner | None = None
    damage: Sequence[str] = ()

    @property
    def plans(self) -> list[Plan]:
        """Of all starts."""
        return [event for event, _, _ in self.events if isinstance(event, Plan)]

    @property
    def plan(self) -> Plan:
        """Of the newest start; one of zeros before the first."""
        return [Plan(), *self.plans][-1]

    @property
    def monitor(self) -> str:
        """The metric that decides which evaluation is the best; "" before the first."""
        return self.evals[-1].monitor if self.evals else ""

    @property
    def best(self) -> Eval | None:
        """The best evaluation, if it has that metric."""
        found = (e for e in reversed(self.evals) if e.best and self.monitor in e.metrics)
        return next(found, None)

    @property
    def value(self) -> float:
        """Of the best evaluation; nan without one."""
        return self.best.metrics[self.monitor] if self.best else math.nan

    @property
    def best_summary(self) -> str:
        """``top1 97.50 % at step 184``; "" without an evaluation."""
        if self.best is None:
            return ""
        metric = format_metric(self.monitor, self.value)
        return f"{self.monitor} {metric} at step {format_count(self.best.step)}"

    @property
    def last_step(self) -> int:
        """The last step in the log, the plans and the checkpoints."""
        known: list[Train | Eval | Manifest] = [*self.train[-1:], *self.evals[-1:]]
        known += [self.manifest] if self.manifest else []
        return max([self.plan.start_step, *(each.step for each in known)])

    @property
    def newest(self) -> list[Train]:
        """The training records of the newest start."""
        return [record for record in self.train if record.step > self.plan.start_step]

    @property
    def timed(self) -> list[Train]:
        """The training records with timing."""
        return [record for record in self.train if record.timing.split_s]

    @property
    def limit(self) -> str:
        """The main bottleneck; "" if unknown."""
        return split_of(self.timed).limit()

    @property
    def speed(self) -> str:
        """The speed of all workers, the median of the newest start, such as ``1437 images/s``. The
        run must have records."""
        speed = median(record.samples_per_s for record in self.newest or self.train)
        return f"{format_count(speed)} {self.plan.unit}/s"


def read_run(place: str | Storage, name: str = "") -> Run:
    """The run in a folder, or at a path, at a URI, or of that name below runs/.

    Args:
        name: how it is called. Default: as its folder.

    Raises:
        ConfigError: there is no run.
        PreflightError: the storage does not answer.
    """
    storage = open_run(place) if isinstance(place, str) else place
    damage: list[str] = []
    owner = owner_of(storage)

    def text_of(file: str) -> str:
        return storage.read(file).decode(errors="replace") if storage.exists(file) else ""

    def records(file: str) -> list[dict[str, Any]]:
        text = text_of(file)
        found = parsed_lines(text.splitlines(), file)
        lost = len(text.splitlines()) - len(found)
        if lost > (owner is not None and not text.endswith("\n")):  # the last one is on its way
            damage.append(f"{file}: {plural(lost, 'line')} cannot be read")
        return found

    def config() -> dict[str, Any]:  # as it was written, whatever version did
        try:
            return dict(fields_of(parse(text_of(CONFIG_FILE))))
        except (ValueError, RecursionError) as error:
            damage.append(f"{CONFIG_FILE} cannot be read: {first_line(error)}")
            return {}

    try:
        log = log_records([*records(FOLLOWED_FILE), *records(METRICS_FILE)])
        evals = {each.step: each for each in log if isinstance(each, Eval)}
        return Run(
            name or Path(storage.path).name,
            [each for each in log if isinstance(each, Train)],
            [evals[step] for step in sorted(evals)],
            storage.address,
            [each for each in stored_events(records(EVENTS_FILE)) if each.time],
            config(),
            newest_manifest(storage),
            owner,
            damage,
        )
    except OSError as error:
        raise PreflightError(f"{storage}: cannot be read: {error}") from error


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
