"""The report of a sweep: parallel coordinates, importance, learning curves, and all trials."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from html import escape
from statistics import fmean
from typing import NamedTuple

from raytrain_ddp.checkpoint.run_folder import path_of_run
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.tools.display.axes import Line, Panel, Point, Scale, linear_scale
from raytrain_ddp.tools.display.curves import color, hovers
from raytrain_ddp.tools.display.formatting import (
    format_metric,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report import tables
from raytrain_ddp.tools.report.page import figures, section, whole_page
from raytrain_ddp.tools.sweep.run_sweep import best_command, is_deleted
from raytrain_ddp.tools.sweep.space import Dimension
from raytrain_ddp.tools.sweep.sweep_display import spread
from raytrain_ddp.tools.sweep.sweep_state import OVER, Sweep, Trial, load_sweep
from raytrain_ddp.tools.sweep.trial_configs import value_text
from raytrain_ddp.uri import below

_COLORED = 7  # of the best trials
_LEAST_TRIALS = 10  # for the importance
_GROUPS = 3  # of a range
_MOST_ROWS = 500
_CURVES = 60


class Importance(NamedTuple):
    """How much a dimension alone explains of the trials' ranks.

    Args:
        share: epsilon squared of Kruskal and Wallis, 0 to 1. best: the values that did best.
    """

    dimension: Dimension
    share: float
    best: str


def sweep_at(place: str) -> tuple[Storage, Sweep] | None:
    """The sweep at a path, at a URI, or of that name below runs/; None if there is none.

    Raises:
        PreflightError: the storage does not answer.
    """
    folder = open_storage(path_of_run(place))
    try:
        sweep = load_sweep(folder)
    except OSError as error:
        raise PreflightError(f"{folder}: cannot be read: {error}") from error
    return None if sweep is None else (folder, sweep)


def one_sweep(folder: Storage, sweep: Sweep) -> str:
    """The page of a sweep."""
    name = folder.path.rstrip("/").rpartition("/")[2]
    counts = [f"{sweep.count(s)} {s}" for s in ("finished", "stopped", "failed") if sweep.count(s)]
    total = sweep.total
    left = total - sweep.count(*OVER)
    counts += [f"{left} not done"] if left else []
    about = f"{plural(total, 'trial')}: {', '.join(counts)}. "
    about += f"Search: {sweep.settings.search}; scheduler: {sweep.settings.scheduler}."
    ranked = sweep.ranked()
    parts = [f"<header><h1>{escape(name)}</h1><p>{escape(about)}</p></header>"]
    if ranked:
        parts += [
            _best(folder, sweep, ranked[0]),
            section("Parallel coordinates", figures([_coordinates(sweep, ranked)], one=True)),
            section("Importance", _importance_table(sweep)),
            section("Learning curves", figures([_curves(sweep, ranked)], one=True)),
        ]
    if sweep.settings.seeds > 1:
        parts.append(section("Points", _points(sweep)))
    parts.append(section("Trials", _trials(sweep, ranked)))
    return whole_page(name, "".join(parts), [folder.address], left > 0)


def importance(sweep: Sweep) -> list[Importance]:
    """The dimensions, the most important first; none with too few trials.

    Of each dimension alone: the share of the variance of the trials' ranks that lies between its
    choices, or between three equally large groups of its range, corrected for what chance gives
    (epsilon squared). What dimensions do only together is not seen.
    """
    ranked = sweep.ranked()
    if len(ranked) < _LEAST_TRIALS:
        return []
    rank = {trial.number: float(place) for place, trial in enumerate(ranked)}
    found = []
    for dimension in sweep.settings.space:
        groups = _grouped(dimension, ranked)
        mean = fmean(rank.values())
        total = sum((r - mean) ** 2 for r in rank.values())
        means = {label: fmean(rank[t.number] for t in group) for label, group in groups.items()}
        between = sum(len(group) * (means[label] - mean) ** 2 for label, group in groups.items())
        n, k = len(ranked), len(groups)
        h = (n - 1) * between / total
        share = max(0.0, (h - k + 1) / (n - k)) if n > k > 1 else 0.0
        found.append(Importance(dimension, share, min(means, key=means.__getitem__)))
    return sorted(found, key=lambda each: -each.share)


def _grouped(dimension: Dimension, trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The trials by the choice of a dimension, or in groups of its range, by name."""
    groups: dict[str, list[Trial]] = {}
    if dimension.kind == "choice":
        for trial in trials:
            groups.setdefault(value_text(trial.point[dimension.field]), []).append(trial)
        return groups
    ordered = sorted(trials, key=lambda t: dimension.share(t.point[dimension.field]))
    count = min(_GROUPS, len(ordered))
    for place in range(count):
        part = ordered[place * len(ordered) // count : (place + 1) * len(ordered) // count]
        ends = [value_text(part[end].point[dimension.field]) for end in (0, -1)]
        groups.setdefault(" to ".join(ends), []).extend(part)
    return groups


def _importance_table(sweep: Sweep) -> str:
    found = importance(sweep)
    if not found:
        return f"<p class=note>It takes {_LEAST_TRIALS} trials with an evaluation.</p>"
    rows = [
        (
            f"<code>{escape(each.dimension.field)}</code>",
            format_share(each.share),
            f'<div class="stack" style="min-width:160px"><i class="compute" '
            f'style="width:{100 * each.share:.1f}%"></i></div>',
            f"<code>{escape(each.best)}</code>",
        )
        for each in found
    ]
    note = (
        "Epsilon squared of Kruskal and Wallis: the share of the variance of the trials' ranks "
        "that lies between the choices of a field, or between three equally large groups of its "
        "range. Each field alone: what fields do only together is not seen. "
        f"{plural(len(sweep.ranked()), 'trial')}; below 30, take it as a hint."
    )
    if sweep.settings.scheduler != "none":
        note += " Trials that were stopped early are ranked by what they had reached."
    head = ("field", ">share", "", "best values")
    return tables.table(head, rows) + f"<p class=note>{escape(note)}</p>"


def _best(folder: Storage, sweep: Sweep, best: Trial) -> str:
    value = sweep.best_of(best)
    assert value is not None
    commands = []
    with suppress(ConfigError):  # a version whose config has other fields has written it
        base = from_dict(sweep.settings.config)
        commands += [] if best.origin else [("train it", best_command(base, best))]
    place = shlex.quote(below(folder.address, best.name))
    deleted = is_deleted(folder, best)
    if best.status == "stopped" and folder.is_local and not deleted:
        commands.append(("train it further", f"python -m raytrain_ddp.fit {place}/config.toml"))
    if not deleted:
        commands.append(("report", f"raytrain report {place}"))
    name = best.name + " (deleted)" * deleted
    cards = [(f"Best {sweep.monitor}", format_metric(sweep.monitor, value), name)]
    same = [v for t in sweep.of_point(best) if (v := sweep.best_of(t)) is not None]
    if len(same) > 1:
        cards.append((f"Mean of {len(same)} seeds", spread(sweep.monitor, same), ""))
    cards += [(name, value_text(v), "") for name, v in best.point.items()]
    lines = "\n".join(f"# {what}\n{text}" for what, text in commands)
    return f"{tables.cards(cards)}<pre>{escape(lines)}</pre>"


def _coordinates(sweep: Sweep, ranked: Sequence[Trial]) -> Panel:
    """An axis for each dimension, and the metric as the last; a line for each trial."""
    space = sweep.settings.space
    values = [v for trial in ranked if (v := sweep.best_of(trial)) is not None]  # of all of them
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    names = [dimension.field for dimension in space]
    ticks = [(float(n), escape(name)) for n, name in enumerate([*names, sweep.monitor])]
    worst, best = (format_metric(sweep.monitor, value) for value in (low, high))
    lines = []
    for place, (trial, value) in [*enumerate(zip(ranked, values, strict=True))][::-1]:
        height = 0.0
        if math.isfinite(value):
            height = (value - low) / (high - low) if high > low else 1.0
        shares = [dimension.share(trial.point[dimension.field]) for dimension in space]
        points = [(float(x), y) for x, y in enumerate([*shares, height])]
        lines.append(_line(place, trial, points))  # the best comes last, on top
    texts = [
        (float(n), "\n".join(_at_axis(sweep, trial, dimension) for trial in ranked[:_COLORED]))
        for n, dimension in enumerate(space)
    ]
    return Panel(
        title=f"The best {min(_COLORED, len(ranked))} of {len(ranked)} are colored",
        x=Scale(-0.35, len(space) + 0.35, ticks),
        y=Scale(-0.05, 1.05, [(0.0, "low"), (1.0, "high")]),
        x_name="",
        lines=lines,
        hovers=texts,
        note="; ".join([*map(_ends, space), f"{sweep.monitor} {worst} to {best}"]),
        legend=_legend(sweep, ranked),
        height="high",
    )


def _ends(dimension: Dimension) -> str:
    """What the axis of a dimension shows, from low to high."""
    if dimension.kind == "choice":
        return f"{dimension.field} {', '.join(map(value_text, dimension.choices))}"
    log = " (log)" * dimension.log
    return f"{dimension.field} {dimension.low:g} to {dimension.high:g}{log}"


def _at_axis(sweep: Sweep, trial: Trial, dimension: Dimension) -> str:
    value, best = value_text(trial.point[dimension.field]), _best_text(sweep, trial)
    return f"{trial.name} {value}: {sweep.monitor} {best}"


def _best_text(sweep: Sweep, trial: Trial) -> str:
    best = sweep.best_of(trial)
    return format_metric(sweep.monitor, best) if best is not None else "-"


def _line(place: int, trial: Trial, points: Sequence[Point]) -> Line:
    css = color(place) if place < _COLORED else "raw c7"
    return Line(trial.name if place < _COLORED else "", css, [points])


def _legend(sweep: Sweep, ranked: Sequence[Trial]) -> list[tuple[str, str]]:
    shown = enumerate(ranked[:_COLORED])
    return [(f"{trial.name} {_best_text(sweep, trial)}", color(place)) for place, trial in shown]


def _curves(sweep: Sweep, ranked: Sequence[Trial]) -> Panel:
    """The metric by epochs: the best in color, the others thin."""
    shown = [*enumerate(ranked)][:_CURVES][::-1]
    lines, seen, series = [], [0.0], []
    describe = partial(format_metric, sweep.monitor)
    for place, trial in shown:
        points = [(e.epochs, e.value) for e in trial.evaluations if math.isfinite(e.value)]
        if not points:
            continue
        lines.append(_line(place, trial, points))
        seen += [epochs for epochs, _ in points]
        if place < _COLORED:
            series.append((trial.name, points, describe))
    heights = [y for line in lines for piece in line.pieces for _, y in piece] or [0.0, 1.0]
    left_out = f"{len(ranked) - _CURVES} of the worst are left out" if len(ranked) > _CURVES else ""
    return Panel(
        title=f"{sweep.monitor} by epochs",
        x=linear_scale(0, max(seen), ticks=6, snap=False),
        y=linear_scale(min(heights), max(heights), describe),
        x_name="epoch",
        lines=lines,
        hovers=hovers(series, lambda epoch: f"epoch {epoch:g}"),
        note=left_out,
        legend=_legend(sweep, ranked),
        height="high",
    )


def _points(sweep: Sweep) -> str:
    """The points with the mean of their seeds, the best first."""
    seeds, rows = sweep.settings.seeds, []
    for first in range(0, len(sweep.trials), seeds):
        trials = sweep.trials[first : first + seeds]
        values = [v for trial in trials if (v := sweep.best_of(trial)) is not None]
        if values:
            mean = spread(sweep.monitor, values)
            cells = [mean, str(len(values)), *_point_cells(sweep, trials[0])]
            rows.append((sweep.better(fmean(values)), cells))
    fields = [dimension.field for dimension in sweep.settings.space]
    head = (f">{sweep.monitor}, mean ± deviation", ">seeds", *fields)
    return tables.table(head, [row for _, row in sorted(rows, key=lambda r: -r[0])])


def _trials(sweep: Sweep, ranked: Sequence[Trial]) -> str:
    """All trials, the best first; those without an evaluation at the end."""
    others = [trial for trial in sweep.trials if trial not in ranked]
    rows = []
    for trial in [*ranked, *others][:_MOST_ROWS]:
        epochs = trial.evaluations[-1].epochs if trial.evaluations else 0.0
        state = "interrupted" if trial.status == "stopped" else trial.status
        rows.append(
            (
                escape(trial.name),
                f'<span class="{state}">{trial.status}</span>',
                _best_text(sweep, trial),
                *_point_cells(sweep, trial),
                f"{epochs:g}",
                format_seconds(trial.seconds),
                escape(trial.history),
            )
        )
    fields = [dimension.field for dimension in sweep.settings.space]
    head = ("trial", "state", f">{sweep.monitor or 'metric'}", *fields, ">epochs", ">time", "why")
    left_out = len(sweep.trials) - _MOST_ROWS
    note = f"<p class=note>{left_out} more are left out.</p>" if left_out > 0 else ""
    return tables.table(head, rows, "runs trials") + note


def _point_cells(sweep: Sweep, trial: Trial) -> list[str]:
    return [escape(value_text(trial.point[d.field])) for d in sweep.settings.space]
