"""Paths of a run's files, and the state recorded in its newest checkpoint. No torch, no Ray.

<storage>/<name>/config.toml     every field, resolved
                 metrics.jsonl   one record per line: what was trained
                 events.jsonl    one event per line: what happened to the run
                 lease.json      the process that drives it, if any: see lease.py
                 checkpoints/    see store.py
                 hang/           the stacks of all ranks when a start hung: see watchdog.py
                 curves.png, tensorboard/, logs/
"""

from __future__ import annotations

import json
import math
from typing import Any

from raytrain_ddp import events
from raytrain_ddp.checkpoint.manifest import DamagedError, Manifest
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import (
    DAMAGED_MARK,
    DAMAGED_PREFIX,
    MANIFEST_FILE,
    CheckpointStore,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.events import LogRecord
from raytrain_ddp.records import Timed, log_records, stored_events

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.json"  # in each checkpoint: the records of metrics.jsonl so far
STATE_FILE = "state.json"  # in each checkpoint: the counters, and what is not a tensor
EVENTS_FILE = "events.jsonl"
CURVES_FILE = "curves.png"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOGS = "logs"
PROFILES = "profiles"
HANGS = "hang"

CLOCKS = frozenset({"seconds", "samples_per_s", "timing"})
"""The keys of log records that hold times; all others are equal in equal runs."""


def run_storage(config: TrainConfig) -> Storage:
    """Raises PreflightError if the storage cannot be reached."""
    return open_storage(config.storage).join(str(config.name))


def checkpoint_store(run: Storage) -> CheckpointStore:
    return CheckpointStore(run.join(CHECKPOINTS))


def newest_manifest(run: Storage) -> Manifest | None:
    """The manifest of the newest checkpoint whose manifest is readable; files are not verified."""
    store = checkpoint_store(run)
    for name in store.names():
        try:
            return store.open(name).manifest
        except DamagedError:
            continue
    return None


def require_none_lost(config: TrainConfig, run: Storage) -> None:
    """Refuses to start again at step 0 a run that has lost its checkpoints.

    Called if no checkpoint is found. (If there are damaged ones, `CheckpointStore.latest` names
    them.)

    Raises:
        CheckpointError: events.jsonl records a checkpoint, and no trace of any is left.
        OSError: the storage does not respond.
    """
    entries = checkpoint_store(run).storage.walk()
    if any(
        e.startswith(DAMAGED_PREFIX) or e.endswith((MANIFEST_FILE, DAMAGED_MARK)) for e in entries
    ):
        return
    saved = [e.step for e, _, _ in read_events(run) if isinstance(e, events.Checkpoint)]
    if saved:
        raise CheckpointError(
            f"run {config.name} had a checkpoint of step {max(saved)} ({run}/{EVENTS_FILE}), "
            "and there is none now: restore it, or start over under another --name."
        )


def read_log(run: Storage) -> list[LogRecord]:
    """The records of metrics.jsonl."""
    return log_records(read_history(run))


def read_events(run: Storage) -> list[Timed]:
    """The events of events.jsonl."""
    return stored_events(read_history(run, EVENTS_FILE))


def read_history(run: Storage, file: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The records of metrics.jsonl or events.jsonl; an incomplete last line is skipped.

    A null among the numbers of metrics.jsonl was a non-finite value, and is returned as nan.
    """
    if not run.exists(file):
        return []
    records = []
    for line in run.read(file).decode("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(_with_nan(record) if file == METRICS_FILE else record)
    return records


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value
