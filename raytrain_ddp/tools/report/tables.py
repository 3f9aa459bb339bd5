"""HTML tables of a report: what happened, checkpoints, config, environment."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from statistics import median
from typing import Any

from raytrain_ddp.events import Checkpoint, CheckpointFailed, Interval
from raytrain_ddp.tools.display.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_number,
    format_seconds,
    plural,
)
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.run_files import RunFiles

_MOST_HAPPENINGS, _MOST_CHECKPOINTS, _MOST_DETAIL, _MOST_CELLS = 200, 50, 6000, 1024
_SECTIONS_FREE = ("name", "storage")  # they identify the run, not how it is trained


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """Cells are HTML already; columns whose name begins with ``>`` contain numbers."""
    right = [name.startswith(">") for name in head]
    names = "".join(
        f"<th{' class=n' if n else ''}>{escape(name.removeprefix('>'))}</th>"
        for name, n in zip(head, right, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if n else ''}>{cell}</td>" for cell, n in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{names}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table class="{css}">{top}<tbody>{lines}</tbody></table></div>'


def cards(rows: Iterable[tuple[str, str, str]]) -> str:
    """Name, value, and what is said besides, of each."""
    inner = "".join(
        f"<div{' class=long' if len(text) > 40 or name == 'What limits it' else ''}>"
        f"<dt>{escape(name)}</dt><dd>{_whole(text)}"
        f"{f'<small>{_whole(besides)}</small>' if besides else ''}</dd></div>"
        for name, text, besides in rows
    )
    return f'<dl class="cards">{inner}</dl>' if inner else ""


def _whole(text: str) -> str:
    """Escaped text with non-breaking spaces before percent signs."""
    return escape(text.replace(" %", "\u00a0%"))


def happenings(history: RunHistory) -> str:
    """What happened, in chronological order."""
    entries = list(history.happenings)
    left_out = len(entries) - _MOST_HAPPENINGS
    if left_out > 0:  # notes are dropped first, then entries in the middle
        entries = [one for one in entries if one.kind != "note"]
        entries = entries if len(entries) <= _MOST_HAPPENINGS else [*entries[:50], *entries[-150:]]
        left_out = len(history.happenings) - len(entries)
    rows = [
        (
            escape(moment(one.wall)),
            "" if one.step is None else str(one.step),
            f'<span class="dot {one.kind}"></span>{escape(one.text)}{detail(one.detail)}',
        )
        for one in entries
    ]
    note = f"<p class=note>{left_out} entries are omitted.</p>" if left_out > 0 else ""
    return table(("when (UTC)", ">step", "what"), rows, "happenings") + note


def detail(text: str) -> str:
    """Short text after the line; long text in a collapsible element."""
    text = text.strip()
    if not text:
        return ""
    if "\n" not in text and len(text) < 120:
        return f" <small>{escape(text)}</small>"
    shown = escape(text[-_MOST_DETAIL:])
    return f"<details><summary>more</summary><pre>{shown}</pre></details>"


def full_metrics(history: RunHistory) -> str:
    """The non-scalar metrics of the best evaluation, or else of the last one."""
    files = history.files
    record = files.best or (files.evals[-1] if files.evals else None)
    if record is None:
        return ""
    small = f"<small>at step {record.step}</small>"
    tables = record.tables.items()
    return "".join(f"<h3>{escape(name)} {small}</h3>{_grid(found)}" for name, found in tables)


def _grid(found: Any) -> str:
    """A table of a vector or matrix; text for more dimensions or values of another form."""
    if isinstance(found, Mapping):
        shape = " x ".join(map(str, found.get("shape", ())))
        note = f"{shape} numbers, too many for the log: evaluate --out FILE writes them."
        return f"<p class=note>{escape(note)}</p>"
    rows = found if found and all(isinstance(row, list) for row in found) else [found]
    flat = all(not isinstance(cell, list) for row in rows for cell in row)
    if not flat or len(rows) * len(rows[0]) > _MOST_CELLS or not rows[0]:
        return detail(json.dumps(found))
    numbers = [f">{number}" for number in range(len(rows[0]))]
    lines = [[str(number), *(_cell(cell) for cell in row)] for number, row in enumerate(rows)]
    return table(["", *numbers], lines)


def _cell(number: Any) -> str:
    return str(number) if isinstance(number, int) else escape(format_number(number))


def checkpoints(history: RunHistory) -> str:
    """The existing checkpoints, newest first, and a summary of the others."""
    files = history.files
    made = {e.name: e for e, _, _ in files.events if isinstance(e, Checkpoint)}
    best = files.best
    rows = []
    for kept in files.kept[:_MOST_CHECKPOINTS]:
        manifest, event = kept.manifest, made.get(kept.name)
        at_best = bool(best and kept.step == best.step)
        size = manifest.size_bytes if manifest else 0
        metrics = manifest.metrics if manifest else {}
        text = ", ".join(f"{n} {format_metric(n, v)}" for n, v in metrics.items())
        rows.append(
            (
                f"<code>{escape(kept.name)}</code>"
                + (' <span class="best">★ best</span>' if at_best else "")
                + ("" if manifest else ' <span class="bad">cannot be read</span>'),
                str(kept.step),
                escape(size_text(size)) if size else "-",
                escape(format_seconds(event.seconds))
                if event and event.seconds is not None
                else "-",
                escape(text) or "-",
            )
        )
    out = table(("there now", ">step", ">size", ">written in", "metrics"), rows) if rows else ""
    seconds = [e.seconds for e in made.values() if e.seconds is not None]
    text = "There is no checkpoint." if not rows else ""
    if seconds:
        sizes = [e.size_bytes for e in made.values() if e.size_bytes is not None]
        each = f"{format_seconds(median(seconds))} each (median)"
        text = f"{plural(len(seconds), 'checkpoint')} written, {each}, "
        text += f"{format_seconds(max(seconds))} at most"
        text += f"; {size_text(max(sizes))} at most." if sizes else "."
    failed = sum(isinstance(e, CheckpointFailed) for e, _, _ in files.events)
    text += f" {failed} could not be written." if failed else ""
    intervals = [e for e, _, _ in files.events if isinstance(e, Interval)]
    if intervals:
        text += f" By time: every {format_seconds(intervals[-1].seconds)} (auto)."
    return out + (f"<p class=note>{escape(text)}</p>" if text else "")


def config(files: RunFiles) -> str:
    """First the fields that differ from the defaults, then all."""
    settings = files.settings()
    if not files.config:
        return "<p class=note>There is no config.toml, or it cannot be read.</p>"
    changed = {n: pair for n, pair in settings.items() if pair[0] != pair[1]}
    rows = [
        (f"<code>{escape(name)}</code>", value(now), f'<span class="dim">{value(then)}</span>')
        for name, (now, then) in changed.items()
    ]
    first = table(("differs from its default", "value", "default"), rows, "config")
    every = [(f"<code>{escape(n)}</code>", value(now)) for n, (now, _) in settings.items()]
    count = plural(len(every), "field")
    rest = table(("field", "value"), every, "config")
    return f"{first}<details><summary>all {count}</summary>{rest}</details>"


def config_differences(histories: Sequence[RunHistory]) -> str:
    """The fields in which runs differ, with a column for each run."""
    known = [history for history in histories if history.files.config]
    lacking = [history.files.name for history in histories if not history.files.config]
    note = f"<p class=note>{escape(', '.join(lacking))}: no config.toml, or it cannot be read.</p>"
    note *= bool(lacking)
    all_settings = [history.files.settings() for history in known]
    names = list(dict.fromkeys(name for settings in all_settings for name in settings))
    rows = []
    for name in names:
        values = [settings.get(name, (None, None))[0] for settings in all_settings]
        if any(v != values[0] for v in values) and name not in _SECTIONS_FREE:
            rows.append((f"<code>{escape(name)}</code>", *map(value, values)))
    if not rows:
        return note or "<p class=note>Their configs are equal.</p>"
    return note + table(("field", *(s.files.name for s in known)), rows, "config")


def environment_table(history: RunHistory) -> str:
    """Where it ran, on which devices, and with which versions, as far as recorded."""
    files, rows = history.files, []

    def add(name: str, text: object) -> None:
        if text:
            rows.append((escape(name), escape(str(text))))

    add("folder", files.place)
    plans = [attempt.plan for attempt in history.timeline.attempts if attempt.plan]
    if plans:
        plan = plans[-1]
        devices = dict.fromkeys(f"{p.world_size} x {p.device}" for p in plans)
        add("devices", ", ".join(devices))
        hosts = Counter(plan.hosts).items()
        add("hosts", ", ".join(f"{host} ({plural(count, 'worker')})" for host, count in hosts))
        add("versions", ", ".join(f"{name} {text}" for name, text in plan.versions.items()))
        sizes = f"{format_count(plan.train_samples)} {plan.unit} to train on"
        add("data", f"{sizes}, {format_count(plan.eval_samples)} to evaluate on")
        add("parameters", f"{plan.parameters:,}")
    if files.manifest:
        add("raytrain_ddp", files.manifest.written_by)
        add("data fingerprint", files.manifest.data_fingerprint[:64])
    starts = [
        f"{claim.get('host')} (pid {claim.get('pid')}, {plural(int(claim['workers']), 'worker')})"
        for _, claim in files.claims
        if isinstance(claim.get("workers"), int)
    ]
    add("rank 0 was on", "; ".join(starts[-10:]))
    if files.owner:
        add("driven now by", files.owner)
    return table(("", ""), rows, "facts")


def size_text(count: float) -> str:
    """``12 KiB``; from one MiB on as `format_bytes`."""
    return format_bytes(count) if count >= 2**20 else f"{math.ceil(count / 1024)} KiB"


def moment(wall: float) -> str:
    """``11-20 18:05:31``, in UTC."""
    if math.isnan(wall):
        return "?"
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%m-%d %H:%M:%S")


def value(thing: Any) -> str:
    """A config value as in TOML."""
    if thing is None:
        return '<span class="dim">not set</span>'
    if isinstance(thing, Mapping) and not thing:
        return '<span class="dim">none</span>'
    return f"<code>{escape(json.dumps(thing, ensure_ascii=False, default=str))}</code>"
