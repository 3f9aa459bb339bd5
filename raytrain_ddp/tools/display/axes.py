"""Panels and their axes, whatever draws them: the report as SVG, curves.png by matplotlib.

Axes with round ticks; smoothing, and thinning of points beyond what can be distinguished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

MOST_POINTS = 900  # of a line: more do not change what a screen shows
_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)


@dataclass(frozen=True)
class Scale:
    """Maps values to 0..1, linearly or logarithmically."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            if value <= 0:
                return 0.0
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(
    low: float,
    high: float,
    name: Callable[[float], str] | None = None,
    ticks: int = 5,
    whole: bool = False,
    snap: bool = True,
) -> Scale:
    """A scale over [low, high], extended to the next ticks if `snap`.

    Args:
        name: the label of a tick; default: its number.
        whole: ticks at whole numbers only.
    """
    if not math.isfinite(low + high):
        low, high = 0.0, 1.0
    if high <= low:
        pad = abs(low) / 10 or 1.0
        low, high = low - (0.0 if low == 0 else pad), high + pad
    step = _round_step((high - low) / ticks)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if snap:
        low, high = first * step, last * step
    values = [n * step for n in range(first, last + 1)]
    inside = [v for v in values if low - 1e-9 * step <= v <= high + 1e-9 * step]
    return Scale(low, high, [(v, name(v) if name else tick_number(v, step)) for v in inside])


def log_scale(low: float, high: float) -> Scale:
    """A scale over [low, high], both above 0; ticks at 1, 2 and 5 times powers of ten, if they
    fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [float(f"{factor}e{power}") for power in powers for factor in factors]
        inside = [value for value in values if low <= value <= high]
        if len(inside) <= 6:
            break
    inside = inside[:: -(-len(inside) // 6)]
    return Scale(low, high, [(value, f"{value:g}") for value in inside], log=True)


def time_scale(high: float) -> Scale:
    """A scale from 0 on; ticks at whole seconds, minutes, hours or days."""
    high = max(high, 1.0)
    days = (86400.0 * _round_step(high / 86400 / 6),)
    step = next(s for s in (*_SECONDS, *days) if s >= high / 6 or s == days[0])
    values = [n * step for n in range(int(high / step) + 1)]
    return Scale(0.0, high, [(value, tick_time(value)) for value in values])


def tick_time(value: float) -> str:
    """``0``, ``45 s``, ``1 min 30``, ``1 h 30``, ``2 d``: the label of a time tick."""
    whole = round(value)
    if whole == 0:
        return "0"
    if whole % 86400 == 0:
        return f"{whole // 86400} d"
    if whole >= 3600:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60:02d}" if whole % 3600 else "")
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" + (f" {whole % 60:02d}" if whole % 60 else "")


def tick_number(value: float, step: float) -> str:
    """As many digits as the step between ticks needs, with thousands separators."""
    if abs(value) < step / 1e6:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g} M"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    # A step that differs only in its last bits would need endless digits: limit them.
    digits = next((d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step), 9)
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """About `most` points at most: the lowest and the highest of each stretch, so that no outlier
    is lost. Non-finite points are omitted."""
    points = [point for point in points if math.isfinite(point[0] + point[1])]
    if len(points) <= most:
        return points
    kept, count = list[Point](), most // 2
    for n in range(count):
        stretch = points[n * len(points) // count : (n + 1) * len(points) // count]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def sampled(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points of a smooth line, including the last."""
    points = [point for point in points if math.isfinite(point[0] + point[1])]
    if len(points) <= most:
        return points
    return [*points[:: -(-len(points) // most)], points[-1]]


def smoothed(values: Sequence[float], half_width: int) -> list[float]:
    """The mean of each value and its ``half_width`` neighbors on both sides; nan stays nan.

    The window shrinks toward both ends, to a quarter: a wide one would lag behind a steep start.
    """
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if math.isfinite(value) else 0.0))
        counts.append(counts[-1] + math.isfinite(value))
    means = []
    for index in range(len(values)):
        room = min(index, len(values) - 1 - index)
        reach = min(half_width, max(room, math.ceil(half_width / 4)))
        low, high = max(0, index - reach), min(len(values), index + reach + 1)
        count = counts[high] - counts[low]
        known = math.isfinite(values[index])
        means.append((sums[high] - sums[low]) / count if known else math.nan)
    return means


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))


@dataclass(frozen=True)
class Line:
    """A line of one or more pieces; if "dotted", with a dot at each point.

    Args:
        css: classes: c0 to c7 are colors, "raw" is thin, "dots" draws points only, "fine" no
            points.
    """

    label: str
    css: str
    pieces: Sequence[Sequence[Point]]


@dataclass(frozen=True)
class Area:
    """An area of constant height over each interval: (from, to, bottom, top)."""

    label: str
    css: str
    steps: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Mark:
    """A vertical line, or a band if `to` is set, with its meaning."""

    x: float
    kind: str
    text: str
    label: str = ""
    to: float | None = None


@dataclass(frozen=True)
class Panel:
    """One panel; `hovers` are (x, text), shown at the pointer."""

    title: str
    x: Scale
    y: Scale
    x_name: str
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    marks: Sequence[Mark] = ()
    hovers: Sequence[tuple[float, str]] = ()
    note: str = ""
    legend: Sequence[tuple[str, str]] | None = None  # (label, css); None: of lines and areas
    stars: Sequence[tuple[float, float, str]] = ()  # (x, y, text)
    height: str = ""  # "low" or "high"
