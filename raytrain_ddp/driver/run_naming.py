"""Finds the run that a command refers to, by its name or by its config; and where it starts from.

A name is explicit if --name, the user's own recipe or Python sets it. Otherwise, NAME, NAME-2,
NAME-3 ... are searched: the first run with this config is resumed; if there is none, a new run gets
the first free name. The first command to hold a free name stores its config there (`CLAIM_FILE`),
so commands started at the same time share a run if their configs are equal, and only then.

A new run may start from the state of another one: its first checkpoint is a copy of the other
run's, with the new config. ``branch.json``, in its folder, names where it comes from.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from raytrain_ddp.checkpoint.committed import Checkpoint
from raytrain_ddp.checkpoint.manifest import BRANCHED_AT, RENEWED, Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    STATE_FILE,
    SWEEP_FILE,
    checkpoint_store,
    find_checkpoint,
    is_name_below,
    newest_checkpoint,
    newest_manifest,
    recorded,
    require_none_lost,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName
from raytrain_ddp.config.field_types import facts
from raytrain_ddp.config.recipe import (
    changed_fields,
    dumps,
    is_by_name,
    parse,
    publishable,
    settled_as_begun,
    to_dict,
)
from raytrain_ddp.config.train_config import RUN_NAME, TrainConfig
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.driver.preflight import answered, fingerprints, is_complete
from raytrain_ddp.errors import (
    CheckpointError,
    ConfigError,
    PreflightError,
    RaytrainError,
    RunLockedError,
    did_you_mean,
    first_names,
)
from raytrain_ddp.membership.process_group import LIMIT_S, UNSET, Waiting
from raytrain_ddp.tasks.task_loading import BUILT_IN
from raytrain_ddp.uri import without_secrets
from raytrain_ddp.user_code import hashes

BRANCH_FILE = "branch.json"
CLAIM_FILE = "claimed.toml"
"""The config of a new run, from the time its name is held until the run ends."""

_SHOWN = 3  # fields in a line
_LONGEST = 120  # maximum length of a name with a number
_PAUSE_S = 0.1
_CLAIM_S = 10.0

Changes = Sequence[tuple[str, Any, Any]]


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


@dataclass(frozen=True)
class NamedRun:
    """An existing or a new run.

    Args:
        config: with the run's name.
        base: the name without its number; None: the name is explicit.
        is_new: the run does not exist yet; its name was free.
        note: a message about its name; "" if the name is as expected.
        branch: where it is to start from, if that is another run's state.
    """

    config: TrainConfig
    folder: Storage
    manifest: Manifest | None
    base: str | None = None
    is_new: bool = False
    note: str = ""
    branch: Branch | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return is_complete(self.config, self.manifest)


def find_run(
    config: TrainConfig,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
) -> NamedRun:
    """The run that a config refers to. Nothing is written.

    Args:
        config: checked; see preflight.py.
        default_name: used if the config has no name. Default: derived from the task or the data.
        resume_from: what the run is to start from; see `branch_of`.

    Raises:
        PreflightError: the storage cannot be reached.
        ConfigError: the run with an explicit name has a different config; lists the differences.
        CheckpointError: the run had checkpoints, but all of them are missing.
    """
    if config.name is not None:
        run = answered(config, lambda: _of_name(config))
    else:
        run = answered(config, lambda: _of_config(config, default_name or name_by_config(config)))
    if resume_from is None:
        return run
    return replace(run, branch=branch_of(run, os.fspath(resume_from)))


def run_of_rank_0(config: TrainConfig, rank: int, default_name: str | None = None) -> NamedRun:
    """The same run as rank 0's, which may not have started it yet.

    Raises:
        PreflightError: rank 0's run does not appear in this storage; also like `find_run`.
    """
    place = without_secrets(config.storage)
    waiting = Waiting(lambda: f"rank {rank} waits for rank 0 to start a run in {place}", None)
    while (run := find_run(config, default_name)).is_new:
        if waiting.look():
            raise PreflightError(
                f"storage = {place}: rank 0 did not start a run with this config here within "
                f"{LIMIT_S:g} s. {UNSET} The storage must be the same, too."
            )
        time.sleep(_PAUSE_S)
    return run


def after_refusal(run: NamedRun) -> NamedRun | None:
    """The run for a command that lost the race for a new run's name; None: there is no other,
    because the run that took the name has the same config."""
    if not run.is_new:
        return None
    until_s = time.monotonic() + _CLAIM_S
    while True:
        other = find_run(replace(run.config, name=None), run.base)
        if other.config.name != run.config.name:
            return replace(other, branch=run.branch)
        if not other.is_new or time.monotonic() > until_s:
            return None
        time.sleep(_PAUSE_S)


@contextmanager
def claimed(run: NamedRun) -> Iterator[None]:
    """Stores the config of a new run in its folder, so other commands know which config has the
    name.

    Enter it only while holding the lease.

    Raises:
        RunLockedError: in the meantime, another command started a run with that name and ended.
    """
    if not run.is_new:
        yield
        return
    _, begun = answered(run.config, lambda: _begun(run.folder))
    if begun is not None:
        raise RunLockedError(f"Run {run.folder} was started by another process in the meantime.")
    text = dumps(publishable(run.config)).encode()
    answered(run.config, lambda: run.folder.write_atomic(CLAIM_FILE, text))
    try:
        yield
    finally:
        with suppress(OSError):
            run.folder.delete_file(CLAIM_FILE)


def _of_name(config: TrainConfig) -> NamedRun:
    folder = run_storage(config)
    manifest = newest_manifest(folder)
    if manifest is None and folder.exists(SWEEP_FILE):
        raise ConfigError(f"{folder} is a sweep: give the run another --name.")
    if manifest is None:
        require_none_lost(config, folder)
        return NamedRun(config, folder, None)
    changed = _changes(folder, manifest, manifest.config, config)
    for name, then, _ in changed:
        if hint := withdrawn(name) or withdrawn(f"{name}={then}"):
            raise ConfigError(f"run {config.name} has {name} = {then!r}.{hint}")
    if changed:
        width = max(len(name) for name, _, _ in changed)
        rows = [f"  {name:<{width}}  {then!r} -> {now!r}" for name, then, now in changed]
        raise ConfigError(
            f"run {config.name} is at step {manifest.step}, but has a different config "
            "(checkpoint -> now):\n" + "\n".join(rows) + "\n"
            "Revert these changes to continue it. To start a new run, use another --name, or none: "
            "then a free name is chosen."
        )
    return NamedRun(settled_as_begun(config, manifest.config), folder, manifest)


def _of_config(config: TrainConfig, base: str) -> NamedRun:
    taken: set[int] = set()
    note = ""
    for number in _numbers(open_storage(config.storage).names(), base):
        named = replace(config, name=_numbered(base, number))
        folder = run_storage(named)
        try:
            manifest, begun = _begun(folder)
        except PermissionError:  # another user's
            taken.add(number)
            continue
        if begun is None:
            continue
        changed = _changes(folder, manifest, begun, config)
        if not changed:
            if manifest is None:
                require_none_lost(named, folder)
            else:
                named = settled_as_begun(named, manifest.config)
            goes_on = f"continuing run {named.name}, which has this config" if number > 1 else ""
            return NamedRun(named, folder, manifest, base, note=goes_on)
        taken.add(number)
        fields = [f"{field} {then!r} -> {now!r}" for field, then, now in changed]
        note = note or f"{named.name} has a different config ({first_names(fields, _SHOWN)})"
    number = next(n for n in range(1, len(taken) + 2) if n not in taken)
    named = replace(config, name=_numbered(base, number))
    note = f"new run {named.name}: {note}" if note else ""
    folder = run_storage(named)
    require_none_lost(named, folder)
    return NamedRun(named, folder, None, base, is_new=True, note=note)


def _changes(
    folder: Storage, manifest: Manifest | None, begun: Mapping[str, Any], config: TrainConfig
) -> Changes:
    """Returns the changes that make this config a different run than the one in the folder."""
    changed = changed_fields(begun, config, str(folder) if folder.is_local else "")
    if manifest is None or {name for name, _, _ in changed} - {*facts(TrainConfig, "path")}:
        return changed
    found = newest_checkpoint(folder)
    assert found is not None  # that of the manifest
    return other_things(found, changed, config)


def other_things(checkpoint: Checkpoint, changed: Changes, config: TrainConfig) -> Changes:
    """Drops changed paths that lead to what the checkpoint was made with: data with the same
    fingerprint, and files of the same name, whose new code the start reports. The start compares
    the data of a custom task.

    Drops none without a name, because two data sets may have files of equal sizes.
    """
    kinds = facts(TrainConfig, "path")

    @cache
    def is_same_data() -> bool:
        before = (
            checkpoint.manifest.data_fingerprint,
            recorded(checkpoint).get("data", {}).get("eval"),
        )
        return config.task not in BUILT_IN or fingerprints(config) == before

    def is_same(name: str, then: Any, now: Any) -> bool:
        kind = kinds.get(name)
        if kind == "options":
            both = [(each, now.get(key)) for key, each in then.items()]
            return then.keys() == now.keys() and all(a == b or _is_moved(a, b) for a, b in both)
        return is_same_data() if kind == "data" and then and now else _is_moved(then, now)

    return [row for row in changed if config.name is None or not is_same(*row)]


def new_code_note(run: NamedRun) -> str | None:
    """Returns a note if the code of the task or model has changed since the newest checkpoint."""
    config, manifest = run.config, run.manifest
    now = hashes(config.task, config.model.name)
    if manifest is None or not now:
        return None
    with suppress(RaytrainError, OSError):
        name = CheckpointName(manifest.step, manifest.attempt)
        before = recorded(checkpoint_store(run.folder).open(name)).get("code", {})
        changed = [each for each, code in now.items() if before.get(each, code) != code]
        if changed:
            complete = "To train with the new code, give the run another --name (config.name)."
            then = complete if is_complete(config, manifest) else "The run now uses the new code."
            return f"the code of {' and '.join(changed)} has changed since {name}. {then}"
    return None


def _is_moved(then: Any, now: Any) -> bool:
    """Whether both are absolute paths of a file of one name."""
    paths = [PurePath(each) for each in (then, now) if isinstance(each, str)]
    is_one_name = len(paths) == 2 and paths[0].name == paths[1].name
    return is_one_name and all(path.is_absolute() for path in paths)


def _begun(folder: Storage) -> tuple[Manifest | None, Mapping[str, Any] | None]:
    """The newest checkpoint of a run and the config it was started with; None if missing."""
    manifest = newest_manifest(folder)
    if manifest is not None:
        return manifest, manifest.config
    for file in (CONFIG_FILE, CLAIM_FILE):
        with suppress(FileNotFoundError, ValueError):  # not TOML: torn, or not ours
            return None, parse(folder.read(file).decode())
    return None, None


def _numbers(names: Sequence[str], base: str) -> list[int]:
    pattern = re.compile(rf"{re.escape(base[:_LONGEST])}-([1-9]\d{{0,8}})")
    found = (pattern.fullmatch(name) for name in names)
    numbers = {int(match[1]) for match in found if match} - {1}
    return sorted(numbers | ({1} if base in names else set()))


def _numbered(base: str, number: int) -> str:
    return base if number == 1 else f"{base[:_LONGEST]}-{number}"


def name_by_config(config: TrainConfig) -> str:
    """The default name of a run whose config and recipe have none: that of its task or data."""
    if config.task not in BUILT_IN:
        name = config.task.rpartition(":")[2].partition("(")[0].rpartition(".")[2].strip("<>")
    else:
        source = without_secrets(config.data.source)
        name = Path(source.rpartition(":")[2] if is_by_name(source) else source).name
        name = name.split(".")[0].lower()
    return name if RUN_NAME.fullmatch(name) else "run"


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
    """The run with its first checkpoint, a copy of the other run's, which is written now.

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
    try:
        is_one = open_storage(place).exists(MANIFEST_FILE)
        return find_checkpoint(place, None if is_one else "last")
    except (CheckpointError, ConfigError) as error:
        hint = did_you_mean(origin, open_storage(config.storage).names())
        raise type(error)(f"--resume-from {origin}: {error}{hint}") from None
