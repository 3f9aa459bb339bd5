"""Assesses a run from outside, by what it has written. Imports neither torch nor Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raytrain_ddp.bottleneck import StepSplit
from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    read_events,
    read_log,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Failed,
    Interval,
    LogRecord,
    Plan,
    Preempted,
    StoredEvent,
    Straggler,
    Train,
)
from raytrain_ddp.formatting import (
    error_summary,
    format_count,
    format_seconds,
    plural,
)
from raytrain_ddp.records import Timed, to_record
from raytrain_ddp.tools.doctor.rows import Report, Row, format_duration

_MIN_S = 30.0  # like the workers' watchdog
_USUALLY = 10  # times the usual interval between log records
_APART_S = 600.0  # for a start or an evaluation


@dataclass(frozen=True)
class RunStatus:
    """What a run has written.

    Args:
        owner: the process that drives it, if any.
        quiet_s: since it wrote anything. starts: whether its config is newer than all else.
        plan: of its newest start. recent: the events since then. end: if it has ended.
    """

    run: Storage
    owner: Owner | None
    quiet_s: float
    starts: bool
    events: Sequence[Timed]
    records: Sequence[LogRecord]
    lines: Sequence[Train]
    plan: Plan | None
    recent: Sequence[StoredEvent]
    end: End | None


def examine_run(run: Storage) -> Report:
    """Its state; `fail` means that it should make progress but does not."""
    seen = read_status(run)
    rows = [*_driver(seen), _progress(seen), *_pace(seen), _failures(seen), _checkpoint(seen)]
    newest = to_record(seen.lines[-1]) if seen.lines else None
    findings = {"run": str(run), "plan": seen.plan and to_record(seen.plan), "newest": newest}
    good = "the run has ended" if seen.end else "the run makes progress"
    return Report(rows, findings, good, "the run makes no progress")


def read_status(run: Storage) -> RunStatus:
    """Reads what a run has written."""
    files = (CONFIG_FILE, METRICS_FILE, EVENTS_FILE)
    config_s, *others_s = (run.changed_s(name) or 0.0 for name in files)
    owner, events, records = owner_of(run), read_events(run), read_log(run)
    plan, recent, last = None, list[StoredEvent](), None
    for last, _, _ in events:
        recent.append(last)
        if isinstance(last, Plan):
            plan, recent = last, []
    return RunStatus(
        run,
        owner,
        max(0.0, time.time() - max(config_s, *others_s)),
        config_s > max(others_s),
        events,
        records,
        [record for record in records if isinstance(record, Train)],
        plan,
        recent,
        last if isinstance(last, End) and owner is None else None,
    )


def how_to_stop(owner: Owner) -> str:
    """The command that ends a run after its current step, with a checkpoint."""
    there = "" if owner.is_here() else f"ssh {owner.host} "
    command = f"{there}kill -INT {owner.pid}"
    batch = f"scancel --batch --signal=TERM {owner.job}"
    return f"{command}, or, of slurm.sbatch, {batch}" if owner.job else command


def _driver(seen: RunStatus) -> list[Row]:
    """The process that drives the run, and how to stop it."""
    owner, name = seen.owner, seen.run.path.rstrip("/").rpartition("/")[2]
    if owner is not None:
        found = f"pid {owner.pid} on {owner.host}"
        row = Row("driver", name, f"{found}, since {owner.since}")
        if owner.state() == "T":
            row = Row("driver", name, f"{found} is stopped", "fail", f"kill -CONT {owner.pid}")
        return [row, Row("to stop", owner.host, how_to_stop(owner))]
    if seen.end is not None:
        found = f"ended with status {seen.end.status}"
        found += f": {error_summary(seen.end.message)}" if seen.end.message else ""
        return [Row("driver", name, found, "warn" if seen.end.status else "ok")]
    again = "Run the command again: it resumes from the newest checkpoint."
    return [Row("driver", name, "no process drives it, and it has not ended", "fail", again)]


def _progress(seen: RunStatus) -> Row:
    plan = seen.plan
    if plan is None:
        return Row("progress", "", "not started")
    saved = [event.step for event in seen.recent if isinstance(event, Checkpoint)]
    step = max([plan.start_step, *saved[-1:], *(line.step for line in seen.lines[-1:])])
    share = f"{100 * step // max(1, plan.total_steps)} %"
    found = f"step {step} of {plan.total_steps} ({share}), {format_seconds(seen.quiet_s)} ago"
    workers, allowed_s = plural(plan.world_size, "worker"), _allowed_s(seen, plan)
    if seen.owner is None or seen.quiet_s <= allowed_s:
        return Row("progress", workers, found)
    advice = (
        f"Nothing for longer than {format_seconds(allowed_s)}. An evaluation or a start may take "
        "so long; workers that hang are ended after scaling.hang_s, and named here."
    )
    return Row("progress", workers, found, "fail", advice)


def _allowed_s(seen: RunStatus, plan: Plan) -> float:
    """How long a run may write nothing."""
    lines = seen.lines
    is_first = len(lines) < 2 or lines[-1].step <= plan.start_step
    failed = any(isinstance(event, Failed | Preempted) for event in seen.recent)
    at_end = bool(lines and plan.steps_per_epoch) and lines[-1].step % plan.steps_per_epoch == 0
    evaluates = at_end and isinstance(seen.records[-1], Train)
    if is_first or failed or evaluates or seen.starts or not seen.run.is_local:
        # Files in a store that cannot append are rewritten only periodically.
        every_s = [event.seconds for event in seen.recent if isinstance(event, Interval)]
        return _APART_S + sum(every_s[-1:])
    return max(_MIN_S, _USUALLY * (lines[-1].step - lines[-2].step) * lines[-1].timing.step_s)


def _pace(seen: RunStatus) -> Iterator[Row]:
    """The speed, what limits it, and a rank that the others wait for."""
    if not seen.lines:
        return
    last, plan, split = seen.lines[-1], seen.plan or Plan(), StepSplit()
    for line in seen.lines[-200:]:
        split.add(line)
    step_s = last.timing.step_s
    found = f"{format_count(last.samples_per_s)} {plan.unit}/s, {format_duration(step_s)} a step"
    left_s = step_s * max(0, plan.total_steps - last.step)
    found += f", {format_seconds(left_s)} left" if left_s > 0 and seen.owner else ""
    yield Row("speed", plan.device, found)
    yield Row("limit", "", split.limit() or "not known yet")
    for event in [event for event in seen.recent if isinstance(event, Straggler)][-1:]:
        if event.rank is not None:
            yield Row("slowest", f"rank {event.rank}", event.text, "warn")


def _failures(seen: RunStatus) -> Row:
    """Of workers and of checkpoints; a warning until the next checkpoint."""
    kinds = [type(each.event) for each in seen.events]
    failed = [n for n, kind in enumerate(kinds) if kind in (Failed, Preempted, CheckpointFailed)]
    if not failed:
        return Row("failures", "", "none")
    last, written, _ = seen.events[failed[-1]]
    text = last.text if isinstance(last, Preempted) else getattr(last, "message", "")
    found = f"{len(failed)}; the last at {written}: {error_summary(text)}"
    return Row("failures", "", found, "ok" if Checkpoint in kinds[failed[-1] :] else "warn")


def _checkpoint(seen: RunStatus) -> Row:
    found = "none yet"
    for event, written, _ in seen.events:
        if isinstance(event, Checkpoint):
            found = f"step {event.step}, written at {written}"
    return Row("checkpoint", "", found)
