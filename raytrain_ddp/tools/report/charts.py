"""Charts, painted by matplotlib: as SVG in a page, or below each other in a figure.

Their colors can be seen on light and dark pages, where texts have the page's color and font.
Imports matplotlib only to paint.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytrain_ddp.formatting import format_metric
from raytrain_ddp.tools.report.history import Happening

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
# After Okabe and Ito, "Color Universal Design" (2008), for any kind of color vision; each has a
# contrast of at least 3 with white and with black.
COLORS = ["#2677b8", "#e0651a", "#129a72", "#c2609a", "#b98309", "#3f9aca", "#8470dc", "#7d8794"]
_BAD, _GRAY = "#d9482b", "#808994"
_STYLE = Path(__file__).with_name("charts.mplstyle")
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
        keys: (label, color, run) of each line.
        svg: an element. texts: JSON of [x as a share of the width, [[run, text], ...]]. No name or
            text of a run can end either of them.
    """

    title: str
    keys: Sequence[tuple[str, str, str]]
    svg: str
    texts: str


def drawn(chart: Chart) -> Drawn:
    """Draws a chart for a page."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(5.6, 2.5))
        figure.subplots_adjust(0.115, 0.16, 0.985, 0.93)
        axes, out = figure.subplots(), io.StringIO()
        _paint(axes, chart)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        share = axes.transData + figure.transFigure.inverted()
        texts = [(share.transform((x, 1))[0].round(4), each) for x, each in _texts(chart)]
    svg = out.getvalue().partition("<svg ")[2]
    script = json.dumps(texts, ensure_ascii=False).replace("<", "\\u003c")
    keys = [(line.label, line.color, line.run) for line in chart.named]
    return Drawn(chart.title, keys if len(keys) > 1 else [], f"<svg {svg}", script)


def figure_of(charts: Sequence[Chart], title: str) -> Figure:
    """The charts below each other. Needs no display and leaves no global state (no pyplot)."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Curves(Figure):
        def _repr_png_(self) -> bytes:  # for notebooks without pyplot
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    size = {"font.size": 10.5, "axes.titlesize": 11}
    with matplotlib.style.context(["default", _STYLE, size]):
        figure = Curves(figsize=(10, 3.4 * len(charts) or 3.6), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        if not charts:
            figure.text(0.5, 0.5, "no training steps yet", ha="center", color=_GRAY)
            return figure
        every = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, chart in zip(every, charts, strict=True):
            _paint(axes, chart)
            axes.label_outer()
            axes.set_title(chart.title)
            if len(chart.named) > 1:
                axes.legend()
    return figure


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
        look: dict[str, Any] = {"labels": [line.label for line in lines]}
        look["colors"] = [line.color for line in lines]
        axes.stackplot(lines[0].xs, [line.ys for line in lines], **look)
        axes.set_ylim(0, 1)
    for label, xs, ys, color, run, _ in chart.lines if chart.kind != "stack" else ():
        look = {"lw": 1.5, "marker": "o" if len(xs) <= _MOST_DOTS else "", "label": label}
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
