"""Snapshots of made-up states, and what is reported about their commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from event_records import to

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.config.train_config import TrainConfig

Record = Any
BEST = ("loss", "min")
THROTTLED = "AWS Error SLOW_DOWN during PutObject operation: Please reduce your request rate."


def snapshot(step: int, **changes: Any) -> Snapshot:
    manifest = Manifest(
        step=step,
        epoch=0,
        attempt=0,
        world_size=1,
        config={},
        data_fingerprint="x",
        metrics={},
        written_by="test",
    )
    tensors = {"model": {"w": torch.full((1000,), float(step))}}
    return Snapshot(manifest, tensors, {"state.json": {"step": step}}, **changes)


def checkpoints_of(config: TrainConfig, reported: list[Record]) -> Checkpoints:
    return Checkpoints(config, Log(run_storage(config), {}, to(reported)))


def notes(reported: Sequence[Record]) -> list[str]:
    return [str(event["text"]) for event in reported if event["kind"] == "note"]
