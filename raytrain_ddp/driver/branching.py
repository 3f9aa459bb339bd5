"""A new run that starts from the state of another run, with named changes of its config.

Its first checkpoint is a copy of the other run's, with the new config. ``branch.json``, in the new
run's folder, names where it comes from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.committed import Checkpoint
from raytrain_ddp.checkpoint.manifest import ALL_OPTIONS, BRANCHED_AT, RENEWED
from raytrain_ddp.checkpoint.run_folder import (
    STATE_FILE,
    checkpoint_store,
    find_checkpoint,
    is_name_below,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE
from raytrain_ddp.config.automatic import settled_as_begun
from raytrain_ddp.config.recipe import changed_fields, flat, publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.driver.preflight import answered, is_complete
from raytrain_ddp.driver.run_naming import Changes, NamedRun, find_run, other_things
from raytrain_ddp.errors import CheckpointError, ConfigError, did_you_mean

BRANCH_FILE = "branch.json"

# Neither the samples of a step nor the parameters and their state depend on these.
_SECTIONS = ("augment", "loss", "schedule", "compute", "ddp", "ema", "eval")
_FIELDS = {
    *("task_options", "exact", "limit_eval_batches", "model.dropout"),
    *("data.image_size", "data.start_size", "data.grow_epochs", "data.interpolation"),
    *("data.eval_size", "data.eval_crop", "data.mean", "data.std", "data.jpeg_scaling"),
    "data.exif_orientation",
    *("optim.lr", "optim.momentum", "optim.nesterov", "optim.betas", "optim.weight_decay"),
    *("optim.clip_norm", "optim.label_smoothing"),
}
_NOT = {"augment.repeats", "augment.spread_repeats"}
_OF_GROUPS = ("momentum", "nesterov", "betas", "weight_decay")


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
    changes: Sequence[tuple[str, Any, Any]]

    def __str__(self) -> str:
        changes = ", ".join(f"{name} {then!r} -> {now!r}" for name, then, now in self.changes)
        return f"starts from {self.checkpoint}{', with ' if changes else ''}{changes}"


def run_and_branch(
    config: TrainConfig,
    default_name: str | None,
    resume_from: str | os.PathLike[str] | None,
    allowed: Sequence[str],
) -> tuple[NamedRun, Branch | None]:
    """The run of a config, and where it is to start from, as `find_run` and `branch_of`."""
    origin = os.fspath(resume_from) if resume_from is not None else None
    if origin == "":
        raise ConfigError("resume_from is empty: give a run or checkpoint, or None.")
    if origin and config.name is not None:
        _require_other(config, origin)
    run = find_run(config, default_name)
    return run, branch_of(run, origin, allowed) if origin else None


def branch_of(run: NamedRun, origin: str, allowed: Sequence[str]) -> Branch | None:
    """Where a run is to start from; None if it has begun there already. Nothing is written.

    Raises:
        ConfigError: it has begun elsewhere, or is the origin; also like `find_branch`.
        CheckpointError: like `find_branch`.
    """
    _require_other(run.config, origin)
    if run.manifest is None:
        return find_branch(run.config, origin, allowed)
    text = run.folder.read(BRANCH_FILE) if run.folder.exists(BRANCH_FILE) else b"{}"
    began = json.loads(text).get("origin")
    if began != origin:
        where = f"from {began}" if began else "at step 0"
        raise ConfigError(
            f"run {run.config.name} has this config, but began {where}, not from {origin}: set "
            "another --name."
        )
    return None


def find_branch(config: TrainConfig, origin: str, allowed: Sequence[str]) -> Branch:
    """What a new run with this config starts from. Nothing is written.

    Args:
        origin: a run's name, its folder or URI, or a checkpoint.
        allowed: the fields that may differ from the origin's config: exactly those that do.

    Raises:
        ConfigError: another field differs, one of these does not, or one cannot be changed.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    names = [name.removeprefix("--").replace("-", "_") for name in allowed]
    known = flat(TrainConfig())
    for name in names:
        if name not in known:
            below = [field for field in known if field.startswith(f"{name}.")]
            hint = f" Name its fields: {', '.join(below)}." if below else did_you_mean(name, known)
            raise ConfigError(
                f"--allow-change {name}: there is no such field.{withdrawn(name) or hint}"
            )
    checkpoint = answered(config, lambda: _origin(config, origin))
    config = settled_as_begun(config, checkpoint.manifest.config)
    changes: Changes = changed_fields(checkpoint.manifest.config, config)
    changes = other_things(checkpoint, changes, config, is_named=True)
    differing = [name for name, _, _ in changes]
    fixed = [name for name in differing if not may_change(name)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: cannot differ from {origin}'s, which decides the samples of a "
            "step or the shape of the state. For a new run with the same weights, use "
            f"--model.weights {origin}."
        )
    missing = [name for name in differing if name not in names]
    if missing:
        rows = [f"  {n}  {then!r} -> {now!r}" for n, then, now in changes if n in missing]
        raise ConfigError(
            f"the config differs from {origin}'s ({origin} -> now):\n" + "\n".join(rows) + "\n"
            f"Revert these changes, or add --allow-change {' '.join([*names, *missing])}."
        )
    for name in names:
        if name not in differing:
            raise ConfigError(
                f"--allow-change {name}: it does not differ from {origin}, or may change anyway: "
                "remove it."
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
        fields = [name.rpartition(".") for name, _, _ in branch.changes]
        renewed = [last for section, _, last in fields if section == "optim" and last in _OF_GROUPS]
        if {"task", "task_options"} & {name for name, _, _ in branch.changes}:
            renewed.append(ALL_OPTIONS)  # of the task's own optimizer
        # Only evaluations with the changes compete for the best checkpoint of this run.
        state = json.loads(files[STATE_FILE]) | {RENEWED: renewed, "best": None, "best_step": 0}
        state[BRANCHED_AT] = branch.checkpoint.manifest.step
        files[STATE_FILE] = json.dumps(state).encode()
        config = to_dict(publishable(run.config))
        manifest = replace(branch.checkpoint.manifest, attempt=attempt, config=config)
        manifest = replace(manifest, metrics={}, finished=False)
        return replace(run, manifest=store.commit(manifest, files).manifest)

    return answered(run.config, begin)


def may_change(name: str) -> bool:
    return name in _FIELDS or (name.partition(".")[0] in _SECTIONS and name not in _NOT)


def _require_other(config: TrainConfig, origin: str) -> None:
    own, place = f"{config.storage.rstrip('/')}/{config.name}", _place(config, origin)
    if "://" not in own:
        own, place = str(Path(own).absolute()), str(Path(place).absolute())
    if f"{place.rstrip('/')}/".startswith(f"{own}/"):
        raise ConfigError(
            f"--resume-from {origin}: run {config.name} cannot start from itself. To continue "
            "it, remove --resume-from; to start a new run, set another --name."
        )


def _place(config: TrainConfig, origin: str) -> str:
    path = Path(origin)
    is_path = path.is_absolute() or (path.exists() and not is_name_below(origin, config.storage))
    return origin if "://" in origin or is_path else f"{config.storage.rstrip('/')}/{origin}"


def _origin(config: TrainConfig, origin: str) -> Checkpoint:
    place = _place(config, origin)
    folder: Storage = open_storage(place)
    try:
        return find_checkpoint(place, None if folder.exists(MANIFEST_FILE) else "last")
    except CheckpointError as error:
        hint = did_you_mean(origin, open_storage(config.storage).names())
        raise CheckpointError(f"--resume-from {origin}: {error}{hint}") from None
