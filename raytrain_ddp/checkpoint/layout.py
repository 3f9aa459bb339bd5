"""Where a run keeps its files, and what its newest checkpoint says. No torch, no Ray.

<storage>/<name>/config.toml     every field, resolved
                 metrics.jsonl   one record a line: what was trained
                 events.jsonl    one event a line: what happened to the run
                 lease.json      which process drives it, while one does: see lease.py
                 checkpoints/    see store.py
                 curves.png, tensorboard/, logs/
"""

from __future__ import annotations

import json
from typing import Any

from raytrain_ddp.checkpoint.manifest import DamagedError, Manifest
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config import TrainConfig

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CURVES_FILE = "curves.png"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOGS = "logs"


def run_storage(config: TrainConfig) -> Storage:
    """Raises PreflightError if the storage cannot be reached."""
    return open_storage(config.storage).join(str(config.name))


def checkpoint_store(run: Storage) -> CheckpointStore:
    return CheckpointStore(run.join(CHECKPOINTS))


def newest_manifest(run: Storage) -> Manifest | None:
    """Of the newest checkpoint with a readable manifest; its files are not verified here."""
    store = checkpoint_store(run)
    for name in store.names():
        try:
            return store.open(name).manifest
        except DamagedError:
            continue
    return None


def read_history(run: Storage, file: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, or of events.jsonl; a torn line is left out."""
    if not run.exists(file):
        return []
    records = []
    for line in run.read(file).decode("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
