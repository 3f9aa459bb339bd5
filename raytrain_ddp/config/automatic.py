"""Precision and memory layout that say auto: chosen before workers start, by what the GPUs can do.

The values replace auto in the run's config and its checkpoints, and `TrainConfig.settled` names the
fields, so that the same command finds the run again, and continues it with the same values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from raytrain_ddp.config.rules import value_of
from raytrain_ddp.config.train_config import AUTO_FIELDS, TrainConfig

# Ampere and later, by the names that Ray gives accelerators. Others count as without bf16.
_HAS_BF16 = re.compile(r"(A|H|L|B|GH|GB)\d+[A-Z]?(-.*)?|GeForce-RTX-[3-5]0.*|RTX-(A|PRO).*")


def unsettled(config: TrainConfig) -> list[str]:
    """The fields that still say auto."""
    return [name for name in AUTO_FIELDS if value_of(config, name) == "auto"]


def settled(config: TrainConfig, has_bf16: bool) -> TrainConfig:
    """The config with values for fields that say auto: bf16 and channels_last on GPUs that have
    bf16 in hardware; fp32 and contiguous elsewhere."""
    compute = {"precision": "bf16" if has_bf16 else "fp32", "channels_last": has_bf16}
    return settled_as_begun(config, {"compute": compute})


def settled_as_begun(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """The config with the values that a run has, whose config is given as nested tables."""
    values = {f"compute.{name}": value for name, value in begun.get("compute", {}).items()}
    chosen = [n for n in unsettled(config) if values.get(n) not in (None, "auto")]
    compute: dict[str, Any] = {name.rpartition(".")[2]: values[name] for name in chosen}
    return dataclasses.replace(
        config,
        compute=dataclasses.replace(config.compute, **compute),
        settled=tuple(dict.fromkeys((*config.settled, *chosen))),
    )


def settled_note(before: TrainConfig, after: TrainConfig) -> str:
    """What was chosen for GPUs; "" if nothing was."""
    if before.settled == after.settled:
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
