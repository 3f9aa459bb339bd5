"""Panels over time that show which ranks were slow, and each rank's time per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from raytrain_ddp.events import Ranks
from raytrain_ddp.tools.display.axes import Area, Line, Panel, Point, Scale, linear_scale
from raytrain_ddp.tools.display.formatting import plural
from raytrain_ddp.tools.report import step_phases
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.time_panels import MOST_STRETCHES, stretches_of, time_marks, x_name

_LEAST_EVENTS = 3  # fewer make no useful picture


def rank_panels(history: RunHistory, x: Scale) -> list[Panel]:
    """The slowest rank, and how long each rank's own work took."""
    return [panel for panel in (_slowest_rank(history, x), _ranks(history, x)) if panel is not None]


def own_work(split_s: Mapping[str, float]) -> float:
    """Seconds in which a rank does not wait for others."""
    return sum(split_s.get(name, 0.0) for name in step_phases.WORK)


def rank_splits(history: RunHistory) -> list[dict[str, float]]:
    """Seconds of a step by phase for each rank, in the newest start: median over its events.

    Without evaluations and checkpoints, which are rare and affect all ranks equally.
    """
    events = [e for e, _, _ in history.files.events if isinstance(e, Ranks)]
    size = len(events[-1].split_s) if events else 0
    newest = [e.split_s for e in events if len(e.split_s) == size]
    found = {phase for each in newest for rank in each for phase in rank}
    names = step_phases.ordered(found - {"evaluation", "checkpoint"})
    return [
        {name: median(each[rank].get(name, 0.0) for each in newest) for name in names}
        for rank in range(size)
    ]


def _slowest_rank(history: RunHistory, x: Scale) -> Panel | None:
    found = [(one, one.slowest) for one in stretches_of(history) if one.slowest]
    if not found:
        return None
    by_phase: dict[str, list[Point]] = defaultdict(list)
    hover_texts = []
    for one, slow in found:
        at = (one.since + one.to) / 2
        by_phase[slow.phase].append((at, slow.ratio))
        text = f"step {one.last_step}\nrank {slow.rank}: {slow.ratio:.2f} x the median, by its"
        hover_texts.append((at, f"{text} {slow.phase}"))
    highest = max(y for points in by_phase.values() for _, y in points)
    return Panel(
        title="The slowest rank's own work, as a multiple of the median rank's",
        x=x,
        y=linear_scale(1.0, max(1.5, highest), lambda value: f"{value:g} x", ticks=4),
        x_name=x_name([history.timeline]),
        lines=[
            Line(f"by its {name}", f"dots {step_phases.css(name)}", [by_phase[name]])
            for name in step_phases.ordered(by_phase)
        ],
        marks=time_marks(history),
        hovers=hover_texts,
        height="low",
    )


def _ranks(history: RunHistory, x: Scale) -> Panel | None:
    """A row for each rank: darker where its own work took longer."""
    events = [(e, wall) for e, _, wall in history.files.events if isinstance(e, Ranks)]
    events = events[:: -(-len(events) // MOST_STRETCHES) or 1]
    if len(events) < _LEAST_EVENTS:
        return None
    most = max(len(e.split_s) for e, _ in events)
    shades: dict[int, list[tuple[float, float, float, float]]] = defaultdict(list)
    hover_texts = []
    before = 0.0
    starts = [history.timeline.at(attempt.began) for attempt in history.timeline.attempts]
    for event, wall in events:
        at = history.timeline.at(wall)
        since = max([before, *(start for start in starts if start <= at)])
        work = [own_work(rank) for rank in event.split_s]
        usual = median(work)
        for rank, each in enumerate(work):
            shade = min(5, max(0, round(10 * (each / max(usual, 1e-9) - 1))))
            if at > since:
                shades[shade].append((since, at, most - rank - 1, most - rank))
        slow = sorted(range(len(work)), key=lambda rank: -work[rank])[:4]
        rows = [f"rank {rank}: {step_phases.step_time(work[rank])} a step" for rank in slow]
        hover_texts.append(((since + at) / 2, "\n".join([f"step {event.step}", *rows])))
        before = at
    each = -(-most // 8)
    names = [(most - rank - 0.5, f"rank {rank}") for rank in range(0, most, each)]
    return Panel(
        title=f"Own work of each of {plural(most, 'rank')}",
        x=x,
        y=Scale(0.0, float(most), names),
        x_name=x_name([history.timeline]),
        areas=[Area("", f"shade{shade}", shades[shade]) for shade in sorted(shades)],
        legend=[("as the median", "shade0"), ("+25 %", "shade3"), ("+50 % or more", "shade5")],
        hovers=hover_texts,
        height="low" if most <= 4 else "",
    )
