"""What the pages of a run, of several runs, and of a sweep show: tables and charts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Failed
from raytrain_ddp.formatting import (
    FRACTION,
    format_bytes,
    format_metric,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report.charts import COLORS, Chart, Drawn, Line, drawn
from raytrain_ddp.tools.report.curves import curves, speed_charts
from raytrain_ddp.tools.report.history import happenings, state_of
from raytrain_ddp.tools.report.run_files import Run

_MOST_DETAIL = 6000  # characters
_MOST_CURVES = len(COLORS)  # runs whose curves are shown
_FREE = ("name", "storage")  # they identify the run, not how it is trained


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        css: classes. style: variables for them, as CSS.
        small: what is said besides. more: long text that is folded away.
        run: class of the curves that a box shows or hides. image: a data URI.
    """

    text: Any
    css: str = ""
    small: str = ""
    more: str = ""
    style: str = ""
    run: str = ""
    image: str = ""


class Table(NamedTuple):
    """Rows of cells, and of anything that is shown as text; left out if there are none. `css`
    "cards": each row is a card."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    css: str = ""


Part = str | Table | Drawn  # a text is a paragraph
Sections = Sequence[tuple[str, Sequence[Part]]]  # (title, parts); left out if it shows nothing


def html_of(sections: Sections, **about: Any) -> str:
    """A page as HTML.

    Args:
        about: its ``title`` and ``text``, the state of the run (``badge``), what went ``wrong``,
            the ``command``, and ``every_s``: it reloads itself so often; 0: never.
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader(__package__, "")
    template = Environment(loader=loader, autoescape=True).get_template("page.html.j2")
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC, raytrain_ddp {package_version()}"
    return template.render(about, sections=sections, made=made)


def sections_of_run(run: Run, predicted: Sequence[Part]) -> Sections:
    """All that is shown of a single run."""
    fields = {"value": run.config, "default": flat(TrainConfig())}
    return [
        ("", [_cards(run), *([f"What limits it: {run.limit}."] if run.limit else [])]),
        ("Curves", [*map(drawn, curves([run]))]),
        ("Speed", [*map(drawn, speed_charts(run))]),
        ("What happened", [_happenings(run)]),
        ("Predictions", predicted),
        ("Config, where it is not the default", [_differing(fields)] if run.config else []),
        ("Environment", [_environment(run)]),
    ]


def _cards(run: Run) -> Table:
    cards, records = [], run.timed
    if run.best:
        values = [e.metrics.get(run.monitor, math.nan) for e in (run.best, run.evals[-1])]
        best, last = (format_metric(run.monitor, value) for value in values)
        cards.append((f"Best {run.monitor}", best, f"at step {run.best.step}; last {last}"))
    if run.plans:
        walls = [wall for _, _, wall in run.events if math.isfinite(wall)] or [0.0]
        besides = f"{plural(len(run.plans), 'start')} over {format_seconds(walls[-1] - walls[0])}"
        cards.append(("Time at work", format_seconds(run.worked_s), besides))
        sizes = [str(size) for size, _ in groupby(plan.world_size for plan in run.plans)]
        failures = plural(sum(isinstance(e, Failed) for e, _, _ in run.events), "failure")
        cards.append(("Workers", " → ".join(sizes), f"{failures} of workers"))
    if records:
        step = 1e3 * median(r.timing.step_s for r in records)
        cards.append(("Speed", run.speed, f"{step:.3g} ms a step"))
        memory = max(r.timing.peak_memory_bytes for r in records)
        cards.append(("Peak memory", format_bytes(memory), "of a worker"))
        mfu = [r.timing.mfu for r in records[-50:] if r.timing.mfu is not None]
        cards += [("MFU", format_share(median(mfu)), "of a worker")] if mfu else []
    rows = [(Cell(name, "dim"), Cell(value, "big", small)) for name, value, small in cards]
    return Table((), rows, "cards")


def _happenings(run: Run) -> Table:
    """What happened, in chronological order."""
    rows = []
    for one in happenings(run):
        known = math.isfinite(one.wall)
        when = f"{datetime.fromtimestamp(one.wall, timezone.utc):%m-%d %H:%M:%S}" if known else "?"
        what = Cell(one.text, f"dot {one.kind}", more=one.detail.strip()[-_MOST_DETAIL:])
        rows.append((when, "" if one.step is None else one.step, what))
    return Table(("when (UTC)", "step", "what"), rows)


def _differing(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """The fields in which configs differ, with a column for each config."""
    rows = []
    for name in dict.fromkeys(name for each in columns.values() for name in each):
        values = [_toml(each.get(name)) for each in columns.values()]
        if len({*values}) > 1 and name not in _FREE:
            rows.append([Cell(text, "code") for text in (name, *values)])
    return Table(("field", *columns), rows)


def _environment(run: Run) -> str:
    """Where it ran, and with which versions, as far as recorded."""
    versions = (f"{name} {text}" for name, text in run.plan.versions.items())
    return ", ".join([run.place, *sorted({*run.plan.hosts}), *versions])


def sections_of_runs(runs: Sequence[Run], is_sweep: bool = False) -> Sections:
    """Running runs first, then the newest; of a sweep, the best first, with what varies."""
    values = [(run.value, each.metrics.get(run.monitor)) for run in runs for each in run.evals]
    sign = 1 if any(each is not None and each > best for best, each in values) else -1

    def rank(run: Run) -> tuple[Any, ...]:
        wall = max((wall for _, _, wall in run.events), default=0.0)
        newest = state_of(run).name != "running", -wall
        return (run.best is None, sign * run.value) if is_sweep else newest

    shown = sorted(runs, key=rank)
    some = shown[:_MOST_CURVES]
    varying = _differing({run.name: run.config for run in shown if run.config})
    fields = [name.text for name, *_ in varying.rows] if is_sweep else []
    return [
        ("Runs", [*_by_field(shown, fields), _runs(shown, fields)]),
        ("Curves", [*map(drawn, curves(some))] if some else []),
        ("Where their configs differ", [] if is_sweep else [varying]),
    ]


def _by_field(runs: Sequence[Run], fields: Sequence[str]) -> Iterator[Drawn]:
    """The best evaluations over each field that is a number."""
    for name in fields:
        points = [(run.config.get(name), run.value) for run in runs if run.best]
        if len(points) > 1 and all(isinstance(x, int | float) for x, _ in points):
            xs, ys = np.array(sorted(points), dtype=float).T
            metric = runs[0].monitor
            scale = "share" if FRACTION.search(metric) else "any"
            line = Line(metric, xs, ys, scale=scale)
            yield drawn(Chart(f"{metric} by {name}", [line], (), "points", name))


def _runs(runs: Sequence[Run], fields: Sequence[str]) -> Table:
    """Each run with its state, progress and time left, and these fields of its config."""
    rows = []
    for number, run in enumerate(runs):
        state = state_of(run)
        done = run.last_step / (run.plan.total_steps or math.inf)
        box = Cell(run.name)
        if number < _MOST_CURVES:
            box = Cell(run.name, style=f"--c: {COLORS[number]}", run=f"run{number}")
        css, share = f"state progress {state.name}", 1.0 if state.name == "finished" else done
        text = state.cause or state.summary
        progress = Cell(state.name, css, text, style=f"--share: {share:.3f}")
        best = Cell(run.best_summary or "-", small="" if fields else run.limit)
        values = (Cell(_toml(run.config.get(name)), "code") for name in fields)
        restarts = max(0, len(run.plans) - 1)
        figures = (format_seconds(run.worked_s), run.speed, run.plan.world_size, restarts)
        rows.append((box, progress, best, *values, *figures))
    head = ("run", "progress", "best", *fields, "time at work", "speed", "workers", "restarts")
    return Table(head, rows)


def _toml(value: Any) -> str:
    """A config value as in TOML."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "not set" if value is None else text
