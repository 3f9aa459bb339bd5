"""Charts, painted by matplotlib: as SVG in a page, or below each other in a figure.

Their colors can be seen on light and dark pages, where texts have the page's color and font.
Imports matplotlib only to paint.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytrain_ddp.tools.formatting import FRACTION, format_metric
from raytrain_ddp.tools.report.run_files import Happening, Run, happenings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = [  # of a step, in drawing order
    "compute",
    "communication",
    "optimizer",
    "data",
    "copy",
    "checkpoint",
    "evaluation",
    "other",
]
_MOST_NAMES, _MOST_POINTS, _MOST_MARKS = 8, 200, 80  # metrics and scalars; of a stack; of a chart


def curves(runs: Sequence[Run]) -> list[Chart]:
    """The loss, the scalars and metrics, and the learning rate, as far as there are any.

    Of a single run also each record's loss, and what happened.
    """
    alone = len(runs) == 1
    found: dict[str, list[Line]] = defaultdict(list)
    for number, run in enumerate(runs):
        key, color = f"run{number}", COLORS[number % len(COLORS)]
        for title, line in _lines(run, alone):
            named = line if alone else line._replace(label=run.name, color=color, run=key)
            found[title] += [named] if line.xs.size else []
    marks = marks_of(runs[0]) if alone else []
    return [Chart(title, lines, marks) for title, lines in found.items() if lines]


def speed_charts(run: Run) -> list[Chart]:
    """The speed of a run, and where its time goes."""
    records, marks = run.timed, marks_of(run)
    if len(records) < 2:
        return []
    speed = Line("", *_series(records, [r.samples_per_s for r in records]), scale="zero")
    calm = speed._replace(label=f"{run.plan.unit}/s", ys=smoothed(speed.ys))
    split = [[r.timing.split_s.get(name, 0.0) for r in records] for name in PHASES]
    shares = np.array([smoothed(np.array(each)) for each in split])  # (phases, records)
    shares /= np.maximum(shares.sum(0), 1e-12)
    every = len(records) // _MOST_POINTS + 1
    phases = [
        Line(name, speed.xs[::every], share[::every], color, scale="share")
        for name, share, color in zip(PHASES, shares, COLORS, strict=True)
        if share.any()
    ]
    return [
        Chart("Throughput of all workers", [calm, speed], marks),
        Chart("Where the time goes", phases, marks, "stack"),
    ]


def marks_of(run: Run) -> list[Happening]:
    """Restarts, failures, the best evaluation, and the first loss that is not finite."""
    marks = [e for e in happenings(run) if e.kind in ("restart", "failure") and e.step]
    marks = marks[:: len(marks) // _MOST_MARKS + 1]
    if run.best:
        marks.append(Happening("", run.best.step, "end", f"best: {run.best_summary}", "★"))
    lost = [record.step for record in run.train if not np.isfinite(record.loss)]
    text = f"the loss is not finite, the first of {len(lost)} records"
    return [*marks, *(Happening("", step, "failure", text) for step in lost[:1])]


def _lines(run: Run, alone: bool) -> Iterator[tuple[str, Line]]:
    """Each line of a run, with the title of its chart."""
    loss = Line("", *_series(run.train, [r.loss for r in run.train]))
    yield "Loss", loss._replace(label="training, smoothed", ys=smoothed(loss.ys))
    if alone:
        yield "Loss", loss
    for kind, records, values in (
        ("evaluation", run.evals, [e.metrics for e in run.evals]),
        ("training", run.train, [r.scalars for r in run.train]),
    ):
        names = {name: name != run.monitor for each in values for name in each}
        names.pop("skipped", None)
        for name in sorted(names, key=names.__getitem__)[:_MOST_NAMES]:
            both = alone and name == "loss"  # in one chart with the loss of training
            title, label = ("Loss", kind) if both else (f"{name} ({kind})", name)
            xs, ys = _series(records, [each.get(name) for each in values])
            yield title, Line(label, xs, ys, COLORS[both], scale=scale_of(name))
    rates = _series(run.train, [r.lr for r in run.train])
    yield "Learning rate", Line("learning rate", *rates, scale="zero")


def _series(records: Sequence[Any], values: Sequence[float | None]) -> tuple[Numbers, Numbers]:
    """(steps, values); nan where there is none, or it is not finite."""
    found = np.array(values, dtype=float)
    found[~np.isfinite(found)] = np.nan
    return np.array([record.step for record in records], dtype=float), found


Numbers = NDArray[np.float64]
# After Okabe and Ito, "Color Universal Design" (2008), for any kind of color vision; each has a
# contrast of at least 3 with white and with black.
COLORS = ["#2677b8", "#e0651a", "#129a72", "#c2609a", "#b98309", "#3f9aca", "#8470dc", "#7d8794"]
_BAD, _GRAY = "#d9482b", "#808994"
_STYLE = f"{__package__}.charts"  # the file charts.mplstyle
_MOST_DOTS, _MOST_HOVERS, _MOST_FLAGS = 60, 250, 12
_LOG_FROM = 20  # highest by lowest value


class Line(NamedTuple):
    """A line of a chart.

    Args:
        label: "" draws it faintly, without a value at the pointer.
        xs, ys: (points,); xs ascend, and ys are nan where there is none.
        run: a class; the page hides lines by it.
        scale: of the y axis: shares of 1 as percent, numbers from zero on, or any numbers, by
            their logarithm if they differ much.
    """

    label: str
    xs: Numbers
    ys: Numbers
    color: str = COLORS[0]
    run: str = ""
    scale: str = "any"  # share, zero


class Chart(NamedTuple):
    """Lines over steps, a stack of areas, or points over other numbers. Marks are vertical."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Happening] = ()
    kind: Literal["lines", "stack", "points"] = "lines"
    xlabel: str = "step"

    @property
    def named(self) -> list[Line]:
        return [line for line in self.lines if line.label]


class Drawn(NamedTuple):
    """A chart in a page.

    Args:
        svg: an element. texts: JSON of [x as a share of the width, [[run, text], ...]]. No name or
            text of a run can end either of them.
    """

    chart: Chart
    svg: str
    texts: str


def drawn(chart: Chart) -> Drawn:
    """Draws a chart for a page."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure()
        axes, out = figure.subplots(), io.StringIO()
        _paint(axes, chart)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        share = axes.transData + figure.transFigure.inverted()
        texts = [(share.transform((x, 1))[0].round(4), each) for x, each in _texts(chart)]
    svg = out.getvalue().partition("<svg ")
    return Drawn(chart, "".join(svg[1:]), json.dumps(texts).replace("<", "\\u003c"))


def figure_of(charts: Sequence[Chart], title: str) -> Figure:
    """The charts below each other. Needs no display and leaves no global state (no pyplot)."""
    import matplotlib.style
    from matplotlib.figure import Figure

    class Curves(Figure):
        def _repr_png_(self) -> bytes:  # for notebooks without pyplot
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    with matplotlib.style.context(["default", _STYLE, {"font.size": 10.5}]):
        figure = Curves(figsize=(10, 3.4 * len(charts) or 3.6), dpi=120, layout="constrained")
        empty = "" if charts else ": no training steps yet"
        figure.suptitle(title + empty, x=0.01, ha="left")
        every = figure.subplots(len(charts) or 1, 1, sharex=True, squeeze=False)[:, 0]
        for axes, chart in zip(every, charts, strict=False):
            _paint(axes, chart)
            axes.label_outer()
            axes.set_title(chart.title)
            if len(chart.named) > 1:
                axes.legend()
    return figure


def scale_of(metric: str) -> str:
    """The scale of a `Line` of this metric."""
    return "share" if FRACTION.search(metric) else "any"


def smoothed(values: Numbers) -> Numbers:
    """The mean over a twentieth of the values around each; nan stays nan."""
    window, known = np.ones(2 * (len(values) // 40) + 1), np.isfinite(values)
    if not known.any():
        return values
    total = np.convolve(np.where(known, values, 0.0), window, "same")
    return np.where(known, total / np.maximum(1, np.convolve(known, window, "same")), np.nan)


def _paint(axes: Axes, chart: Chart) -> None:
    """Faint lines do not widen the axes: single outliers of them may be outside."""
    _scale(axes, chart)
    lines = chart.named
    if chart.kind == "stack":
        colors = [line.color for line in lines]
        axes.stackplot(lines[0].xs, [line.ys for line in lines], colors=colors)
        axes.set_ylim(0, 1)
    for label, xs, ys, color, run, _ in chart.lines if chart.kind != "stack" else ():
        look: dict[str, Any] = {"marker": "o" if len(xs) <= _MOST_DOTS else "", "label": label}
        look |= {} if label else {"lw": 0.8, "alpha": 0.4, "marker": "", "scaley": False}
        look |= {"ls": "", "marker": "o", "ms": 5} if chart.kind == "points" else {}
        axes.plot(xs, ys, color=color, gid=run or None, **look)
    for mark in chart.marks:
        bad, above = mark.kind == "failure", axes.get_xaxis_transform()
        axes.axvline(mark.step or 0, color=_BAD if bad else _GRAY, ls="-" if bad else "--", lw=1)
        if len(chart.marks) <= _MOST_FLAGS:
            axes.text(mark.step or 0, 1.01, mark.flag, transform=above, ha="center", color=_GRAY)


def _scale(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

    xs, ys = (np.concatenate([line[at] for line in chart.named]) for at in (1, 2))
    axes.set_xlabel(chart.xlabel)
    if chart.kind != "points":
        axes.set_xlim(0, 1.01 * max(1.0, *xs))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    elif 0 < xs.min() < xs.max() / _LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    scale, known = chart.named[0].scale, ys[np.isfinite(ys)]
    if scale == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    elif scale == "zero":
        axes.set_ylim(0, 1.06 * (known.max(initial=0.0) or 1.0))
    elif known.size and 0 < known.min() < known.max() / _LOG_FROM:
        axes.set(yscale="log", ylim=(known.min() / 1.5, known.max() * 1.3))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def _texts(chart: Chart) -> list[tuple[float, list[tuple[str, str]]]]:
    """What is shown near each x: the newest value of each line, and what happened."""
    xs = np.unique(np.concatenate([line.xs for line in chart.named]))
    found = [(float(mark.step or 0), [("", mark.text)]) for mark in chart.marks]
    for x in xs[:: len(xs) // _MOST_HOVERS + 1]:
        texts = [("", f"{chart.xlabel} {x:.10g}")]
        for line in chart.named:
            at = np.searchsorted(line.xs, x, "right") - 1
            if at >= 0 and x <= line.xs[-1] and np.isfinite(line.ys[at]):
                value = format_metric("top1" if line.scale == "share" else "", line.ys[at])
                texts.append((line.run, f"{line.label} {value}"))
        found.append((x, texts))
    return sorted(found)
