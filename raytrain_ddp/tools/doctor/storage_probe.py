"""Tests the storage of a run from one machine, with a run's operations. Does not use Ray.

Everything is done in a folder of its own, with a subfolder for each machine:

    <storage>/<folder>/<place>/checkpoints/step-00000003-a0001/manifest.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import CHECKPOINTS, checkpoint_store
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.uri import attempt, reason_of

PAYLOADS_MIB = (1, 1, 8)  # of three checkpoints: two are kept, one is pruned
_NEWEST = CheckpointName(len(PAYLOADS_MIB), 1)
_LOOK_EVERY_S = 0.5
_CLEAN_UP_S = 30.0


def probe_commit(uri: str, folder: str, place: str) -> dict[str, Any]:
    """Writes, renames, reads, lists and deletes a file; then commits, finds and prunes checkpoints.

    Returns:
        commit_s: of a small checkpoint. bytes_per_s: of a larger one. made: folders above `folder`
        that did not exist before. error: the error, without secrets, if any.
    """
    made: list[str] = []
    result = _answer_or_error(uri, lambda: _commit(uri, folder, place, made))
    return {**result, "made": made}


def probe_visibility(
    uri: str, folder: str, places: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    """Looks for the checkpoints of other machines; reads that of the last of `places` completely.

    Returns:
        sees: the places found. seconds: until all were found. error: like `probe_commit`.
    """
    return _answer_or_error(uri, lambda: _see(uri, folder, places, timeout_s))


def clean_up(uri: str, folder: str, made: Sequence[str]) -> dict[str, Any]:
    """Removes the folder, and those above it that were created for it and are empty.

    Returns:
        error: like `probe_commit`.
    """

    def remove() -> dict[str, Any]:
        root = open_storage(uri)
        root.delete_dir(folder)
        until = time.monotonic() + _CLEAN_UP_S
        while left := root.join(folder).walk():  # another node may delete it at the same time
            _require(time.monotonic() < until, f"{folder}/{next(iter(left))} cannot be removed")
            time.sleep(_LOOK_EVERY_S)
            root.delete_dir(folder)
        with suppress(OSError):  # it is in use by now
            for path in made:
                os.rmdir(path)
        return {}

    return _answer_or_error(uri, remove)


def _commit(uri: str, folder: str, place: str, made: list[str]) -> dict[str, Any]:
    root = open_storage(uri)
    if root.is_local:
        above = (Path(root.path), *Path(root.path).parents)
        made += [str(path) for path in above if not path.exists()]
    own = root.join(folder).join(place)
    own.mkdir()
    _use_a_file(own)
    store = checkpoint_store(own)
    store.latest()
    number = store.claim(None, {"by": "doctor"})
    seconds = []
    for step, mib in enumerate(PAYLOADS_MIB, start=1):
        manifest = Manifest(step, 0, number, 1, {}, data_fingerprint="")
        payload = os.urandom(mib * 2**20)
        began = time.perf_counter()
        store.commit(manifest, {"model.safetensors": payload})
        seconds.append(time.perf_counter() - began)
    newest = store.latest()
    _require(newest is not None and newest.name == _NEWEST, "the newest checkpoint is not found")
    store.prune(keep_last=2)
    _require(len(store.names()) == 2, "a deleted checkpoint still exists")
    return {"commit_s": min(seconds), "bytes_per_s": PAYLOADS_MIB[-1] * 2**20 / seconds[-1]}


def _use_a_file(own: Storage) -> None:
    content = os.urandom(1000)
    own.write_atomic("probe", content)
    own.rename("probe", "renamed")
    _require(own.read("renamed") == content, "a file differs from what was written")
    own.write_atomic("renamed", content[::-1])
    _require(own.read("renamed") == content[::-1], "a replaced file still has its old content")
    _require(own.walk() == ["renamed"], "a listing of files is wrong")
    own.delete_file("renamed")
    _require(not own.exists("renamed"), "a deleted file still exists")


def _see(uri: str, folder: str, places: Sequence[str], timeout_s: float) -> dict[str, Any]:
    root = open_storage(uri).join(folder)
    began = time.monotonic()
    while True:
        there = set(root.walk())
        sees = [p for p in places if f"{p}/{CHECKPOINTS}/{_NEWEST}/{MANIFEST_FILE}" in there]
        seconds = time.monotonic() - began
        if len(sees) == len(places) or seconds > timeout_s:
            break
        time.sleep(_LOOK_EVERY_S)
    if places and places[-1] in sees:
        newest = checkpoint_store(root.join(places[-1])).latest()
        _require(
            newest is not None and newest.name == _NEWEST, f"that of {places[-1]} is incomplete"
        )
    return {"sees": sees, "seconds": seconds}


def _answer_or_error(uri: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    outcome = attempt(ask)
    if isinstance(outcome, RaytrainError):
        return {"error": str(outcome)}
    if isinstance(outcome, Exception):
        return {"error": reason_of(uri, outcome)}
    return outcome


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise OSError(what)
