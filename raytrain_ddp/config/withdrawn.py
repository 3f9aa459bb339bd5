"""Names that earlier versions had, and what to use instead."""

from __future__ import annotations

from typing import Any

_EXAMPLE = "use examples/{0}.py of this package's repository: fit examples/{1}.toml"
WITHDRAWN = {
    "char-lm": _EXAMPLE.format("char_lm", "char-lm"),
    "raytrain_ddp.tasks.char_lm:CharLM": _EXAMPLE.format("char_lm", "char-lm"),
    "raytrain_ddp.tasks.tabular:Tabular": _EXAMPLE.format("tabular", "tabular"),
    "tabular": _EXAMPLE.format("tabular", "tabular"),
    "powersgd": "use bf16 or fp16",
    "ddp.powersgd_rank": "use ddp.compression bf16 or fp16",
    "ddp.shard_optimizer": "remove it; each worker has the whole state, and a run goes on with it",
    "scaling.on_divergence": "remove it; a run whose weights differ ends with status 6",
}
"""Recipes, tasks, values, and fields or flags (without the dashes), by name."""

_DEFAULTS = {"ddp.powersgd_rank": 4, "ddp.shard_optimizer": False, "scaling.on_divergence": "stop"}


def withdrawn(name: str) -> str:
    """``" It was withdrawn: ..."``, or nothing for another name."""
    name = name.replace("-", "_") if name.replace("-", "_") in WITHDRAWN else name
    return f" It was withdrawn: {WITHDRAWN[name]}." if name in WITHDRAWN else ""


def had_no_effect(name: str, value: Any) -> bool:
    """Whether a field was withdrawn, and has the value that it had by default: runs of earlier
    versions have it in their config.toml and checkpoints."""
    return name in _DEFAULTS and _DEFAULTS[name] == value
