"""Snapshots of made-up states, and what is reported about their commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.snapshot import Snapshot

Record = Any
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


def notes(reported: Sequence[Record]) -> list[str]:
    return [str(event["text"]) for event in reported if event["kind"] == "note"]
