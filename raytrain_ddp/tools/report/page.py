"""What the pages of a run, of several runs, and of a sweep show: tables and charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Failed
from raytrain_ddp.tools.formatting import (
    format_bytes,
    format_metric,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report.charts import (
    COLORS,
    Chart,
    Drawn,
    Line,
    curves,
    drawn,
    scale_of,
    speed_charts,
)
from raytrain_ddp.tools.report.run_files import Run, happenings, state_of

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


def html_of(**about: Any) -> str:
    """A page as HTML.

    Args:
        about: the variables of page.html.j2: ``title``, ``text``, ``sections``, ``badge`` (the
            state of the run), ``wrong`` (problems), ``command``, and ``every_s``, the seconds
            after which the page reloads itself (0: never).
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader(__package__, "")
    template = Environment(loader=loader, autoescape=True).get_template("page.html.j2")
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC, raytrain_ddp {package_version()}"
    return template.render(about, made=made)


def sections_of_run(run: Run, predicted: Sequence[Part]) -> Sections:
    """All that is shown of a single run."""
    fields = {"value": run.config, "default": flat(TrainConfig())}
    cards = [(Cell(name, "dim"), cell) for name, cell in _figures(run).items()]
    versions = (f"{name} {text}" for name, text in run.plan.versions.items())
    return [
        ("", [Table((), cards, "cards")]),
        ("Curves", [*map(drawn, curves([run]))]),
        ("Speed", [*map(drawn, speed_charts(run))]),
        ("What happened", [_happenings(run)]),
        ("Predictions", predicted),
        ("Config, where it is not the default", [_differing(fields)] if run.config else []),
        ("Environment", [", ".join([run.place, *sorted({*run.plan.hosts}), *versions])]),
    ]


def _figures(run: Run) -> dict[str, Cell]:
    """The figures of a run that are known, by name."""
    found, timings = dict[str, Cell](), [record.timing for record in run.timed]
    if run.best:
        last = format_metric(run.monitor, run.evals[-1].metrics.get(run.monitor, math.nan))
        found["best"] = Cell(run.best_summary, small=f"last {last}")
    if run.plans:
        over = format_seconds(run.events[-1].wall - run.events[0].wall)
        starts = f"{plural(len(run.plans), 'start')} over {over}"
        worked_s = run.train[-1].seconds_total if run.train else 0.0  # repeated steps count once
        found["time at work"] = Cell(format_seconds(worked_s), small=starts)
        sizes = [str(size) for size, _ in groupby(plan.world_size for plan in run.plans)]
        failures = plural(sum(isinstance(e, Failed) for e, _, _ in run.events), "failure")
        found["workers"] = Cell(" → ".join(sizes), small=failures)
    if timings:
        limit = f"{1e3 * median(each.step_s for each in timings):.3g} ms a step; {run.limit}"
        found["speed"] = Cell(run.speed, small=limit.rstrip("; "))
        memory = max(each.peak_memory_bytes for each in timings)
        found["peak memory"] = Cell(format_bytes(memory), small="of a worker")
        if mfu := [each.mfu for each in timings[-50:] if each.mfu is not None]:
            found["MFU"] = Cell(format_share(median(mfu)), small="of a worker")
    return found


def _happenings(run: Run) -> Table:
    """What happened, in chronological order."""
    rows = []
    for one in happenings(run):
        what = Cell(one.text, f"dot {one.kind}", more=one.detail.strip()[-6000:])
        rows.append((one.time[5:19].replace("T", " "), "" if one.step is None else one.step, what))
    return Table(("when (UTC)", "step", "what"), rows)


def _differing(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """The fields in which configs differ, with a column for each config."""
    rows = []
    for name in dict.fromkeys(name for each in columns.values() for name in each):
        values = [as_text(each.get(name)) for each in columns.values()]
        if len({*values}) > 1 and name not in _FREE:
            rows.append([Cell(text, "code") for text in (name, *values)])
    return Table(("field", *columns), rows)


def sections_of_runs(runs: Sequence[Run], is_sweep: bool) -> Sections:
    """Running runs first, then the newest; of a sweep, the best first, with what varies."""
    found = [(run.value, e.metrics.get(run.monitor, math.nan)) for run in runs for e in run.evals]
    sign = 1 if any(each > best for best, each in found) else -1

    def rank(run: Run) -> tuple[Any, ...]:
        newest = state_of(run).name != "running", -(run.events[-1].wall if run.events else 0.0)
        return (run.best is None, sign * run.value) if is_sweep else newest

    shown = sorted(runs, key=rank)
    varying = _differing({run.name: run.config for run in shown if run.config})
    fields = [name.text for name, *_ in varying.rows] if is_sweep else []
    return [
        ("Runs", [*_by_field(shown, fields), _runs(shown, fields)]),
        ("Curves", [*map(drawn, curves(shown[: len(COLORS)]))]),
        ("Where their configs differ", [] if is_sweep else [varying]),
    ]


def _by_field(runs: Sequence[Run], fields: Sequence[str]) -> Iterator[Drawn]:
    """The best evaluations over each field that is a number."""
    for name in fields:
        points = [(run.config.get(name), run.value) for run in runs if run.best]
        if len(points) > 1 and all(isinstance(x, int | float) for x, _ in points):
            xs, ys = np.array(sorted(points), dtype=float).T
            line = Line(metric := runs[0].monitor, xs, ys, scale=scale_of(metric))
            yield drawn(Chart(f"{metric} by {name}", [line], (), "points", name))


def _runs(runs: Sequence[Run], fields: Sequence[str]) -> Table:
    """Each run with its state, progress and time left, these fields of its config, and figures."""
    rows, found = [], [_figures(run) for run in runs]
    names = [*dict.fromkeys(name for figures in found for name in figures)]
    for number, (run, figures) in enumerate(zip(runs, found, strict=True)):
        state, box = state_of(run), Cell(run.name)
        if number < len(COLORS):
            box = Cell(run.name, style=f"--c: {COLORS[number]}", run=f"run{number}")
        css, text = f"state progress {state.name}", state.cause or state.summary
        share = run.last_step / (run.plan.total_steps or math.inf)
        progress = Cell(state.name, css, text, style=f"--share: {share:.1%}")
        values = (Cell(as_text(run.config.get(name)), "code") for name in fields)
        rows.append((box, progress, *values, *(figures.get(name, "-") for name in names)))
    return Table(("run", "progress", *fields, *names), rows)
