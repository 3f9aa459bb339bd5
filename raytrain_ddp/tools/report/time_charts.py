"""Charts over the time at work: speed, and where the time goes; with failures and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from raytrain_ddp.formatting import format_count, format_seconds, format_share
from raytrain_ddp.tools.report.charts import (
    INK,
    Chart,
    Hover,
    Mark,
    percents,
    plot_marks,
    smoothed,
)
from raytrain_ddp.tools.report.history import RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = {  # in drawing order: name, color
    "compute": ("forward and backward", "c0"),
    "communication": ("all-reduce not hidden", "c4"),
    "optimizer": ("optimizer", "c5"),
    "data": ("waiting for data", "c1"),
    "copy": ("copy to the device", "c6"),
    "checkpoint": ("checkpoint stall", "c3"),
    "evaluation": ("evaluation", "c2"),
    "other": ("other, between steps", "c7"),
}
_MOST_STRETCHES, _MOST_MARKS, _MOST_FLAGS = 150, 80, 10
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def time_charts(history: RunHistory) -> list[Chart]:
    """The speed of a run, and where its time goes."""
    if not history.timed:
        return []
    return [
        Chart("Throughput of all workers", lambda axes: _speed(axes, history)),
        Chart("Where the time goes", lambda axes: _split(axes, history)),
    ]


def step_time(seconds: float) -> str:
    """``0.4 ms``, ``41 ms``; from one second on as `format_seconds`."""
    if seconds >= 0.9995:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"


def marks_of(history: RunHistory) -> list[Mark]:
    """Restarts, resizes and failures, at their steps."""
    sizes = [plan.world_size for plan in history.plans]
    flags = ["↻" if before == now else f"{before}→{now}" for before, now in pairwise(sizes)]
    found, left = [], iter(flags if len(flags) <= _MOST_FLAGS else [""] * len(flags))
    for each in history.happenings:
        if each.kind in ("restart", "resize"):
            found.append(Mark(each.step or 0, each.text, flag=next(left)))
        elif each.kind in ("failure", "preempted"):
            found.append(Mark(each.step or 0, each.text, "bad"))
    return found[:: -(-len(found) // _MOST_MARKS) or 1]


def _begin(axes: Axes, history: RunHistory) -> tuple[float, list[Hover]]:
    """Sets the time axis, and draws the marks; returns its unit in seconds, and their texts."""
    steps = [record.step for record in history.timed]
    seconds = [record.seconds_total for record in history.timed]
    name, unit = next(p for p in _UNITS.items() if history.worked_s >= 3 * p[1] or p[1] == 1)
    axes.set_xlim(0, max(1.0, 1.01 * history.worked_s) / unit)
    axes.set_xlabel(f"{name} at work")
    axes.fmt_xdata = lambda x: f"after {format_seconds(x * unit)} at work"
    marks = marks_of(history)
    places = np.interp([mark.x for mark in marks], steps, np.array(seconds) / unit)
    return unit, plot_marks(axes, [m._replace(x=x) for m, x in zip(marks, places, strict=True)])


def _speed(axes: Axes, history: RunHistory) -> Sequence[Hover]:
    unit, hovers = _begin(axes, history)
    times = np.array([r.seconds_total for r in history.timed]) / unit
    speeds = np.array([r.samples_per_s for r in history.timed])
    axes.plot(times, speeds, lw=0.8, alpha=0.4, color=INK["c0"])
    calm = smoothed(speeds, len(speeds) // 40 + 1)
    axes.plot(times, calm, color=INK["c0"], label="smoothed")
    high = min(np.nanmax(speeds), 3 * np.nanmedian(speeds))  # single outliers are cut off
    axes.set_ylim(0, 1.05 * high if high > 0 else 1.0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    units = [plan.unit for plan in history.plans[-1:]]
    axes.fmt_ydata = lambda y: f"{format_count(y)} {' '.join(units)}/s"
    return hovers


def _split(axes: Axes, history: RunHistory) -> Sequence[Hover]:
    """A stack of the phases' shares, over stretches of the log."""
    unit, hovers = _begin(axes, history)
    records = history.timed
    steps = np.maximum(1, np.diff([0, *(r.step for r in records)]))  # that each record covers
    split = [[r.timing.split_s.get(name, 0.0) for name in PHASES] for r in records]
    places = [*range(0, len(records), -(-len(records) // _MOST_STRETCHES))]
    sums = np.add.reduceat(np.array(split) * steps[:, None], places)
    counts = np.add.reduceat(steps, places)
    shares = sums / np.maximum(sums.sum(1, keepdims=True), 1e-12)
    tops = np.cumsum(shares, 1)
    edges = [0.0, *(records[at - 1].seconds_total / unit for at in places[1:])]
    edges.append(records[-1].seconds_total / unit)
    for number, (title, color) in enumerate(PHASES.values()):
        if shares[:, number].any():
            low, top = tops[:, number] - shares[:, number], tops[:, number]
            axes.stairs(top, edges, baseline=low, fill=True, color=INK[color], label=title)
    axes.set_ylim(0, 1)
    percents(axes)
    axes.fmt_ydata = None
    for n, at in enumerate(places):
        text = f"from step {records[at].step}: {step_time(sums[n].sum() / counts[n])} a step"
        for share, (title, _) in sorted(zip(shares[n], PHASES.values(), strict=True), reverse=True):
            text += f"\n{title} {format_share(share)}" if share >= 0.005 else ""
        slow = records[at].timing.slowest
        text += f"\nslowest: rank {slow.rank}, {slow.ratio:.2f} x, {slow.phase}" if slow else ""
        hovers.append(((edges[n] + edges[n + 1]) / 2, text))
    return hovers
