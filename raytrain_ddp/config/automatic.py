"""Fields that decide the result and may say auto: a run chooses their values once, at its start.

The values replace auto in the run's config and its checkpoints, and `TrainConfig.settled` names the
fields, so that the same command finds the run again, and continues it with the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raytrain_ddp.config.effects import value_of
from raytrain_ddp.config.train_config import AUTO_FIELDS, TrainConfig

_ON_CPUS = {"compute.precision": "fp32", "compute.channels_last": False}
_CPU_MICRO_BATCH = 32


def unsettled(config: TrainConfig) -> list[str]:
    """The fields that still say auto."""
    return [name for name in AUTO_FIELDS if value_of(config, name) == "auto"]


def settled_as(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The config with these values for fields that say auto."""
    chosen = {name: values[name] for name in unsettled(config) if name in values}
    return _with(config, chosen, tuple(dict.fromkeys((*config.settled, *chosen))))


def settled_as_begun(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """The config with the values that a run has, whose config is given as nested tables."""
    found = {name: _below(begun, name) for name in AUTO_FIELDS}
    return settled_as(config, {k: v for k, v in found.items() if v not in (None, "auto")})


def settled_without_gpu(config: TrainConfig, workers: int) -> TrainConfig:
    """The values for a run on CPUs. Memory does not limit a micro-batch there, so it has the size
    of the largest that divides, up to 32."""
    sizes = config.micro_batches(workers) or [1]
    micro_batch = next((size for size in sizes if size <= _CPU_MICRO_BATCH), sizes[-1])
    return settled_as(config, {**_ON_CPUS, "micro_batch": micro_batch})


def unsettle(config: TrainConfig) -> TrainConfig:
    """The config before its values were chosen: those fields say auto again."""
    return _with(config, dict.fromkeys(config.settled, "auto"), ())


def _with(config: TrainConfig, values: Mapping[str, Any], names: tuple[str, ...]) -> TrainConfig:
    below = {name.partition(".")[2]: v for name, v in values.items() if name != "micro_batch"}
    return dataclasses.replace(
        config,
        micro_batch=values.get("micro_batch", config.micro_batch),
        compute=dataclasses.replace(config.compute, **below),
        settled=names,
    )


def _below(tables: Mapping[str, Any], name: str) -> Any:
    section, _, last = name.rpartition(".")
    return (tables.get(section, {}) if section else tables).get(last)
