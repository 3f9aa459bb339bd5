"""Tests the storage of a run from the driver and all nodes, with a run's operations. Without Ray.

The driver commits first; each node must see that, and commits, too; the driver must see those.

    <storage>/<folder>/<place>/checkpoints/step-00000003-a0001/manifest.json
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.uri import attempt, reason_of

DRIVER = "driver"  # the place of this process, which is on the first node
PAYLOAD_MIB = 4  # of each checkpoint
_NEWEST = CheckpointName(3, 1)  # two are kept, one is pruned
SEEN_S = 10.0  # until a file of one node appears on another; NFS caches listings for seconds
_LOOK_EVERY_S = 0.5

Answer = dict[str, Any]  # only "error", in one line and without secrets, if it failed


def exercise_storage(uri: str, ask: Callable[[str], Mapping[str, Answer]]) -> dict[str, Answer]:
    """Of each place, the driver last: commit_s of a checkpoint. Leaves nothing in the storage.

    Args:
        ask: calls `commit_beside_driver` on the nodes with a folder; returns the answers by place.
    """
    folder, answers = f"doctor-{uuid.uuid4().hex[:8]}", dict[str, Answer]()

    def clean_up() -> Answer:
        open_storage(uri).delete_dir(folder)
        return {}

    mine = _answered(uri, partial(_commit, uri, folder, DRIVER))
    try:
        if "error" not in mine:
            for place, answer in ask(folder).items():
                look = partial(_look, uri, folder, place)
                answers[place] = answer if "error" in answer else answer | _answered(uri, look)
    finally:
        cleaned = _answered(uri, clean_up)
    return {**answers, DRIVER: {**cleaned, **mine}}


def commit_beside_driver(uri: str, folder: str, place: str, seen_s: float = SEEN_S) -> Answer:
    """Reads the driver's checkpoint completely, once it appears; then commits, finds and prunes
    others."""

    def commit() -> Answer:
        _look(uri, folder, DRIVER, seen_s)
        return _commit(uri, folder, place)

    return _answered(uri, commit)


def _answered(uri: str, ask: Callable[[], Answer]) -> Answer:
    outcome = attempt(ask)
    if isinstance(outcome, RaytrainError):
        return {"error": " ".join(str(outcome).split())}
    return {"error": reason_of(uri, outcome)} if isinstance(outcome, Exception) else outcome


def _commit(uri: str, folder: str, place: str) -> Answer:
    own, commit_s = open_storage(uri).join(folder).join(place), 0.0
    own.mkdir()
    store = checkpoint_store(own)
    number = store.claim(None, {"by": "doctor"})
    for step in range(1, _NEWEST.step + 1):
        manifest, payload = Manifest(step, 0, number, 1, {}, ""), os.urandom(PAYLOAD_MIB * 2**20)
        began = time.perf_counter()
        store.commit(manifest, {"model.safetensors": payload})
        commit_s = time.perf_counter() - began
    store.prune(keep_last=2)
    if len(store.names()) != 2:
        raise OSError("a deleted checkpoint still exists")
    return {"commit_s": commit_s, **_look(uri, folder, place)}


def _look(uri: str, folder: str, place: str, seen_s: float = SEEN_S) -> Answer:
    """Raises OSError if a place's newest checkpoint does not appear, CheckpointError if damaged."""
    store = checkpoint_store(open_storage(uri).join(folder).join(place))
    until = time.monotonic() + seen_s
    while _NEWEST not in store.names():
        if time.monotonic() > until:
            raise OSError(f"what {place} has committed cannot be seen")
        time.sleep(_LOOK_EVERY_S)
    store.open(_NEWEST).verify()
    return {}
