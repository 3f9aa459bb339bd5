"""Assembles the report as one self-contained HTML file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from statistics import median

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.tools.display.axes import Panel
from raytrain_ddp.tools.display.curves import RunCurves, color, curve_panels
from raytrain_ddp.tools.display.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report import step_phases, tables
from raytrain_ddp.tools.report.history import RunHistory, timed
from raytrain_ddp.tools.report.rank_panels import own_work, rank_panels, rank_splits
from raytrain_ddp.tools.report.svg_panel import panel_html
from raytrain_ddp.tools.report.time_panels import axis_of, step_marks, time_panels, total_split

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_LEAST_TOLD = 0.005  # the smallest share of the time to be shown
_MOST_BARS, _FEW_BARS = 16, 10


def sections_of_run(history: RunHistory, predictions: str) -> str:
    """All that the page of a single run shows, as HTML.

    Args:
        predictions: HTML; "" if there are none.
    """
    x = axis_of([history])
    over_time = [*time_panels([history], x), *rank_panels(history, x)]
    parts = [
        _head(history),
        _what_went_wrong(history),
        _cards(history),
        section("Curves", figures(curve_panels([history.files], step_marks(history)))),
        section("Evaluated beside the run", _followed(history)),
        section("Speed", figures(over_time, one=True) + _phases(history)),
        section("Ranks", _rank_bars(history)),
        section("What happened", tables.happenings(history) if history.happenings else ""),
        section("Metrics in full", tables.full_metrics(history)),
        section("Predictions", predictions),
        section("Checkpoints", tables.checkpoints(history)),
        section("Config", tables.config(history.files)),
        section("Environment", tables.environment_table(history)),
    ]
    return "".join(parts)


def sections_of_runs(histories: Sequence[RunHistory]) -> str:
    """All that the page of several runs shows, as HTML."""
    names = [history.files.name for history in histories]
    parts = [
        f"<header><h1>{escape(' · '.join(names))}</h1></header>",
        section("Side by side", _side_by_side(histories)),
        section("Where their configs differ", tables.config_differences(histories)),
        section("Curves", figures(curve_panels([history.files for history in histories]))),
        section(
            "Speed", figures(time_panels(histories, axis_of(histories))) + _run_bars(histories)
        ),
    ]
    for history in histories:
        inner = _what_went_wrong(history) + tables.happenings(history)
        parts.append(section(f"What happened: {history.files.name}", inner))
    return "".join(parts)


def page_of_runs(body: str, histories: Sequence[RunHistory]) -> str:
    """The whole page of runs."""
    names = ", ".join(history.files.name for history in histories)
    places = [history.files.place.address for history in histories]
    return whole_page(names, body, places, any(h.state == "running" for h in histories))


def whole_page(title: str, body: str, places: Sequence[str], live: bool) -> str:
    """The page around its sections: head, style and footer.

    Args:
        places: what the command was given.
        live: the runs continue.
    """
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    again = " A run was still in progress: run the command again to update this." if live else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{(_HERE / 'style.css').read_text(encoding='utf-8')}</style></head><body>"
        f"{body}<footer>{made}, raytrain_ddp {escape(package_version())}: "
        f"<code>raytrain report {escape(shlex.join(places))}</code>.{again}</footer>"
        f"<script>{(_HERE / 'hover.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>" if inner else ""


def figures(panels: Sequence[Panel], one: bool = False) -> str:
    """Next to each other, or below each other with a common time axis."""
    inner = "".join(map(panel_html, panels))
    css = " one" if one else " odd" if len(panels) % 2 else ""
    return f'<div class="panels{css}">{inner}</div>' if inner else ""


def _followed(history: RunHistory) -> str:
    """Returns the curves of `evaluate --follow` as HTML; "" if there are none."""
    found = history.files.followed
    return figures(curve_panels([RunCurves(history.files.name, [], found)])) if found else ""


def _head(history: RunHistory) -> str:
    badge = f'<span class="badge {history.state}">{history.state}</span>'
    name, summary = escape(history.files.name), escape(history.summary)
    return f"<header><h1>{name}{badge}</h1><p>{summary}</p></header>"


def _cards(history: RunHistory) -> str:
    files, line = history.files, history.timeline
    cards: list[tuple[str, str, str]] = []  # name, value, what is said besides
    best, monitor = files.best, files.monitor
    if best and monitor in best.metrics:
        value = format_metric(monitor, best.metrics[monitor])
        last = files.evals[-1].metrics.get(monitor, math.nan)
        besides = f"at step {format_count(best.step)}; last {format_metric(monitor, last)}"
        cards.append((f"Best {monitor}", value, besides))
    if line.attempts:
        days = format_seconds(line.attempts[-1].ended - line.attempts[0].began)
        starts = len(line.attempts)
        besides = f"in {starts} starts over {days}" if starts > 1 else "one start"
        cards.append(("Time at work", format_seconds(line.worked_s), besides))
    if history.speed:
        steps = [r.timing.step_s for r in timed(files)]
        besides = f"{step_phases.step_time(median(steps))} a step" if steps else ""
        cards.append(("Speed", history.speed, besides))
    sizes = [str(attempt.world_size) for attempt in line.attempts if attempt.world_size]
    if sizes:
        grown = list(dict.fromkeys(sizes))
        cards.append(("Workers", sizes[-1], f"so far {', '.join(grown)}" if grown[1:] else ""))
    if line.attempts[1:]:
        failures = sum(attempt.failed for attempt in line.attempts)
        failed = f"after {plural(failures, 'failure')} of workers" if failures else ""
        cards.append(("Restarts", str(len(line.attempts) - 1), failed))
    newest = [r.timing for r in timed(files)[-50:]]
    mfu = [t.mfu for t in newest if t.mfu is not None]
    flops = [t.flops_per_s for t in newest if t.flops_per_s is not None]
    if flops:
        each = _flops(median(flops))
        if mfu:
            cards.append(("MFU", format_share(median(mfu)), f"{each} a worker"))
        else:
            cards.append(("Arithmetic", each, "a worker"))
    memory = max((r.timing.peak_memory_bytes for r in timed(files)), default=0)
    if memory:
        cards.append(("Peak memory", format_bytes(memory), "of a worker"))
    limit = history.limit
    if limit:
        cards.append(("What limits it", limit[0].upper() + limit[1:] + ".", ""))
    return tables.cards(cards)


def _flops(per_s: float) -> str:
    unit, step = next(((u, s) for u, s in (("T", 1e12), ("G", 1e9)) if per_s >= s), ("M", 1e6))
    return f"{per_s / step:.3g} {unit}FLOP/s"


def _what_went_wrong(history: RunHistory) -> str:
    if history.state != "failed":
        return ""
    cause = history.cause[0].upper() + history.cause[1:]
    return f'<div class="wrong-box"><b>What went wrong</b><br>{escape(cause)}</div>'


def _phases(history: RunHistory) -> str:
    """The time of all steps by phase, as a table."""
    seconds = total_split(history)
    shares = step_phases.shares(seconds)
    steps = max(1, history.files.last_step)
    rows = [
        (
            f'<span class="key"><i class="{step_phases.css(name)}"></i></span>'
            f"{escape(step_phases.PHASES.get(name, name))}",
            format_share(share),
            step_phases.step_time(seconds[name] / steps),
            format_seconds(seconds[name]),
        )
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    if not rows:
        return ""
    return tables.table(("over the whole run", ">share", ">a step", ">in all"), rows)


def _rank_bars(history: RunHistory) -> str:
    """A bar for each rank: its time per step in the newest start."""
    ranks = rank_splits(history)
    longest = max((sum(rank.values()) for rank in ranks), default=0.0)
    if longest <= 0:
        return ""
    bars = [_bar(f"rank {n}", rank, sum(rank.values()) / longest) for n, rank in enumerate(ranks)]
    note = "<p class=note>Each rank's median step in the newest start. A fast rank "
    note += "waits in the all-reduce for the slow ones.</p>"
    if len(ranks) <= _MOST_BARS:
        return f'{note}<div class="stacks">{"".join(bars)}</div>{_legend(ranks)}'
    slowest_first = sorted(range(len(ranks)), key=lambda rank: -own_work(ranks[rank]))
    first = "".join(bars[rank] for rank in slowest_first[:_FEW_BARS])
    return (
        f"{note}<p class=note>The {_FEW_BARS} with the most own work:</p>"
        f'<div class="stacks">{first}</div>{_legend(ranks)}<details><summary>all {len(ranks)} ranks'
        f'</summary><div class="stacks">{"".join(bars)}</div></details>'
    )


def _run_bars(histories: Sequence[RunHistory]) -> str:
    """A bar for each run: where its time went."""
    splits = [total_split(history) for history in histories]
    bars = [
        _bar(history.files.name, {n: s / max(1, history.files.last_step) for n, s in split.items()})
        for history, split in zip(histories, splits, strict=True)
        if split
    ]
    if not bars:
        return ""
    return f'<h3>Where the time goes</h3><div class="stacks">{"".join(bars)}</div>{_legend(splits)}'


def _bar(name: str, split: Mapping[str, float], width: float = 1.0) -> str:
    parts = []
    for phase, share in step_phases.shares(split).items():
        title = f"{step_phases.PHASES.get(phase, phase)}: {format_share(share)}"
        title += f", {step_phases.step_time(split[phase])} a step"
        style = f"width:{100 * share * width:.2f}%"
        css = step_phases.css(phase)
        parts.append(f'<i class="{css}" style="{style}" title="{escape(title, quote=True)}"></i>')
    whole = f"{step_phases.step_time(sum(split.values()))} a step"
    return (
        f"<span>{escape(name)}</span>"
        f'<div class="stack">{"".join(parts)}</div><span class="dim">{whole}</span>'
    )


def _legend(splits: Sequence[Mapping[str, float]]) -> str:
    shares = [step_phases.shares(split).items() for split in splits]
    names = step_phases.ordered({n for each in shares for n, share in each if share > _LEAST_TOLD})
    keys = (
        f'<span class="key"><i class="{step_phases.css(name)}"></i>'
        f"{escape(step_phases.PHASES.get(name, name))}</span>"
        for name in names
    )
    return f"<p>{''.join(keys)}</p>"


def _side_by_side(histories: Sequence[RunHistory]) -> str:
    rows = []
    for number, history in enumerate(histories):
        line = history.timeline
        total = f" of {history.files.total_steps}" if history.files.total_steps else ""
        rows.append(
            (
                f'<span class="key"><i class="{color(number)}"></i></span>'
                f"{escape(history.files.name)}",
                f'<span class="{history.state}">{history.state}</span>',
                escape(history.files.best_summary or "-"),
                f"{history.files.last_step}{total}",
                format_seconds(line.worked_s) if line.attempts else "-",
                escape(history.speed or "-"),
                str(line.attempts[-1].world_size or "-") if line.attempts else "-",
                str(max(0, len(line.attempts) - 1)),
                escape(history.limit or "-"),
            )
        )
    head = ("run", "state", "best", ">steps", ">time at work", ">speed", ">workers", ">restarts")
    return tables.table((*head, "what limits it"), rows, "runs")
