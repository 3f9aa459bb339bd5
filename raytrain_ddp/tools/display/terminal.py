"""Makes the console that output goes to."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_WIDTHS = 20, 1000


def terminal(**options: Any) -> Console:
    """Returns a rich console with a usable width, whatever COLUMNS or a tiny terminal says. With 0
    columns, rich prints nothing.

    Args:
        options: arguments of `Console`.
    """
    console = Console(**options)
    width = min(max(console.width, _WIDTHS[0]), _WIDTHS[1])
    if width != console.width:
        console.width = width
    return console
