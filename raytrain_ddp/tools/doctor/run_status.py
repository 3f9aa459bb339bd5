"""Assesses a run from outside, by what it has written. Imports neither torch nor Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from raytrain_ddp.checkpoint.lease import LEASE_FILE, TIMEOUT_S, Owner
from raytrain_ddp.checkpoint.manifest import DamagedError
from raytrain_ddp.checkpoint.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVENTS_FILE,
    HANGS,
    METRICS_FILE,
    checkpoint_store,
    read_events,
    read_log,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE
from raytrain_ddp.data.order.epoch_order import relative_load
from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Eval,
    Failed,
    Interval,
    Plan,
    Preempted,
    Straggler,
    Train,
)
from raytrain_ddp.records import Timed, to_record
from raytrain_ddp.tools.display.bottleneck import StepSplit
from raytrain_ddp.tools.display.formatting import (
    error_summary,
    format_count,
    format_seconds,
    plural,
)
from raytrain_ddp.tools.doctor.rows import Report, Row, format_duration

_LEAST_S = 30.0  # like the workers' watchdog
_USUALLY = 10  # times the usual interval between log records
_APART_S = 600.0  # for a start or an evaluation
_AWAY_S = 60.0  # files in a store that cannot append are rewritten only periodically
_HANGS_SHOWN = 3


@dataclass(frozen=True)
class RunStatus:
    """What a run has written. Times are ages in s; None if there is nothing."""

    run: Storage
    owner: Owner | None
    lease_s: float | None
    config_s: float | None  # since its driver started
    metrics_s: float | None
    events_s: float | None
    checkpoint_s: float | None
    checkpoint: int | None  # its step
    finished: bool  # by its newest checkpoint
    events: Sequence[Timed]
    lines: Sequence[Train]
    evaluated: int | None  # the step of its newest evaluation
    hangs: Sequence[tuple[str, Mapping[str, Any]]]  # folder, hang.json; the newest last

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest start; None if there was none."""
        plans = [event for event, _, _ in self.events if isinstance(event, Plan)]
        return plans[-1] if plans else None

    @property
    def end(self) -> End | None:
        """The last event, if the run has ended."""
        last = self.events[-1].event if self.events else None
        return last if isinstance(last, End) else None

    @property
    def has_ended(self) -> bool:
        return self.end is not None or (self.finished and self.owner is None)

    @property
    def newest_s(self) -> float | None:
        ages = (self.metrics_s, self.events_s, self.checkpoint_s, self.config_s)
        return min((age for age in ages if age is not None), default=None)


def read_status(run: Storage) -> RunStatus:
    """Reads what the run has written; writes a probe file to get the store's time."""
    try:
        now_s = run.clock_s()
    except OSError:  # it may be read only
        now_s = time.time()

    def age(folder: Storage, name: str) -> float | None:
        changed_s = folder.changed_s(name)
        return None if changed_s is None else max(0.0, now_s - changed_s)

    owner, records = None, read_log(run)
    with suppress(FileNotFoundError):
        owner = Owner.parse(run.read(LEASE_FILE))
    step, checkpoint_s, finished = None, None, False
    store = checkpoint_store(run)
    for name in store.names()[:1]:
        with suppress(DamagedError, FileNotFoundError):
            manifest = store.open(name).manifest
            step, finished = manifest.step, manifest.finished
            checkpoint_s = age(run.join(CHECKPOINTS).join(str(name)), MANIFEST_FILE)
    return RunStatus(
        run=run,
        owner=owner,
        lease_s=age(run, LEASE_FILE),
        config_s=age(run, CONFIG_FILE),
        metrics_s=age(run, METRICS_FILE),
        events_s=age(run, EVENTS_FILE),
        checkpoint_s=checkpoint_s,
        checkpoint=step,
        finished=finished,
        events=read_events(run),
        lines=[record for record in records if isinstance(record, Train)],
        evaluated=max((r.step for r in records if isinstance(r, Eval)), default=None),
        hangs=_hangs(run),
    )


def _hangs(run: Storage) -> list[tuple[str, Mapping[str, Any]]]:
    found = list[tuple[str, Mapping[str, Any]]]()
    with suppress(OSError):
        names = sorted(n for n in run.join(HANGS).walk() if n.endswith("/hang.json"))
        for name in names:
            folder = name.partition("/")[0]
            with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                hang = json.loads(run.join(HANGS).join(folder).read("hang.json"))
                numbers = {"step": int(hang["step"]), "ranks": [*hang["ranks"]]}
                found.append((folder, {**hang, **numbers}))
    return found


def assess_run(seen: RunStatus) -> Report:
    """The rows; `fail` means that the run should make progress but does not."""
    rows = [_driver(seen), _progress(seen), *_pace(seen), _failures(seen)]
    rows += [*_hung(seen), _checkpoint(seen)]
    findings = {
        "run": str(seen.run),
        "plan": to_record(seen.plan) if seen.plan else {},
        "newest_s": seen.newest_s,
        "newest": to_record(seen.lines[-1]) if seen.lines else None,
        "checkpoint": seen.checkpoint,
        "hangs": [{"folder": folder, **hang} for folder, hang in seen.hangs],
    }
    return Report(tuple(rows), findings)


def _driver(seen: RunStatus) -> Row:
    name, where = "driver", str(seen.run).rstrip("/").rpartition("/")[2]
    if seen.owner is None or seen.lease_s is None:
        if seen.end is not None:
            status, why = seen.end.status, error_summary(seen.end.message)
            found = f"ended with status {status}{why and ': '}{why}"
            return Row(name, where, found, "warn" if status else "ok")
        if seen.finished:
            return Row(name, where, "finished")
        again = "Run the command again: it resumes from the newest checkpoint."
        return Row(name, where, "no process drives it, and it has not ended", "fail", again)
    on = f"{seen.owner.host}, pid {seen.owner.pid}"
    if seen.owner.is_dead() or seen.lease_s > TIMEOUT_S:
        again = "Run the command again: it takes the run over and resumes it."
        since = f"its lease was renewed {_ago(seen.lease_s)}"
        return Row(name, where, f"{on} is gone: {since}", "fail", again)
    return Row(name, where, f"{on}, since {seen.owner.since}")


def _progress(seen: RunStatus) -> Row:
    plan, name = seen.plan, "progress"
    if plan is None or seen.newest_s is None:
        return Row(name, "", "not started")
    step = max(seen.lines[-1].step if seen.lines else 0, plan.start_step)
    place = f"step {step} of {plan.total_steps}"
    found = f"{place} ({100 * step // max(1, plan.total_steps)} %), {_ago(seen.newest_s)}"
    workers = plural(plan.world_size, "worker")
    if seen.has_ended or seen.owner is None:
        return Row(name, workers, found)
    allowed_s = max(_LEAST_S, _USUALLY * _between(seen.lines))
    if _has_leave(seen, plan):
        allowed_s = max(_APART_S, allowed_s)
    if not seen.run.is_local:
        every = [e.seconds for e, _, _ in seen.events if isinstance(e, Interval)][-1:]
        allowed_s += _AWAY_S + sum(every)
    if seen.newest_s <= allowed_s:
        return Row(name, workers, found)
    advice = (
        f"Nothing for longer than {format_seconds(allowed_s)}. An evaluation or a start may take "
        "so long; workers that hang are ended after scaling.hang_s, and named here."
    )
    return Row(name, workers, found, "fail", advice)


def _has_leave(seen: RunStatus, plan: Plan) -> bool:
    """Whether it starts, resumes after a failure, evaluates, or has no known pace yet."""
    begun = [n for n, each in enumerate(seen.events) if isinstance(each.event, Plan)][-1]
    failed = any(isinstance(e, Failed | Preempted) for e, _, _ in seen.events[begun:])
    new = [line for line in seen.lines if line.step > plan.start_step]
    epoch, last = plan.steps_per_epoch, new[-1].step if new else 0
    evaluates = bool(epoch) and last % epoch == 0 and seen.evaluated != last
    written = [age for age in (seen.metrics_s, seen.events_s) if age is not None]
    starts = seen.config_s is not None and seen.config_s < min(written, default=0.0)
    return failed or starts or evaluates or not new or len(seen.lines) < 2


def _between(lines: Sequence[Train]) -> float:
    """The usual seconds between two records; 0 without any."""
    if not lines:
        return 0.0
    steps = [b.step - a.step for a, b in pairwise(lines[-20:])]
    return max(steps, default=1) * max(0.0, lines[-1].timing.step_s)


def _pace(seen: RunStatus) -> list[Row]:
    if not seen.lines:
        return []
    last, plan, split = seen.lines[-1], seen.plan, StepSplit()
    for line in seen.lines[-200:]:
        split.add(line)
    step_s = last.timing.step_s
    left_s = step_s * max(0, plan.total_steps - last.step) if plan else 0.0
    unit = f"{plan.unit if plan else 'samples'}/s"
    speed = f"{format_count(last.samples_per_s)} {unit}, {format_duration(step_s)} a step"
    left = f", {format_seconds(left_s)} left" if left_s > 0 and not seen.has_ended else ""
    rows = [Row("speed", plan.device if plan else "", speed + left)]
    limit, _, remedy = split.limit().partition(": ")
    if limit:
        rows.append(Row("limit", "", limit, "warn" if remedy else "ok", remedy.capitalize()))
    slow = split.slowest()
    stragglers = [e for e, _, _ in seen.events if isinstance(e, Straggler)][-1:]
    hosts = {event.rank: event.host for event in stragglers if event.rank is not None}
    if slow is not None:
        rank, phase, ratio = slow
        found = f"{ratio:.1f} x as long as the others, mostly in {phase}"
        where = f"rank {rank} {hosts.get(rank, '')}".rstrip()
        size, slots = (plan.world_size, plan.slots) if plan else (1, 1)
        due = relative_load(slots, size, rank) if rank < size else 1.0
        rows.append(Row("slowest", where, found, "warn" if ratio >= 2 * due else "ok"))
    elif plan is not None and plan.world_size > 1:
        rows.append(Row("slowest", "", "no rank stands out"))
    return rows


def _failures(seen: RunStatus) -> Row:
    failed = [
        (n, e.event, e.time)
        for n, e in enumerate(seen.events)
        if isinstance(e.event, Failed | Preempted)
    ]
    if not failed:
        return Row("failures", "", "none")
    number, last, time = failed[-1]
    since = any(isinstance(e, Checkpoint) for e, _, _ in seen.events[number:])
    text = last.message if isinstance(last, Failed) else last.text
    found = f"{len(failed)}; the last at {time}: {text}"
    return Row("failures", "", found, "ok" if since else "warn")


def _hung(seen: RunStatus) -> list[Row]:
    """Also hangs whose failure is not recorded yet, while the workers are being ended."""
    done = seen.end is not None and seen.end.status == 0
    saved = max((e.step for e, _, _ in seen.events if isinstance(e, Checkpoint)), default=-1)
    return [
        Row(
            "hang",
            ", ".join(f"rank {rank}" for rank in hang["ranks"]),
            f"step {hang['step']}; stacks: {HANGS}/{folder}/rank-*.txt",
            "ok" if done or saved > hang["step"] else "warn",
            "These files show where the others wait and what that rank does instead.",
        )
        for folder, hang in seen.hangs[-_HANGS_SHOWN:]
    ]


def _checkpoint(seen: RunStatus) -> Row:
    newest = "none yet"
    if seen.checkpoint is not None and seen.checkpoint_s is not None:
        newest = f"step {seen.checkpoint}, {_ago(seen.checkpoint_s)}"
    outcomes = [e for e, _, _ in seen.events if isinstance(e, Checkpoint | CheckpointFailed)]
    last = outcomes[-1] if outcomes else None
    if isinstance(last, CheckpointFailed):
        why = last.message or "see events.jsonl"
        return Row("checkpoint", "", f"{newest}; the last commit failed", "warn", why)
    return Row("checkpoint", "", newest)


def _ago(age_s: float) -> str:
    return f"{format_seconds(age_s)} ago"
