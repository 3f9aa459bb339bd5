"""The terminal that output goes to."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_WIDTHS = 20, 1000


def terminal(**options: Any) -> Console:
    """A console of rich with a usable width, whatever COLUMNS or a tiny terminal says; with 0
    columns, rich prints nothing.

    Args:
        options: of `Console`.
    """
    console = Console(**options)
    width = min(max(console.width, _WIDTHS[0]), _WIDTHS[1])
    if width != console.width:
        console.width = width
    return console
