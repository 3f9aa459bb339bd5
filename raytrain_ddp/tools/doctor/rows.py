"""The rows of the result: what was checked, where, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from raytrain_ddp.errors import PreflightError, first_names
from raytrain_ddp.tools.display.formatting import format_seconds

Verdict = Literal["ok", "warn", "fail"]
Place = Mapping[str, Any]  # a node, or the driver; see examine.py
GIB = 2**30
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """One line of the table. `advice` is empty if nothing is wrong."""

    check: str
    where: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Note:
    """What was found in one place. Places whose notes differ only in `numbers` share a row.

    Args:
        found: with a ``{}`` for each number.
        numbers: each with the function that formats it.
    """

    found: str
    verdict: Verdict = "ok"
    advice: str = ""
    numbers: tuple[tuple[float, Callable[[float], str]], ...] = ()


@dataclass(frozen=True)
class Report:
    """All rows, and the findings they were made from, as JSON values."""

    rows: tuple[Row, ...]
    findings: Mapping[str, Any]

    @property
    def exit_status(self) -> int:
        """That of a PreflightError if a run would fail."""
        return PreflightError.exit_status if self.count("fail") else 0

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "status": self.exit_status,
            "rows": [asdict(row) for row in self.rows],
            "findings": dict(self.findings),
        }


def grouped(check: str, notes: Mapping[str, Note], places: Sequence[Place]) -> list[Row]:
    """One row for all places with the same note; the worst come first.

    Args:
        notes: by the place's name.
    """
    groups: dict[tuple[str, Verdict, str], list[str]] = {}
    for name, note in notes.items():
        groups.setdefault((note.found, note.verdict, note.advice), []).append(name)
    rows = []
    for (text, verdict, advice), names in groups.items():
        found = text
        for each in zip(*(notes[n].numbers for n in names), strict=True):
            found = found.replace("{}", _span(each), 1)
        rows.append(Row(check, describe_places(names, places), found, verdict, advice))
    return sorted(rows, key=lambda row: ("fail", "warn", "ok").index(row.verdict))


def describe_places(names: Sequence[str], places: Sequence[Place]) -> str:
    """``all 3 nodes``, ``w1, w2`` or ``w1, w2, w3 and 4 more``.

    The driver is omitted if its node is among them.
    """
    nodes = [place["name"] for place in places if not place["driver"]]
    home = {place["name"]: place["on"] for place in places if place["driver"]}
    shown = [name for name in names if home.get(name) not in names]
    if len(nodes) > 1 and set(nodes) <= set(shown):
        shown = [f"all {len(nodes)} nodes", *(n for n in shown if n not in nodes)]
    shown = [f"{name} (on {home[name]})" if name in home else name for name in shown]
    return first_names(shown, _NAMES_SHOWN)


def nodes_of(places: Sequence[Place]) -> list[Place]:
    return [place for place in places if not place["driver"]]


def format_rate(count: float) -> str:
    """Bytes per second: ``85 MB/s``, ``1.9 GB/s``, ``240 GB/s``."""
    if count < 0.995e9:
        return f"{count / 1e6:.{1 if count < 9.95e6 else 0}f} MB/s"
    return f"{count / 1e9:.{1 if count < 9.95e9 else 0}f} GB/s"


def format_duration(value: float) -> str:
    """``0.12 ms``, ``8 ms``, ``0.42 s``, ``12m05s``."""
    if value < 0.0995:
        return f"{value * 1e3:.{2 if value < 0.000995 else 1 if value < 0.00995 else 0}f} ms"
    return format_seconds(value)


def _span(numbers: Sequence[tuple[float, Callable[[float], str]]]) -> str:
    """``20 GiB``, or ``20 to 24 GiB`` if they differ."""
    values, show = [value for value, _ in numbers], numbers[0][1]
    low, high = show(min(values)), show(max(values))
    if low == high:
        return low
    amount, _, unit = low.partition(" ")
    return f"{amount} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"
