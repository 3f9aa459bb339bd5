"""The part of a run's log that tests compare."""

from __future__ import annotations

from typing import Any

from raytrain_ddp.checkpoint.run_folder import CLOCKS, read_history, run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig

AUDITED = LogConfig(every_steps=1, tensorboard=False, audit=True)


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """metrics.jsonl without values that depend on the time of day."""
    history = read_history(run_storage(config))
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in history]


def audit_of(config: TrainConfig) -> list[str]:
    """The hash of the input of each step; asserts that no step is missing or repeated."""
    records = [record for record in log_of(config) if record["kind"] == "audit"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["sha256"] for record in records]
