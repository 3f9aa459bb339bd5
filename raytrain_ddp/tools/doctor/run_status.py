"""Assesses a run from outside, by what it has written. Imports neither torch nor Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Failed,
    Interval,
    Plan,
    Preempted,
    StoredEvent,
    Straggler,
)
from raytrain_ddp.tools.doctor.assessment import Report, Row, format_duration
from raytrain_ddp.tools.formatting import error_summary, format_count, format_seconds, plural
from raytrain_ddp.tools.report.run_files import Run, read_run

_MIN_S = 30.0  # like the workers' watchdog
_USUALLY = 10  # times the usual interval between log records
_APART_S = 600.0  # for a start or an evaluation


class Quiet(NamedTuple):
    """How long a run has written nothing. `may_be_long`: it starts, or its storage shows late what
    is appended."""

    seconds: float
    may_be_long: bool


def examine_run(storage: Storage) -> Report:
    """Its state; `fail` means that it should make progress but does not."""
    run = read_run(storage)
    config_s = storage.changed_s(CONFIG_FILE) or 0.0
    others_s = max(storage.changed_s(name) or 0.0 for name in (METRICS_FILE, EVENTS_FILE))
    may_be_long = config_s > others_s or not storage.is_local
    quiet = Quiet(max(0.0, time.time() - max(config_s, others_s)), may_be_long)
    rows = [*_driver(run), _progress(run, quiet), *_pace(run), _failures(run), _checkpoint(run)]
    state = "the run has ended" if _end(run) else "the run makes progress"
    return Report(rows, {"run": str(storage)}, state, "the run makes no progress")


def how_to_stop(owner: Owner) -> str:
    """The command that ends a run after its current step, with a checkpoint."""
    there = "" if owner.is_here() else f"ssh {owner.host} "
    command = f"{there}kill -INT {owner.pid}"
    batch = f"scancel --batch --signal=TERM {owner.job}"
    return f"{command}, or, of slurm.sbatch, {batch}" if owner.job else command


def _recent(run: Run) -> list[StoredEvent]:
    """The events since the newest start began to train."""
    events = [event for event, _, _ in run.events]
    starts = (number for number, event in enumerate(events) if isinstance(event, Plan))
    return events[max(starts, default=-1) + 1 :]


def _end(run: Run) -> End | None:
    """How its last command has ended."""
    last = run.events[-1].event if run.events else None
    return last if isinstance(last, End) and run.owner is None else None


def _driver(run: Run) -> list[Row]:
    """The process that drives the run, and how to stop it."""
    owner, end = run.owner, _end(run)
    if owner is not None:
        found = f"pid {owner.pid} on {owner.host}"
        row = Row("driver", run.name, f"{found}, since {owner.since}")
        if owner.state() == "T":
            row = Row("driver", run.name, f"{found} is stopped", "fail", f"kill -CONT {owner.pid}")
        return [row, Row("to stop", owner.host, how_to_stop(owner))]
    if end is not None:
        found = f"ended with status {end.status}"
        found += f": {error_summary(end.message)}" if end.message else ""
        return [Row("driver", run.name, found, "warn" if end.status else "ok")]
    again = "Run the command again: it resumes from the newest checkpoint."
    return [Row("driver", run.name, "no process drives it, and it has not ended", "fail", again)]


def _progress(run: Run, quiet: Quiet) -> Row:
    if not run.plans:
        return Row("progress", "", "not started")
    step, total = run.last_step, run.plan.total_steps
    share = f"{100 * step // max(1, total)} %"
    found = f"step {step} of {total} ({share}), {format_seconds(quiet.seconds)} ago"
    workers, allowed_s = plural(run.plan.world_size, "worker"), _allowed_s(run, quiet)
    if run.owner is None or quiet.seconds <= allowed_s:
        return Row("progress", workers, found)
    advice = (
        f"Nothing for longer than {format_seconds(allowed_s)}. An evaluation or a start may take "
        "so long; workers that hang are ended after scaling.hang_s, and named here."
    )
    return Row("progress", workers, found, "fail", advice)


def _allowed_s(run: Run, quiet: Quiet) -> float:
    """How long a run may write nothing."""
    lines, plan, recent = run.train, run.plan, _recent(run)
    is_first = len(lines) < 2 or lines[-1].step <= plan.start_step
    failed = any(isinstance(event, Failed | Preempted) for event in recent)
    evaluated = any(each.step == run.last_step for each in run.evals)
    at_end = plan.steps_per_epoch > 0 and run.last_step % plan.steps_per_epoch == 0
    if is_first or failed or quiet.may_be_long or (at_end and not evaluated):
        # Files in a store that cannot append are rewritten only periodically.
        every_s = [event.seconds for event in recent if isinstance(event, Interval)]
        return _APART_S + sum(every_s[-1:])
    return max(_MIN_S, _USUALLY * (lines[-1].step - lines[-2].step) * lines[-1].timing.step_s)


def _pace(run: Run) -> Iterator[Row]:
    """The speed, what limits it, and a rank that the others wait for."""
    if not run.train:
        return
    last, plan = run.train[-1], run.plan
    step_s = last.timing.step_s
    found = f"{format_count(last.samples_per_s)} {plan.unit}/s, {format_duration(step_s)} a step"
    left_s = step_s * max(0, plan.total_steps - last.step)
    found += f", {format_seconds(left_s)} left" if left_s > 0 and run.owner else ""
    yield Row("speed", plan.device, found)
    yield Row("limit", "", run.limit or "not known yet")
    for event in [event for event in _recent(run) if isinstance(event, Straggler)][-1:]:
        if event.rank is not None:
            yield Row("slowest", f"rank {event.rank}", event.text, "warn")


def _failures(run: Run) -> Row:
    """Of workers and of checkpoints; a warning until the next checkpoint."""
    kinds = [type(each.event) for each in run.events]
    failed = [n for n, kind in enumerate(kinds) if kind in (Failed, Preempted, CheckpointFailed)]
    if not failed:
        return Row("failures", "", "none")
    last, written, _ = run.events[failed[-1]]
    text = last.text if isinstance(last, Preempted) else getattr(last, "message", "")
    found = f"{len(failed)}; the last at {written}: {error_summary(text)}"
    return Row("failures", "", found, "ok" if Checkpoint in kinds[failed[-1] :] else "warn")


def _checkpoint(run: Run) -> Row:
    found = "none yet"
    for event, written, _ in run.events:
        if isinstance(event, Checkpoint):
            found = f"step {event.step}, written at {written}"
    return Row("checkpoint", "", found)
