"""What the page of several runs or of a storage shows; and that of a sweep: also its trials."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain_ddp.formatting import format_metric, format_seconds
from raytrain_ddp.tools.report.charts import INK, SERIES, Chart, Hover
from raytrain_ddp.tools.report.curves import curves
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.page import (
    Cell,
    Part,
    Sections,
    charts_of,
    value_cell,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS, _MOST_CURVES = 500, 12  # trials in the table; runs whose curves are shown
_FREE = ("name", "storage")  # they identify the run, not how it is trained


def sections_of_runs(
    histories: Sequence[RunHistory],
    sweep: Mapping[str, Any] | None = None,
    trouble: Sequence[str] = (),
) -> Sections:
    """Running runs first, then the newest; of a sweep, the best trials first.

    Args:
        sweep: the content of sweep.json. trouble: what cannot be read.
    """
    trials = _by_value(sweep) if sweep else []
    places = {trial["name"]: place for place, trial in enumerate(trials)}

    def rank(history: RunHistory) -> tuple[int, bool, float]:
        wall = max((each.wall for each in history.happenings), default=0.0)
        return places.get(history.files.name, len(places)), history.state != "running", -wall

    shown = sorted(histories, key=rank)
    some = shown[:_MOST_CURVES]
    return [
        ("", [{"wrong": each} for each in trouble]),
        ("Trials", _trials(sweep, trials) if sweep else []),
        ("Runs", [_table_of_runs(shown)]),
        ("Curves", charts_of(curves([history.files for history in some])) if some else []),
        ("Where their configs differ", _config_differences(some)),
    ]


def _table_of_runs(histories: Sequence[RunHistory]) -> Part:
    """Each run with its state, progress and time left."""
    head = ("run", "progress", "best", "time at work", "speed", "workers", "restarts")
    rows = []
    for number, history in enumerate(histories):
        files, plans = history.files, history.plans
        done = (
            1.0
            if history.state == "finished"
            else files.last_step / (files.total_steps or math.inf)
        )
        box = number if number < _MOST_CURVES else -1
        state = history.cause or history.summary
        rows.append(
            (
                Cell(files.name, f"key c{number % SERIES}", run=box),
                Cell(history.state, f"progress {history.state}", state, share=done),
                Cell(files.best_summary or "-", small=history.limit),
                format_seconds(history.worked_s),
                history.speed or "-",
                ", ".join(str(plan.world_size) for plan in plans[-1:]),
                str(max(0, len(plans) - 1)),
            )
        )
    return {"head": head, "rows": rows}


def _config_differences(histories: Sequence[RunHistory]) -> list[Part]:
    """The fields in which runs differ, with a column for each run that has a config."""
    known = [history.files for history in histories if history.files.config]
    settings = [files.settings() for files in known]
    names = dict.fromkeys(name for each in settings for name in each if name not in _FREE)
    rows = []
    for name in names:
        values = [value_cell(each.get(name, (None, None))[0]) for each in settings]
        if len({*values}) > 1:
            rows.append([Cell(name, "code"), *values])
    note = "" if rows else "Their configs are equal, or cannot be read."
    return [{"head": ("field", *(files.name for files in known)), "rows": rows}, {"note": note}]


def _by_value(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials, the best first; those without a value at the end."""
    sign = -1 if sweep["mode"] == "max" else 1
    return sorted(sweep["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0)))


def _trials(sweep: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> list[Part]:
    metric, fields = sweep["metric"], sweep["fields"]
    valued = [trial for trial in trials if trial["value"] is not None]
    rows = []
    for trial in trials[:_MOST_ROWS]:
        value = "-" if trial["value"] is None else format_metric(metric, trial["value"])
        texts = (Cell(_text(trial["values"].get(name)), "code") for name in fields)
        rows.append((trial["name"], Cell(trial["state"], trial["state"]), value, *texts))
    parts: list[Part] = [{"head": ("trial", "state", metric, *fields), "rows": rows}]
    if len(valued) < 2:
        return parts
    columns = {name: [trial["values"].get(name) for trial in valued] for name in fields}
    columns[metric] = [trial["value"] for trial in valued]
    names = [trial["name"] for trial in valued]
    title = f"The best {min(SERIES, len(valued))} of {len(valued)} trials are colored"
    return [*charts_of([Chart(title, lambda axes: _coordinates(axes, columns, names))]), *parts]


def _coordinates(
    axes: Axes, columns: Mapping[str, Sequence[Any]], names: Sequence[str]
) -> Sequence[Hover]:
    """An axis for each column, and a line for each trial, the best on top."""
    heights = [_heights(values) for values in columns.values()]
    for place, name in enumerate(names):
        best = place < SERIES
        look: dict[str, Any] = {
            "color": INK[f"c{place}" if best else "c7"],
            "lw": 1.8 if best else 0.6,
        }
        look["zorder"] = 2 + 1 / (1 + place)
        axes.plot([column[place] for column in heights], label=name if best else None, **look)
    axes.set(xlim=(-0.3, len(columns) - 0.7), yticks=[0, 1], yticklabels=["low", "high"])
    axes.set_xticks(range(len(columns)), [*columns])
    axes.grid(axis="x")
    hovers = []
    for x, (title, values) in enumerate(columns.items()):
        texts = [f"{name} {_text(value)}" for name, value in zip(names, values, strict=True)]
        hovers.append((float(x), "\n".join([title, *texts[:SERIES]])))
    return hovers


def _heights(values: Sequence[Any]) -> list[float]:
    """Where values are on their axis, 0 to 1: by their logarithm, if they span two decades."""
    if not all(isinstance(value, int | float) for value in values):
        texts = sorted({_text(value) for value in values})
        values = [texts.index(_text(value)) for value in values]
    if 0 < 100 * min(values) <= max(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    return [(value - low) / ((high - low) or 1) for value in values]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')
