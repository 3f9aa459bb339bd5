"""Names that earlier versions had, and what to use instead."""

from __future__ import annotations

_EXAMPLE = "use examples/{0}.py of this package's repository: fit examples/{1}.toml"
WITHDRAWN = {
    "char-lm": _EXAMPLE.format("char_lm", "char-lm"),
    "raytrain_ddp.tasks.char_lm:CharLM": _EXAMPLE.format("char_lm", "char-lm"),
    "raytrain_ddp.tasks.tabular:Tabular": _EXAMPLE.format("tabular", "tabular"),
    "tabular": _EXAMPLE.format("tabular", "tabular"),
}
"""Recipes, tasks, and fields or flags (without the dashes), by name."""


def withdrawn(name: str) -> str:
    """``" It was withdrawn: ..."``, or nothing for another name."""
    return f" It was withdrawn: {WITHDRAWN[name]}." if name in WITHDRAWN else ""
