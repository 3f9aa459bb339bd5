"""A new run that starts from the state of another run.

Its first checkpoint is a copy of the other run's, with the new config. ``branch.json``, in the new
run's folder, names where it comes from.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.committed import Checkpoint
from raytrain_ddp.checkpoint.manifest import BRANCHED_AT, RENEWED
from raytrain_ddp.checkpoint.run_folder import (
    STATE_FILE,
    checkpoint_store,
    find_checkpoint,
    is_name_below,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE
from raytrain_ddp.config.automatic import settled_as_begun
from raytrain_ddp.config.field_types import facts
from raytrain_ddp.config.recipe import changed_fields, publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import answered, is_complete
from raytrain_ddp.driver.run_naming import Changes, NamedRun, find_run, other_things
from raytrain_ddp.errors import CheckpointError, ConfigError, did_you_mean

BRANCH_FILE = "branch.json"


@dataclass(frozen=True)
class Branch:
    """Where a run starts from.

    Args:
        origin: as the user named it.
        checkpoint: verified.
        changes: (field, there, here).
    """

    origin: str
    checkpoint: Checkpoint
    changes: Changes

    def __str__(self) -> str:
        changes = ", ".join(f"{name} {then!r} -> {now!r}" for name, then, now in self.changes)
        differs = f"; its config differs: {changes}" if changes else ""
        return f"starts from {self.checkpoint}{differs}"


def run_and_branch(
    config: TrainConfig, default_name: str | None, resume_from: str | os.PathLike[str] | None
) -> tuple[NamedRun, Branch | None]:
    """Returns the run of a config, and where it is to start from; see `find_run`, `branch_of`."""
    run = find_run(config, default_name)
    return run, None if resume_from is None else branch_of(run, os.fspath(resume_from))


def branch_of(run: NamedRun, origin: str) -> Branch | None:
    """Returns where a run is to start from; None if it has begun there already. Writes nothing.

    Args:
        origin: a run's name, its folder or URI, or a checkpoint.

    Raises:
        ConfigError: the run has begun elsewhere, as if it is itself the origin; the state does not
            fit; or nothing is left to train.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if not origin:
        raise ConfigError("resume_from is empty: give a run or checkpoint, or None.")
    if run.manifest is not None:
        text = run.folder.read(BRANCH_FILE) if run.folder.exists(BRANCH_FILE) else b"{}"
        began = json.loads(text).get("origin")
        if began == origin:
            return None
        where = f"from {began}" if began else "at step 0"
        raise ConfigError(
            f"run {run.config.name} has this config, but began {where}, not from {origin}: set "
            "another --name, or remove --resume-from to continue it."
        )
    place = _place(run.config, origin)
    checkpoint = answered(run.config, lambda: _origin(run.config, origin, place))
    then = checkpoint.manifest.config
    config = settled_as_begun(run.config, then)
    changes = other_things(checkpoint, changed_fields(then, config), config)
    of_state = facts(TrainConfig, "of_state")
    other = [name for name, _, _ in changes if name in of_state]
    if other:
        raise ConfigError(
            f"{', '.join(other)}: the state of {origin} belongs to another model or optimizer. To "
            f"start from its weights only, use --model.weights {origin}."
        )
    if is_complete(config, checkpoint.manifest):
        raise ConfigError(
            f"{origin} has finished at step {checkpoint.manifest.step}, and nothing is left to "
            "train: set more --epochs or --steps, or name an earlier checkpoint."
        )
    return Branch(origin, checkpoint, changes)


def begun_from(run: NamedRun, branch: Branch) -> NamedRun:
    """The run with its first checkpoint, which is written now.

    Call it while holding the lease of the run.
    """
    run = replace(run, config=settled_as_begun(run.config, branch.checkpoint.manifest.config))
    about: dict[str, Any] = {"origin": branch.origin, "checkpoint": str(branch.checkpoint)}
    about |= {"changes": [list(each) for each in branch.changes]}

    def begin() -> NamedRun:
        run.folder.mkdir()
        run.folder.write_atomic(BRANCH_FILE, json.dumps(about, indent=1).encode())
        store = checkpoint_store(run.folder)
        store.latest()
        attempt = store.claim(None, about)
        store.sweep()
        files = {name: branch.checkpoint.read(name) for name in branch.checkpoint.manifest.files}
        renewed = any(name.startswith(("optim.", "task")) for name, _, _ in branch.changes)
        # Only evaluations with the changes compete for the best checkpoint of this run.
        state = json.loads(files[STATE_FILE]) | {RENEWED: renewed, "best": None, "best_step": 0}
        state[BRANCHED_AT] = branch.checkpoint.manifest.step
        files[STATE_FILE] = json.dumps(state).encode()
        config = to_dict(publishable(run.config))
        manifest = replace(branch.checkpoint.manifest, attempt=attempt, config=config)
        manifest = replace(manifest, metrics={}, finished=False)
        return replace(run, manifest=store.commit(manifest, files).manifest)

    return answered(run.config, begin)


def _place(config: TrainConfig, origin: str) -> str:
    path = Path(origin)
    is_path = path.is_absolute() or (path.exists() and not is_name_below(origin, config.storage))
    return origin if "://" in origin or is_path else f"{config.storage.rstrip('/')}/{origin}"


def _origin(config: TrainConfig, origin: str, place: str) -> Checkpoint:
    folder: Storage = open_storage(place)
    try:
        return find_checkpoint(place, None if folder.exists(MANIFEST_FILE) else "last")
    except (CheckpointError, ConfigError) as error:
        hint = did_you_mean(origin, open_storage(config.storage).names())
        raise type(error)(f"--resume-from {origin}: {error}{hint}") from None
