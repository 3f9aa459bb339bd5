"""What the pages of a run, of several runs, and of a storage show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any, NamedTuple

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.events import CheckpointFailed, Failed
from raytrain_ddp.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report.charts import COLORS, Chart, drawn
from raytrain_ddp.tools.report.curves import RunCurves, curves
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.time_charts import marks_of, step_time, time_charts

_MOST_HAPPENINGS, _MOST_CHECKPOINTS, _MOST_DETAIL = 200, 50, 6000

Part = Mapping[str, Any]
"""A part of a page, by the key that it has:

- ``note``, ``wrong``: text. ``cards``: (name, value, what is said besides) of each.
- ``rows`` of a table, of texts and `Cell`; with its ``head``, and optionally ``css``, ``title``.
- ``charts``: `charts.Drawn` of each. ``gallery``: `predictions.Mistake` of each.
- ``fold``: a line that opens ``parts``.
"""
Sections = Sequence[tuple[str, Sequence[Part]]]  # (title, parts); without parts, it is left out


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        css: classes. title: for the pointer.
        small: what is said besides. more: long text that is folded away.
        share: of its width or strength that is colored, 0 to 1.
        run: number of a run, for a box that shows or hides its curves.
    """

    text: str
    css: str = ""
    small: str = ""
    more: str = ""
    title: str = ""
    share: float = 0.0
    run: int = -1


def page(title: str, badge: str, text: str, sections: Sections, command: str, every_s: int) -> str:
    """A whole page, as HTML.

    Args:
        badge: state of the run; "" without.
        command: what wrote it.
        every_s: seconds after which it reloads itself; 0: never.
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader(__package__, "")
    template = Environment(loader=loader, autoescape=True).get_template("page.html.j2")
    about = {"title": title, "badge": badge, "text": text, "command": command, "every_s": every_s}
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC, raytrain_ddp {package_version()}"
    return template.render(about, sections=sections, colors=COLORS, made=made)


def sections_of_run(history: RunHistory, predicted: Sequence[Part]) -> Sections:
    """All that is shown of a single run."""
    files = history.files
    followed = [RunCurves(files.name, [], files.followed)] if files.followed else []
    return [
        ("", [{"wrong": history.cause}, {"cards": _cards(history)}]),
        ("Curves", charts_of(curves([files], marks_of(history)))),
        ("Evaluations alongside the run", charts_of(curves(followed)) if followed else []),
        ("Speed", charts_of(time_charts(history))),
        ("What happened", _happenings(history)),
        ("Predictions", predicted),
        ("Checkpoints", _checkpoints(history)),
        ("Config", _config(history)),
        ("Environment", _environment(history)),
    ]


def charts_of(charts: Sequence[Chart]) -> list[Part]:
    return [{"charts": [drawn(chart) for chart in charts]}]


def _cards(history: RunHistory) -> list[tuple[str, str, str]]:
    files, plans, records = history.files, history.plans, history.timed
    cards = []
    if files.best:
        values = [e.metrics.get(files.monitor, math.nan) for e in (files.best, files.evals[-1])]
        best, last = (format_metric(files.monitor, value) for value in values)
        cards.append((f"Best {files.monitor}", best, f"at step {files.best.step}; last {last}"))
    if plans:
        walls = [wall for _, _, wall in files.events if math.isfinite(wall)] or [0.0]
        besides = f"{plural(len(plans), 'start')} over {format_seconds(walls[-1] - walls[0])}"
        cards.append(("Time at work", format_seconds(history.worked_s), besides))
        sizes = [*dict.fromkeys(str(plan.world_size) for plan in plans)]
        failures = plural(sum(isinstance(e, Failed) for e, _, _ in files.events), "failure")
        cards.append(("Workers", " → ".join(sizes), f"{failures} of workers"))
    if records:
        step = step_time(median(r.timing.step_s for r in records))
        cards.append(("Speed", history.speed, f"{step} a step"))
        memory = max(r.timing.peak_memory_bytes for r in records)
        cards.append(("Peak memory", format_bytes(memory), "of a worker"))
    mfu = [r.timing.mfu for r in records[-50:] if r.timing.mfu is not None]
    if mfu:
        cards.append(("MFU", format_share(median(mfu)), "of a worker"))
    return [*cards, ("What limits it", history.limit, "")] if history.limit else cards


def _happenings(history: RunHistory) -> list[Part]:
    """What happened, in chronological order."""
    entries = list(history.happenings)
    if len(entries) > _MOST_HAPPENINGS:  # notes are dropped first, then entries in the middle
        entries = [one for one in entries if one.kind != "note"]
        entries = entries if len(entries) <= _MOST_HAPPENINGS else [*entries[:50], *entries[-150:]]
    rows = []
    for one in entries:
        moment = datetime.fromtimestamp(one.wall, timezone.utc) if math.isfinite(one.wall) else None
        detail = one.detail.strip()
        is_long = "\n" in detail or len(detail) > 120
        small, more = ("", detail[-_MOST_DETAIL:]) if is_long else (detail, "")
        what = Cell(one.text, f"dot {one.kind}", small, more)
        step = "" if one.step is None else str(one.step)
        rows.append((f"{moment:%m-%d %H:%M:%S}" if moment else "?", step, what))
    left_out = len(history.happenings) - len(entries)
    note = f"{left_out} entries are omitted." if left_out else ""
    return [
        {"head": ("when (UTC)", "step", "what"), "rows": rows, "css": "happenings"},
        {"note": note},
    ]


def _checkpoints(history: RunHistory) -> list[Part]:
    """The existing checkpoints, newest first."""
    rows = []
    for name, manifest in history.files.kept[:_MOST_CHECKPOINTS]:
        best = history.files.best
        star = "★ best" if best and name.step == best.step else ""
        size = f"{manifest.size_bytes / 2**20:.1f} MiB" if manifest else "cannot be read"
        metrics = manifest.metrics.items() if manifest else ()
        text = ", ".join(f"{metric} {format_metric(metric, value)}" for metric, value in metrics)
        rows.append((Cell(str(name), small=star), size, text))
    failed = sum(isinstance(e, CheckpointFailed) for e, _, _ in history.files.events)
    note = f"{failed} more could not be written." if failed else ""
    return [{"head": ("there now", "size", "metrics"), "rows": rows}, {"note": note}]


def _config(history: RunHistory) -> list[Part]:
    """First the fields that differ from the defaults, then all."""
    settings = history.files.settings()
    if not history.files.config:
        return [{"note": "There is no config.toml, or it cannot be read."}]
    rows = [(Cell(name, "code"), *map(value_cell, pair)) for name, pair in settings.items()]
    changed = [row for row in rows if row[1].text != row[2].text]
    head = ("field", "value", "default")
    every: Part = {"fold": f"all {len(rows)} fields", "parts": [{"head": head, "rows": rows}]}
    return [{"head": ("differs from its default", *head[1:]), "rows": changed}, every]


def _environment(history: RunHistory) -> list[Part]:
    """Where it ran, on which devices, and with which versions, as far as recorded."""
    files, found = history.files, {"folder": str(history.files.place)}
    for plan in history.plans[-1:]:
        found["workers"] = f"{plan.world_size} x {plan.device}, on {', '.join({*plan.hosts})}"
        found["versions"] = ", ".join(f"{name} {text}" for name, text in plan.versions.items())
        samples = f"{format_count(plan.train_samples)} {plan.unit} to train on"
        found["data"] = f"{samples}, {format_count(plan.eval_samples)} to evaluate on"
        found["parameters"] = f"{plan.parameters:,}"
    if files.manifest:
        found["raytrain_ddp"] = files.manifest.written_by
        found["data fingerprint"] = files.manifest.data_fingerprint[:64]
    found["driven now by"] = str(files.owner or "")
    return [
        {"head": (), "rows": [(Cell(name, "dim"), text) for name, text in found.items() if text]}
    ]


def value_cell(thing: Any) -> Cell:
    """A config value as in TOML."""
    text = "not set" if thing is None else json.dumps(thing, ensure_ascii=False, default=str)
    return Cell(text, "code")
