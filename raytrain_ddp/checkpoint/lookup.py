"""Finds a checkpoint by what people call it: a run, a folder, or a URI. No torch, no Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

from raytrain_ddp.checkpoint.committed import Checkpoint, CheckpointName
from raytrain_ddp.checkpoint.run_folder import (
    CHECKPOINTS,
    STATE_FILE,
    checkpoint_store,
    other_runs,
    path_of_run,
    read_log,
)
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointStore
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.events import Eval


class NoCheckpointError(CheckpointError):
    """There is none, as opposed to a damaged one."""


def find_checkpoint(place: str, which: Literal["best", "last"] | None = None) -> Checkpoint:
    """The checkpoint at `place`, or the one of that run that `which` selects (default: best).

    Raises:
        CheckpointError: there is no checkpoint (NoCheckpointError), or it is damaged.
        ConfigError: `which` is given, but `place` is a single checkpoint.
    """
    place = path_of_run(place)
    folder = open_storage(place)
    if folder.exists(MANIFEST_FILE):
        if which is not None:
            raise ConfigError(
                f"--checkpoint {which} has no effect: {place} is a single checkpoint."
            )
        parent, _, name = folder.path.rpartition("/")
        parsed = CheckpointName.parse(name)
        if parsed is None:
            raise CheckpointError(f"{place}: not the name of a checkpoint (step-...-a...).")
        return _verified(CheckpointStore(replace(folder, path=parent)).open(parsed))
    store = checkpoint_store(folder)
    names = store.names()
    if not names:
        raise NoCheckpointError(
            f"{place}: no checkpoint there (looked for {CHECKPOINTS}/).{other_runs(place)}"
        )
    if which != "last":
        bests = [r.step for r in read_log(folder) if isinstance(r, Eval) and r.best]
        names = [name for name in names if bests and name.step == bests[-1]] or names
    return _verified(store.open(names[0]))


def recorded_classes(checkpoint: Checkpoint) -> list[str]:
    """The class names of the data that the run was trained on; empty if it recorded none."""
    if STATE_FILE not in checkpoint.manifest.files:
        return []
    names: list[str] = json.loads(checkpoint.read(STATE_FILE)).get("data", {}).get("classes") or []
    return names


def _verified(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.verify()
    return checkpoint
