"""Chooses precision and memory layout for auto, by what the GPUs support, before workers start.

The values replace auto in the run's config and its checkpoints. The same command finds the run
again, and continues it with the same values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from raytrain_ddp.config.train_config import TrainConfig

# Ampere and later, by the names that Ray gives accelerators. Others count as without bf16.
_HAS_BF16 = re.compile(r"(A|H|L|B|GH|GB)\d+[A-Z]?(-.*)?|GeForce-RTX-[3-5]0.*|RTX-(A|PRO).*")


def settled(config: TrainConfig, has_bf16: bool) -> TrainConfig:
    """The config with values for fields that say auto: bf16 and channels_last on GPUs that have
    bf16 in hardware; fp32 and contiguous elsewhere."""
    compute = config.compute
    if compute.precision == "auto":
        compute = replace(compute, precision="bf16" if has_bf16 else "fp32")
    if compute.channels_last == "auto":
        compute = replace(compute, channels_last=has_bf16)
    return config if compute is config.compute else replace(config, compute=compute)


def settled_as_begun(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """The config with each auto replaced by the run's value; `begun` holds nested tables."""
    values = {name: begun.get("compute", {}).get(name, "auto") for name in _automatic(config)}
    return replace(config, compute=replace(config.compute, **values))


def settled_if_alike(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """Like `settled_as_begun` if auto could have chosen the run's values; else the same config."""
    then = begun.get("compute", {})
    for chosen in (settled(config, has_bf16=False), settled(config, has_bf16=True)):
        if all(then.get(name) == getattr(chosen.compute, name) for name in _automatic(config)):
            return chosen
    return config


def _automatic(config: TrainConfig) -> list[str]:
    return [n for n in ("precision", "channels_last") if getattr(config.compute, n) == "auto"]


def settled_note(before: TrainConfig, after: TrainConfig) -> str:
    """What was chosen for GPUs; "" if nothing was."""
    if before.compute == after.compute:
        return ""
    layout = "channels_last" if after.compute.channels_last else "contiguous"
    return f"On these GPUs: {after.compute.precision}, {layout} images (auto)."


def have_bf16(nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether all GPUs have bf16 in hardware, by the resources of each node of a Ray cluster."""
    kinds = [
        [name.partition(":")[2] for name in node if name.startswith("accelerator_type:")]
        for node in nodes
        if node.get("GPU", 0) > 0
    ]
    return bool(kinds) and all(of and all(map(_HAS_BF16.fullmatch, of)) for of in kinds)
