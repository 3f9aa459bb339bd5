"""Shows progress, then the table of results."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from raytrain_ddp.tools.display.formatting import plural
from raytrain_ddp.tools.display.terminal import terminal
from raytrain_ddp.tools.doctor.rows import Report, Row

_CHECK, _WHERE, _VERDICT, _LEAST_FOUND, _MOST_WIDTH = 14, 16, 4, 20, 110
OF_A_CLUSTER = "a run would start", "a run would not get far"
OF_A_RUN = "the run makes progress", "the run makes no progress"
OF_AN_ENDED_RUN = "the run has ended", "the run has ended"
_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """On standard error: a line that changes on a terminal, otherwise a line per phase."""
    console = terminal(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(f"doctor: {text}", soft_wrap=True, markup=False)
        return
    with console.status("examining the cluster") as status:
        yield lambda text: status.update(Text(text))


def show(report: Report, console: Console, verdicts: tuple[str, str] = OF_A_CLUSTER) -> None:
    """The table: check, where, found, verdict; below each that is not ok, what to do.

    Args:
        verdicts: the conclusion with only warnings, and with failures.
    """
    width = min(console.width, _MOST_WIDTH)
    found_width = max(_LEAST_FOUND, width - _CHECK - _WHERE - _VERDICT - 3 * 2)
    _print(console, Text(_line("check", "where", "found", found_width), "bold"))
    before = ""
    for row, following in zip(report.rows, [*report.rows[1:], None], strict=True):
        _print_row(console, row, "" if row.check == before else row.check, found_width)
        if row.advice and (following is None or following.advice != row.advice):
            _print_advice(console, row, width)
        before = row.check
    counts = [plural(report.count("fail"), "failure"), plural(report.count("warn"), "warning")]
    if report.count("fail"):
        conclusion = f"{', '.join(counts)}: {verdicts[1]}."
    elif report.count("warn"):
        conclusion = f"{counts[1]}: {verdicts[0]}."
    else:
        conclusion = "No problems found."
    _print(console, Text(conclusion, "bold"))


def _print_row(console: Console, row: Row, check: str, found_width: int) -> None:
    columns = _wrap(row.where, _WHERE) or [""], _wrap(row.found, found_width)
    for number, (place, text) in enumerate(zip_longest(*columns, fillvalue="")):
        line = Text(_line(check if number == 0 else "", place, text, found_width))
        if number == 0:
            line.append(row.verdict, _STYLE[row.verdict])
        _print(console, line)


def _print_advice(console: Console, row: Row, width: int) -> None:
    for number, text in enumerate(_wrap(row.advice, max(width - 5, _LEAST_FOUND))):
        _print(console, Text(f"  {'->' if number == 0 else '  '} {text}", _STYLE[row.verdict]))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)  # flags stay whole


def _line(check: str, place: str, found: str, found_width: int) -> str:
    return f"{check:<{_CHECK}}  {place:<{_WHERE}}  {found:<{found_width}}  "


def _print(console: Console, text: Text) -> None:
    text.rstrip()
    console.print(text, soft_wrap=True)
