"""Lists names of earlier versions that were withdrawn, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXAMPLE = "use examples/{0}.py of this package's repository: fit examples/{1}.toml"
WITHDRAWN = {
    "char-lm": _EXAMPLE.format("char_lm", "char-lm"),
    "task=raytrain_ddp.tasks.char_lm:CharLM": _EXAMPLE.format("char_lm", "char-lm"),
    "task=raytrain_ddp.tasks.tabular:Tabular": _EXAMPLE.format("tabular", "tabular"),
    "tabular": _EXAMPLE.format("tabular", "tabular"),
    "ddp.compression=powersgd": "use bf16 or fp16, in a new run",
    "ddp.powersgd_rank": "use ddp.compression bf16 or fp16",
    "ddp.shard_optimizer": "remove it; each worker has the whole state, and the run continues",
    "eval.asynchronous": "remove it; raytrain evaluate RUN --follow evaluates beside the run",
    "scaling.on_divergence": "remove it; a run whose weights differ ends with status 6",
}
"""Recipes, fields, and values of fields, by name."""

DEFAULTS = {
    "ddp.powersgd_rank": 4,
    "ddp.shard_optimizer": False,
    "eval.asynchronous": False,
    "scaling.on_divergence": "stop",
}
"""Defaults of withdrawn fields. Runs and checkpoints of earlier versions have all of these fields.
None affects the result by itself."""


def withdrawn(name: str) -> str:
    """Returns ``" It was withdrawn: ..."``, or "" for any other name."""
    name = name if name in WITHDRAWN else name.replace("-", "_")
    return f" It was withdrawn: {WITHDRAWN[name]}." if name in WITHDRAWN else ""


def still_read(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Removes withdrawn fields, which affected only training, from the config of a checkpoint."""
    below = {k: still_read(v, f"{k}.") if isinstance(v, Mapping) else v for k, v in tables.items()}
    kept = {name: value for name, value in below.items() if prefix + name not in DEFAULTS}
    return {k: v for k, v in kept.items() if f"{prefix}{k}={v}" != "ddp.compression=powersgd"}
