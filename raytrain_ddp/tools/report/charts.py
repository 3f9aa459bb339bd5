"""Charts, painted by matplotlib: as SVG in a report, or below each other in a PNG.

An SVG has its colors as CSS variables, for light and dark pages, and its text in the page's font.
Imports matplotlib only to paint.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raytrain_ddp.formatting import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

COLORS: Mapping[str, tuple[str, str]] = {  # (light, dark)
    # After Okabe and Ito, "Color Universal Design" (2008): for any kind of color vision.
    "c0": ("#0072b2", "#4fa8e0"),
    "c1": ("#d55e00", "#ff8a3d"),
    "c2": ("#009e73", "#2cc397"),
    "c3": ("#b3588a", "#e08cb8"),
    "c4": ("#c98600", "#efb63e"),
    "c5": ("#3ba3dd", "#8ccff5"),
    "c6": ("#7a6ad8", "#a99cf5"),
    "c7": ("#6b7280", "#9aa4b1"),
    "ink": ("#16191d", "#e8ebef"),
    "dim": ("#5d6673", "#9ba5b2"),
    "rule": ("#e1e5ea", "#2d333b"),
    "sheet": ("#f6f7f9", "#1c2026"),
    "paper": ("#ffffff", "#14171b"),
    "bad": ("#c02c0b", "#ff7a55"),
}
INK = {name: light for name, (light, _) in COLORS.items()}
SERIES = 8
_LEFT, _RIGHT = 0.115, 0.985  # margins of a chart in a page, as shares of its width
_MOST_HOVERS = 250
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK["dim"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK["dim"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 8.4,
    "grid.color": INK["rule"],
    "legend.edgecolor": "none",
    "lines.markersize": 3.2,
    "path.simplify_threshold": 0.7,  # pixels: a long log becomes small, and its outliers stay
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of metrics may contain $
    "xtick.color": INK["dim"],
    "ytick.color": INK["dim"],
    "ytick.left": False,
}
Hover = tuple[float, str]  # x, text


class Chart(NamedTuple):
    """A chart that `paint` draws on axes; returns texts for the pointer, in addition to the values
    of the labeled lines. Lines with the gid "run3" can be hidden with run 3."""

    title: str
    paint: Callable[[Axes], Sequence[Hover]]
    height: float = 2.5  # inches, in a page of 5.6


class Drawn(NamedTuple):
    """A chart in a page.

    Args:
        keys: (label, color, gid) of each line and area.
        svg: an element. texts: JSON of [x as a share of the width, [[gid, text], ...]]. No name or
            text of a run can end either of them.
    """

    title: str
    keys: Sequence[tuple[str, str, str]]
    svg: str
    texts: str


class Mark(NamedTuple):
    """A vertical line; `flag` is written above it, `text` shown at the pointer."""

    x: float
    text: str
    color: str = "dim"
    flag: str = ""


def drawn(chart: Chart) -> Drawn:
    """Draws a chart for a page."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(5.6, chart.height))
        figure.subplots_adjust(_LEFT, 0.4 / chart.height, _RIGHT, 1 - 0.17 / chart.height)
        axes = figure.subplots()
        hovers = chart.paint(axes)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
        keys = [(label, _css(line), line.get_gid() or "") for line, label in _legend(axes)]
    svg = out.getvalue().partition("<svg ")[2]
    svg = re.sub(r'id="(run\d+)"', r'class="\1"', svg)
    svg = re.sub(r' id="[^mp][^"]*"| (?:width|height)="[\d.]+pt"| font-family: [^;]*;', "", svg)
    svg = re.sub(r'\b[dxy]="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), svg)
    for name, light in INK.items():
        svg = svg.replace(light, f"var(--{name})")
    text = json.dumps(_texts(axes, hovers), separators=(",", ":"), ensure_ascii=False)
    for sign in "&<>":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Drawn(chart.title, keys if len(keys) > 1 else [], f"<svg {svg}", text)


def stacked(charts: Sequence[Chart], title: str) -> Figure:
    """The charts below each other, as a figure that notebooks display.

    Needs no display and leaves no global state (no pyplot).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Curves(Figure):
        def _repr_png_(self) -> bytes:  # for notebooks without pyplot
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    heights = [1.4 * chart.height for chart in charts] or [3.6]
    with _style(**{"font.size": 10.5, "axes.titlesize": 11}):
        figure = Curves(figsize=(10, sum(heights)), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        if not charts:
            figure.text(0.5, 0.5, "no training steps yet", ha="center", color=INK["dim"])
            return figure
        grid = figure.subplots(len(charts), 1, sharex=True, height_ratios=heights, squeeze=False)
        for axes, chart in zip(grid[:, 0], charts, strict=True):
            chart.paint(axes)
            axes.label_outer()
            axes.set_title(chart.title)
            if len(_legend(axes)) > 1:
                axes.legend()
    return figure


def plot_line(axes: Axes, xs: Numbers, ys: Numbers, label: str, most: int, **style: Any) -> None:
    """A line; of up to `most` points, each has a dot."""
    axes.plot(xs, ys, label=label, marker="o" if len(xs) <= most else "", **style)


def plot_marks(axes: Axes, marks: Sequence[Mark]) -> list[Hover]:
    """Draws marks, and returns their texts."""
    above = axes.get_xaxis_transform()
    for x, _, color, flag in marks:
        axes.axvline(x, color=INK[color], lw=1.1, ls="-" if color == "bad" else (0, (3, 3)))
        axes.text(x, 1.01, flag, transform=above, ha="center", color=INK[color], weight="bold")
    return [(mark.x, mark.text) for mark in marks]


def percents(axes: Axes) -> None:
    """The y axis has shares."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.4g} %"))
    axes.fmt_ydata = lambda y: f"{format_number(100 * y)} %"


def smoothed(values: Numbers, half_width: int) -> Numbers:
    """The mean of each value and its ``half_width`` neighbors on both sides, fewer toward both
    ends; nan stays nan."""
    known = np.isfinite(values)
    sums = np.zeros((2, len(values) + 1))
    np.cumsum([np.where(known, values, 0.0), known], 1, out=sums[:, 1:])
    at = np.arange(len(values))
    reach = np.minimum(half_width, np.minimum(at, at[::-1]))
    total, count = sums[:, at + reach + 1] - sums[:, at - reach]
    return np.where(known, total / np.maximum(1, count), np.nan)


def _style(**more: Any) -> Any:
    """Overrides the user's matplotlibrc within a ``with``."""
    import matplotlib.style

    return matplotlib.style.context(["default", _STYLE | more])


def _legend(axes: Axes) -> list[tuple[Any, str]]:
    return [*zip(*axes.get_legend_handles_labels(), strict=True)]


def _css(handle: Any) -> str:
    """The name of a line's or an area's color."""
    from matplotlib.colors import to_hex

    shade = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
    return next((name for name, light in INK.items() if light == to_hex(shade)), "dim")


def _texts(axes: Axes, hovers: Sequence[Hover]) -> list[tuple[float, list[tuple[str, str]]]]:
    lines = [line for line, _ in _legend(axes)] if axes.fmt_ydata else []
    places = np.unique(np.concatenate([[], *(line.get_xdata() for line in lines)]))
    places = places[np.isfinite(places)][:: -(-len(places) // _MOST_HOVERS) or 1]
    found = {float(x): [("", axes.format_xdata(x))] for x in places}
    for line in lines:
        xs, ys = line.get_data()
        for x, at in zip(found, np.searchsorted(xs, [*found], "right") - 1, strict=True):
            if at >= 0 and (at + 1 < len(xs) or xs[at] == x) and math.isfinite(ys[at]):
                text = f"{line.get_label()} {axes.format_ydata(ys[at])}"
                found[x].append((line.get_gid() or "", text))
    for x, text in hovers[:: -(-len(hovers) // _MOST_HOVERS) or 1]:
        found.setdefault(x, []).append(("", text))
    left, right = axes.get_xlim()
    scale = (_RIGHT - _LEFT) / (right - left)
    return [(round(_LEFT + scale * (x - left), 4), each) for x, each in sorted(found.items())]
