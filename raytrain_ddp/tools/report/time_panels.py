"""Panels over time: speed, where the time goes, and which ranks were slow."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from raytrain_ddp.events import Slowest, Train
from raytrain_ddp.tools.display.axes import (
    MOST_POINTS,
    Area,
    Line,
    Mark,
    Panel,
    Point,
    Scale,
    linear_scale,
    sampled,
    smoothed,
    thinned,
    tick_percent,
    time_scale,
)
from raytrain_ddp.tools.display.curves import color, hovers, thinned_note
from raytrain_ddp.tools.display.formatting import format_count, format_seconds, format_share
from raytrain_ddp.tools.report import step_phases
from raytrain_ddp.tools.report.history import RunHistory, timed
from raytrain_ddp.tools.report.timeline import Timeline

MOST_STRETCHES, _MOST_FLAGS = 150, 10
_MOST_MARKS = 80  # more would be one band of color


@dataclass(frozen=True)
class Stretch:
    """Consecutive log records of one start.

    Args:
        since, to: on the time axis, in seconds.
        split_s: seconds by phase, all steps together.
    """

    since: float
    to: float
    steps: int
    last_step: int
    split_s: Mapping[str, float]
    slowest: Slowest | None


def time_panels(histories: Sequence[RunHistory], x: Scale) -> list[Panel]:
    """The speed of all runs; for a single run also where the time went."""
    panels = [_speed(histories, x)]
    if len(histories) == 1:
        panels.append(_split(histories[0], x))
    return [panel for panel in panels if panel is not None]


def total_split(history: RunHistory) -> dict[str, float]:
    """Seconds by phase over all steps in the log; mean over the ranks."""
    totals: dict[str, float] = defaultdict(float)
    for record, steps in zip(timed(history.files), _steps_of(timed(history.files)), strict=True):
        for phase, each in record.timing.split_s.items():
            totals[phase] += each * steps
    return dict(totals)


def step_marks(history: RunHistory) -> list[Mark]:
    """Marks the steps at which the run resumed."""
    found = []
    attempts = history.timeline.attempts
    for before, attempt in pairwise(attempts):
        resized = before.world_size != attempt.world_size
        change = f"{before.world_size}→{attempt.world_size}"
        text = f"resumed from step {attempt.start_step}"
        text += f" with {change} workers" if resized else ""
        kind = "resize" if resized else "restart"
        flag = change if resized else "↻"
        label = flag if len(attempts) <= _MOST_FLAGS else ""
        found.append(Mark(attempt.start_step, kind, text, label))
    return found[:: -(-len(found) // _MOST_MARKS) or 1]


def time_marks(history: RunHistory) -> list[Mark]:
    """Restarts, resizes, failures and pauses, over time."""
    line, found = history.timeline, []
    cuts = {since for since, _ in line.cuts}
    flags = len(line.attempts) <= _MOST_FLAGS
    texts = {h.wall: h.text for h in history.happenings if h.kind in ("restart", "resize")}
    for before, attempt in pairwise(line.attempts):
        since, to = line.at(before.ended), line.at(attempt.began)
        text = texts.get(attempt.began, f"resumed from step {attempt.start_step}")
        resized = before.world_size != attempt.world_size and attempt.world_size
        kind = "resize" if resized else "restart"
        label = (f"{before.world_size}→{attempt.world_size}" if resized else "↻") if flags else ""
        pause = attempt.began - before.ended
        if before.ended in cuts:
            text += f". A pause of {format_seconds(pause)} is cut out here."
            label = f"{label} ✂ {format_seconds(pause)}" if flags else ""
        elif to > since:
            down = f"no training for {format_seconds(pause)}"
            found.append(Mark(since, "down" if before.failed else "lost", down, to=to))
        found.append(Mark(to, kind, text, label))
    failures = [h for h in history.happenings if h.kind in ("failure", "preempted")]
    found += [Mark(line.at(h.wall), "failure", h.text) for h in failures]
    every = -(-len(found) // _MOST_MARKS) or 1
    return [*found[::every], *_lost(history)]


def _lost(history: RunHistory) -> list[Mark]:
    """Steps that a later start repeated; they are no longer in the log."""
    line, found = history.timeline, []
    lasts = line.lasts(history.files.train)
    for attempt, known in [*zip(line.attempts, lasts, strict=True)][:-1]:
        last = known or attempt.began
        if attempt.ended - last > 0.01 * line.worked_s:
            text = f"{format_seconds(attempt.ended - last)} of work that is not in the log"
            found.append(Mark(line.at(last), "lost", text, to=line.at(attempt.ended)))
    return found


def axis_of(histories: Sequence[RunHistory]) -> Scale:
    ends = [s.timeline.at(attempt.ended) for s in histories for attempt in s.timeline.attempts[-1:]]
    return time_scale(max(ends, default=1.0))


def x_name(timelines: Sequence[Timeline]) -> str:
    cut = any(line.cuts for line in timelines)
    return "time since the first step" + (", without long pauses" if cut else "")


def _pieces(history: RunHistory, records: Sequence[Train]) -> list[list[tuple[float, Train]]]:
    """(time on the axis, record), split where a start ended."""
    line = history.timeline
    begins = [attempt.began for attempt in line.attempts]
    pieces: list[list[tuple[float, Train]]] = [[] for _ in line.attempts]
    for wall, record in zip(line.walls(records), records, strict=True):
        number = bisect.bisect_right(begins, wall) - 1
        if number >= 0 and math.isfinite(wall):
            pieces[number].append((line.at(wall), record))
    return [piece for piece in pieces if piece]


def _speed(histories: Sequence[RunHistory], x: Scale) -> Panel | None:
    lines, series, highs = [], [], []
    units = {history.unit for history in histories}
    unit = (units.pop() if len(units) == 1 else "") or "samples"
    for number, history in enumerate(histories):
        records = [r for r in history.files.train if math.isfinite(r.samples_per_s)]
        pieces = [[(at, r.samples_per_s) for at, r in p] for p in _pieces(history, records)]
        flat = sorted(y for piece in pieces for _, y in piece)
        if not flat:
            continue
        highs.append(min(flat[-1], 3 * flat[len(flat) // 2]))  # a single outlier may be cut off
        shares = [max(4, MOST_POINTS * len(piece) // len(flat)) for piece in pieces]
        calm = [_smoothed(piece, len(flat) // 40 + 1) for piece in pieces]
        smooth = [sampled(piece, most) for piece, most in zip(calm, shares, strict=True)]
        if len(histories) == 1:
            raw = [thinned(piece, most) for piece, most in zip(pieces, shares, strict=True)]
            lines.append(Line("", f"raw {color(0)}", raw))
        lines.append(Line("" if len(histories) == 1 else history.files.name, color(number), smooth))
        points: list[Point] = [point for piece in smooth for point in piece]
        series.append((lines[-1].label, points, lambda value: f"{format_count(value)} {unit}/s"))
    if not lines:
        return None
    alone = histories[0] if len(histories) == 1 else None
    shown = time_marks(alone) if alone else []
    return Panel(
        title=f"Throughput of all workers, {unit}/s",
        x=x,
        y=linear_scale(0.0, max(highs)),
        x_name=x_name([history.timeline for history in histories]),
        lines=lines,
        marks=shown,
        hovers=hovers(series, lambda seconds: f"after {format_seconds(seconds)}"),
        note=thinned_note(max(len(s.files.train) for s in histories)),
        legend=[*((line.label, line.css) for line in lines if line.label), *_keys(shown)],
    )


def _keys(shown: Sequence[Mark]) -> list[tuple[str, str]]:
    """A legend for the marks that are shown."""
    names = {
        "failure": "a failure",
        "down": "no training",
        "lost": "repeated later, or a pause",
        "restart": "resumed",
        "resize": "resumed with another number of workers",
    }
    kinds = {mark.kind for mark in shown}
    return [(name, f"k-{kind}") for kind, name in names.items() if kind in kinds]


def _smoothed(points: Sequence[Point], half_width: int) -> list[Point]:
    values = smoothed([y for _, y in points], half_width)
    return [(x, y) for (x, _), y in zip(points, values, strict=True)]


def stretches_of(history: RunHistory) -> list[Stretch]:
    """About 150 stretches of the log, none of which spans two starts."""
    records = timed(history.files)
    steps = dict(zip((r.step for r in records), _steps_of(records), strict=True))
    each = -(-len(records) // MOST_STRETCHES) or 1
    found = []
    begins = [history.timeline.at(attempt.began) for attempt in history.timeline.attempts]
    for piece in _pieces(history, records):
        first = max((at for at in begins if at <= piece[0][0]), default=0.0)
        for n in range(0, len(piece), each):
            part = piece[n : n + each]
            split: dict[str, float] = defaultdict(float)
            for _, record in part:
                for phase, value in record.timing.split_s.items():
                    split[phase] += value * steps[record.step]
            slow = [r.timing.slowest for _, r in part if r.timing.slowest]
            count = sum(steps[record.step] for _, record in part)
            last = part[-1][1].step
            found.append(Stretch(first, part[-1][0], count, last, split, _usual(slow)))
            first = part[-1][0]
    return found


def _usual(slow: Sequence[Slowest]) -> Slowest | None:
    """The rank that was slowest most often, with its phase and median ratio."""
    if not slow:
        return None
    (rank, phase), _ = Counter((one.rank, one.phase) for one in slow).most_common(1)[0]
    ratios = [one.ratio for one in slow if (one.rank, one.phase) == (rank, phase)]
    return Slowest(rank, phase, median(ratios))


def _steps_of(records: Sequence[Train]) -> list[int]:
    """The number of steps that each log record covers."""
    before = [0, *(record.step for record in records)]
    return [max(1, record.step - last) for record, last in zip(records, before[:-1], strict=True)]


def _split(history: RunHistory, x: Scale) -> Panel | None:
    stretches = stretches_of(history)
    names = step_phases.ordered({name for one in stretches for name in one.split_s})
    if not names:
        return None
    steps: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    texts = []
    for one in stretches:
        foot = 0.0
        shares = step_phases.shares(one.split_s)
        for name in names:
            top = foot + shares.get(name, 0.0)
            steps[name].append((one.since, one.to, foot, top))
            foot = top
        whole = step_phases.step_time(sum(one.split_s.values()) / one.steps)
        parts = [f"up to step {one.last_step}: {whole} a step"]
        parts += [
            f"{step_phases.PHASES.get(name, name)} {format_share(share)}, "
            f"{step_phases.step_time(one.split_s[name] / one.steps)}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        ]
        texts.append(((one.since + one.to) / 2, "\n".join(parts)))
    return Panel(
        title="Where the time goes",
        x=x,
        y=linear_scale(0.0, 1.0, tick_percent, ticks=4),
        x_name=x_name([history.timeline]),
        areas=[Area(step_phases.PHASES.get(n, n), step_phases.css(n), steps[n]) for n in names],
        marks=time_marks(history),
        hovers=texts,
        note=thinned_note(len(history.files.train)).replace(
            "lowest and highest of each stretch are kept", "each stretch is a mean"
        ),
        height="high",
    )
