"""What a panel shows, whatever draws it: the report as SVG, curves.png by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_ddp.display.axes import Point, Scale


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
