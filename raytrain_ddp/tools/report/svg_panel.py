"""Draws a panel as SVG that is stretched to any width, with labels in HTML.

Text within the SVG would shrink with it on a phone. All positions are in thousandths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from raytrain_ddp.tools.display.axes import Area, Line, Panel, Point

_MOST_HOVERS = 400


def panel_html(panel: Panel) -> str:
    """A <figure>."""
    parts = [
        f'<figure class="panel {panel.height}">',
        f"<figcaption><b>{escape(panel.title)}</b>{_legend(panel)}",
        f"<small>{escape(panel.note)}</small>" if panel.note else "",
        "</figcaption>",
        '<div class="plot">',
        _svg(panel),
        *_labels(panel),
        f'<script type="application/json">{_hovers(panel)}</script>',
        "</div>",
        f'<div class="xname">{escape(panel.x_name)}</div></figure>',
    ]
    return "".join(parts)


def _svg(panel: Panel) -> str:
    label = escape(panel.title, quote=True)
    parts = [
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{label}">'
    ]
    grid = "".join(f"M0 {_down(panel, value)}h1000" for value, _ in panel.y.ticks)
    parts.append(f'<path class="grid" d="{grid}"/>')
    for mark in (mark for mark in panel.marks if mark.to is not None):
        x, to = _across(panel, mark.x), _across(panel, mark.to or 0.0)
        shape = f'<rect x="{x}" y="0" width="{_short(float(to) - float(x))}" height="1000"'
        parts.append(f'{shape} class="band {mark.kind}">{_title(mark.text)}</rect>')
    for area in panel.areas:
        parts.append(f'<path class="area {area.css}" d="{_area(panel, area)}"/>')
    for line in panel.lines:
        css = line.css.split()
        alone = " dots" if all(len(piece) == 1 for piece in line.pieces) else ""
        path = _path(panel, line, "dots" in css)
        parts.append(f'<path class="line{alone} {line.css}" d="{path}"/>')
        if "dotted" in css:
            parts.append(f'<path class="line dots {line.css}" d="{_path(panel, line, True)}"/>')
    for mark in (mark for mark in panel.marks if mark.to is None):
        d = f"M{_across(panel, mark.x)} 0v1000"
        parts.append(f'<path class="mark {mark.kind}" d="{d}">{_title(mark.text)}</path>')
    return "".join(parts) + "</svg>"


def _area(panel: Panel, area: Area) -> str:
    """Forth along the top edges and back along the bottom edges, for each gapless piece."""
    pieces: list[list[tuple[float, float, float, float]]] = []
    for step in area.steps:
        if pieces and abs(pieces[-1][-1][1] - step[0]) < 1e-9:
            pieces[-1].append(step)
        else:
            pieces.append([step])
    out = []
    for piece in pieces:
        there = "".join(f"V{_down(panel, top)}H{_across(panel, to)}" for _, to, _, top in piece)
        back = "".join(
            f"V{_down(panel, foot)}H{_across(panel, since)}" for since, _, foot, _ in piece[::-1]
        )
        out.append(f"M{_across(panel, piece[0][0])} {_down(panel, piece[0][2])}{there}{back}Z")
    return "".join(out)


def _path(panel: Panel, line: Line, dots: bool) -> str:
    out = []
    for piece in line.pieces:
        at = [f"{_across(panel, x)} {_down(panel, y)}" for x, y in piece]
        if dots or len(at) == 1:
            out += [f"M{place}h0" for place in at]  # with round line caps: a dot
        elif at:
            out.append("M" + "L".join(at))
    return "".join(out)


def _labels(panel: Panel) -> Iterable[str]:
    scale_x, scale_y = panel.x, panel.y
    for value, name in scale_y.ticks:
        yield f'<span class="y" style="top:{_part(1 - scale_y.at(value))}">{name}</span>'
    for value, name in scale_x.ticks:
        yield f'<span class="x" style="left:{_part(scale_x.at(value))}">{name}</span>'
    for mark in panel.marks:
        if mark.label:
            left = _part(scale_x.at(mark.x))
            yield (
                f'<span class="flag {mark.kind}" style="left:{left}" '
                f'title="{escape(mark.text, quote=True)}">{escape(mark.label)}</span>'
            )
    for x, y, text in panel.stars:
        place = f"left:{_part(scale_x.at(x))};top:{_part(1 - scale_y.at(y))}"
        title = escape(text, quote=True)
        yield f'<span class="star" style="{place}" title="{title}">★</span>'


def _legend(panel: Panel) -> str:
    entries = panel.legend
    if entries is None:
        shown: list[Line | Area] = [*panel.lines, *panel.areas]
        entries = [(one.label, one.css) for one in shown if one.label]
    return "".join(
        f'<span class="key"><i class="{css}"></i>{escape(label)}</span>' for label, css in entries
    )


def _hovers(panel: Panel) -> str:
    """JSON in which no text can close the script element."""
    shown = panel.hovers[:: -(-len(panel.hovers) // _MOST_HOVERS) or 1]
    pairs = [[round(1000 * panel.x.at(x), 1), text.replace(" %", "\u00a0%")] for x, text in shown]
    text = json.dumps(pairs, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _across(panel: Panel, value: float) -> str:
    return _short(1000 * min(1.01, max(-0.01, panel.x.at(value))))


def _down(panel: Panel, value: float) -> str:
    return _short(1000 * (1 - min(1.2, max(-0.2, panel.y.at(value)))))


def _part(share: float) -> str:
    return f"{_short(100 * share)}%"


def sparkline(lines: Sequence[Sequence[Point]]) -> str:
    """Lines of the loss without axes, on a common scale; "" if none has two points."""
    shown = [line for line in lines if len(line) > 1]
    xs, ys = ([point[n] for line in shown for point in line] for n in (0, 1))
    if not shown:
        return ""
    left, low = min(xs), min(ys)
    wide, high = max(xs) - left or 1.0, max(ys) - low or 1.0
    paths = [
        "M"
        + "L".join(
            f"{_short(100 * (x - left) / wide)} {_short(24 - 24 * (y - low) / high)}"
            for x, y in line
        )
        for line in shown
    ]
    drawn = "".join(f'<path class="line c{n}" d="{d}"/>' for n, d in enumerate(paths))
    return (
        '<svg class="spark" viewBox="0 -1 100 26" preserveAspectRatio="none" role="img" '
        f'aria-label="loss">{drawn}</svg>'
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
