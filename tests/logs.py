"""The part of a run's log that tests compare."""

from __future__ import annotations

from typing import Any

from raytrain_ddp.checkpoint.run_folder import CLOCKS, read_history, run_storage
from raytrain_ddp.config.train_config import TrainConfig


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """metrics.jsonl without values that depend on the time of day."""
    history = read_history(run_storage(config))
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in history]
