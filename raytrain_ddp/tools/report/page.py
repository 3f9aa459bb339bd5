"""What the pages of a run, of several runs, and of a sweep show: tables and charts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
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

_MOST_HAPPENINGS, _MOST_CHECKPOINTS, _MOST_DETAIL = 200, 50, 6000
_MOST_TRIALS, _MOST_CURVES = 500, len(COLORS)  # rows; runs whose curves are shown
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
    """Left out if it has no rows. `css` "cards": each row is a card."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
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


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], css: str = "") -> Table:
    """A table of cells and of anything else, which is shown as text."""
    cells = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    return Table(head, cells, css)


def sections_of_run(run: Run, predicted: Sequence[Part]) -> Sections:
    """All that is shown of a single run."""
    fields = {"value": run.config, "default": flat(TrainConfig())}
    return [
        ("", [_cards(run)]),
        ("Curves", [*map(drawn, curves([run]))]),
        ("Speed", [*map(drawn, speed_charts(run))]),
        ("What happened", _happenings(run)),
        ("Predictions", predicted),
        ("Checkpoints", [_checkpoints(run)]),
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
        sizes = [*dict.fromkeys(str(plan.world_size) for plan in run.plans)]
        failures = plural(sum(isinstance(e, Failed) for e, _, _ in run.events), "failure")
        cards.append(("Workers", " → ".join(sizes), f"{failures} of workers"))
    if records:
        step = 1e3 * median(r.timing.step_s for r in records)
        cards.append(("Speed", run.speed, f"{step:.3g} ms a step"))
        memory = max(r.timing.peak_memory_bytes for r in records)
        cards.append(("Peak memory", format_bytes(memory), "of a worker"))
        mfu = [r.timing.mfu for r in records[-50:] if r.timing.mfu is not None]
        cards += [("MFU", format_share(median(mfu)), "of a worker")] if mfu else []
        cards.append(("What limits it", run.limit, ""))
    rows = [(Cell(name, "dim"), Cell(value, "big", small)) for name, value, small in cards]
    return table((), rows, "cards")


def _happenings(run: Run) -> list[Part]:
    """What happened, in chronological order."""
    entries, rows = [*happenings(run)], []
    for one in entries[-_MOST_HAPPENINGS:]:
        known = math.isfinite(one.wall)
        when = f"{datetime.fromtimestamp(one.wall, timezone.utc):%m-%d %H:%M:%S}" if known else "?"
        what = Cell(one.text, f"dot {one.kind}", more=one.detail.strip()[-_MOST_DETAIL:])
        rows.append((when, "" if one.step is None else one.step, what))
    left_out = len(entries) - len(rows)
    found = table(("when (UTC)", "step", "what"), rows)
    return [f"The first {left_out} are left out.", found] if left_out else [found]


def _checkpoints(run: Run) -> Table:
    """The existing checkpoints, newest first."""
    rows = []
    for name, manifest in run.kept[:_MOST_CHECKPOINTS]:
        star = "★ best" if run.best and name.step == run.best.step else ""
        size = format_bytes(manifest.size_bytes) if manifest else "cannot be read"
        metrics = manifest.metrics.items() if manifest else ()
        text = ", ".join(f"{metric} {format_metric(metric, value)}" for metric, value in metrics)
        rows.append((Cell(name, small=star), size, text))
    return table(("there now", "size", "metrics"), rows)


def _differing(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """The fields in which configs differ, with a column for each config."""
    rows = []
    for name in dict.fromkeys(name for each in columns.values() for name in each):
        values = [_toml(each.get(name)) for each in columns.values()]
        if len({*values}) > 1 and name not in _FREE:
            rows.append([Cell(text, "code") for text in (name, *values)])
    return table(("field", *columns), rows)


def _environment(run: Run) -> Table:
    """Where it ran, and with which versions, as far as recorded."""
    found = {
        "folder": run.place,
        "driven now by": run.owner,
        "hosts": ", ".join({*run.plan.hosts}),
        "versions": ", ".join(f"{name} {text}" for name, text in run.plan.versions.items()),
        "data fingerprint": run.manifest.data_fingerprint[:64] if run.manifest else "",
    }
    return table((), [(Cell(name, "dim"), text) for name, text in found.items() if text])


def sections_of_runs(runs: Sequence[Run], sweep: Mapping[str, Any] | None = None) -> Sections:
    """Running runs first, then the newest; of a sweep, the best trials first.

    Args:
        sweep: the content of sweep.json.
    """
    sign = -1 if sweep and sweep["mode"] == "max" else 1
    trials = sweep["trials"] if sweep else []
    trials = sorted(trials, key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0)))
    places = {trial["name"]: place for place, trial in enumerate(trials)}

    def rank(run: Run) -> tuple[int, bool, float]:
        wall = max((wall for _, _, wall in run.events), default=0.0)
        return places.get(run.name, len(places)), state_of(run).name != "running", -wall

    shown = sorted(runs, key=rank)
    some = shown[:_MOST_CURVES]
    configs = {run.name: run.config for run in some if run.config}
    return [
        ("Trials", _trials(sweep, trials) if sweep else []),
        ("Runs", [_runs(shown)]),
        ("Curves", [*map(drawn, curves(some))] if some else []),
        ("Where their configs differ", [_differing(configs)]),
    ]


def _runs(runs: Sequence[Run]) -> Table:
    """Each run with its state, progress and time left."""
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
        best, worked = Cell(run.best_summary or "-", small=run.limit), format_seconds(run.worked_s)
        restarts = max(0, len(run.plans) - 1)
        rows.append((box, progress, best, worked, run.speed, run.plan.world_size, restarts))
    head = ("run", "progress", "best", "time at work", "speed", "workers", "restarts")
    return table(head, rows)


def _trials(sweep: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The trials, the best first, and their values over each field that is a number."""
    metric, fields, rows, charts = sweep["metric"], sweep["fields"], [], list[Part]()
    for trial in trials[:_MOST_TRIALS]:
        value = "-" if trial["value"] is None else format_metric(metric, trial["value"])
        texts = (Cell(_toml(trial["values"].get(name)), "code") for name in fields)
        rows.append((trial["name"], Cell(trial["state"], f"state {trial['state']}"), value, *texts))
    for name in fields:
        points = [(t["values"].get(name), t["value"]) for t in trials if t["value"] is not None]
        if len(points) > 1 and all(isinstance(x, int | float) for x, _ in points):
            xs, ys = np.array(sorted(points), dtype=float).T
            scale = "share" if FRACTION.search(metric) else "any"
            line = Line(metric, xs, ys, scale=scale)
            charts.append(drawn(Chart(f"{metric} by {name}", [line], (), "points", name)))
    return [*charts, table(("trial", "state", metric, *fields), rows)]


def _toml(value: Any) -> str:
    """A config value as in TOML."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "not set" if value is None else text
