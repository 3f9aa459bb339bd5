"""The result: what was checked, where, what was found, and what to do; and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_ddp.errors import first_names
from raytrain_ddp.formatting import format_seconds, plural

Verdict = Literal["ok", "warn", "fail"]
DRIVER = "driver"  # the place of this process, which is on the first node
_STYLES: Mapping[Verdict, str] = {"fail": "bold red", "warn": "yellow", "ok": "green"}
_NAMES_SHOWN, _WHERE, _MAX_WIDTH = 3, 18, 110


@dataclass(frozen=True)
class Row:
    """One line of the table. `advice` is empty if nothing is wrong."""

    check: str
    where: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


class Report(NamedTuple):
    """All rows, the JSON values that they were made from, and what failures mean."""

    rows: Sequence[Row]
    findings: Mapping[str, Any]
    if_good: str
    if_bad: str

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)


def merged(rows: Iterable[Row], nodes: Sequence[str]) -> list[Row]:
    """One row for all places of which the same is found; of each check, the worst come first.

    Args:
        nodes: the names of all nodes, that of the driver first.
    """
    places: dict[Row, list[str]] = {}
    for row in rows:
        places.setdefault(replace(row, where=""), []).append(row.where)
    checks, worst = [*dict.fromkeys(row.check for row in places)], [*_STYLES]
    order = sorted(places, key=lambda row: (checks.index(row.check), worst.index(row.verdict)))
    return [replace(row, where=_described(places[row], nodes)) for row in order]


def _described(names: Sequence[str], nodes: Sequence[str]) -> str:
    """``all 3 nodes``, ``w1, w2`` or ``w1, w2, w3 and 4 more``; no driver beside its node."""
    shown = [name for name in names if name != DRIVER or nodes[0] not in names]
    is_all = len(nodes) > 1 and {*nodes} <= {*shown}
    return f"all {len(nodes)} nodes" if is_all else first_names(shown, _NAMES_SHOWN)


def show(report: Report, console: Console) -> None:
    """Prints the table, with what to do below each finding that is not ok, and a conclusion."""
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("where", max_width=_WHERE)
    table.add_column("found", ratio=1)
    table.add_column("", no_wrap=True)
    before = ""
    for row in report.rows:
        style, found = _STYLES[row.verdict], Text(row.found, overflow="fold")
        found.append(f"\n-> {row.advice}" if row.advice else "", style)
        check, before = Text("" if row.check == before else row.check), row.check
        table.add_row(check, Text(row.where, overflow="fold"), found, Text(row.verdict, style))
    console.print(table, width=min(console.width, _MAX_WIDTH))
    failures, warnings = report.count("fail"), report.count("warn")
    text = "No problems found."
    if failures or warnings:
        means = report.if_bad if failures else report.if_good
        text = f"{plural(failures, 'failure')}, {plural(warnings, 'warning')}: {means}."
    console.print(Text(text, "bold"), soft_wrap=True)


def format_duration(seconds: float) -> str:
    """``0.12 ms``, ``8.0 ms``, ``0.42 s``, ``12m05s``; ``-`` if unknown."""
    value, is_short = seconds * 1e3, seconds < 0.0995
    return f"{value:.{2 if value < 0.995 else 1}f} ms" if is_short else format_seconds(seconds)
