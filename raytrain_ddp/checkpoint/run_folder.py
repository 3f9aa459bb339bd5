"""Paths of a run's files, and its checkpoints by what people call them: a run, a folder, or a URI.
No torch, no Ray.

<storage>/<name>/config.toml     every field, resolved
                 metrics.jsonl   one record per line: what was trained
                 events.jsonl    one event per line: what happened to the run
                 followed.jsonl  evaluations alongside the run, by `evaluate --follow`
                 lease.json      the process that drives it, if any: see lease.py
                 checkpoints/    see store.py
                 hang/           the stacks of all ranks when a start hung: see watchdog.py
                 curves.png, tensorboard/, logs/
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from raytrain_ddp import events
from raytrain_ddp.checkpoint.committed import Checkpoint, CheckpointName
from raytrain_ddp.checkpoint.manifest import DamagedError, Manifest
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import (
    DAMAGED_MARK,
    DAMAGED_PREFIX,
    MANIFEST_FILE,
    CheckpointStore,
)
from raytrain_ddp.config.recipe import absolute_path, from_dict, loads, moved_with, with_paths
from raytrain_ddp.config.train_config import RUN_NAME, TrainConfig
from raytrain_ddp.errors import (
    CheckpointError,
    ConfigError,
    RaytrainError,
    did_you_mean,
    first_names,
)
from raytrain_ddp.events import Eval, LogRecord
from raytrain_ddp.records import Timed, log_records, mapped, stored_events
from raytrain_ddp.uri import split_last, without_secrets

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.json"  # in each checkpoint: the records of metrics.jsonl so far
STATE_FILE = "state.json"  # in each checkpoint: the counters, and what is not a tensor
EVENTS_FILE = "events.jsonl"
FOLLOWED_FILE = "followed.jsonl"
CURVES_FILE = "curves.png"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOGS = "logs"
PROFILES = "profiles"
HANGS = "hang"
SWEEP_FILE = "sweep.json"  # in the folder of a sweep, which holds the runs of its trials
_LOOKED_AT = 32  # folders of a store, for a hint
T = TypeVar("T")
RUNS = "runs"  # the folder of runs, unless --storage is given

CLOCKS = frozenset({"seconds", "seconds_total", "samples_per_s", "timing"})
"""The keys of log records that hold times; all others are equal in equal runs."""


def run_storage(config: TrainConfig) -> Storage:
    """The run's folder. A storage is opened once in a process, so if it fails later, code that
    needs it still gets its Storage; `forget_storages` ends that.

    Raises:
        PreflightError: the storage cannot be reached.
    """
    return _opened(absolute_path(config.storage)).join(str(config.name))


@lru_cache(maxsize=64)
def _opened(storage: str) -> Storage:
    return open_storage(storage)


def forget_storages() -> None:
    """A new run begins in this process: its storage is opened anew, which checks it."""
    _opened.cache_clear()


def path_of_run(place: str, storage: str = RUNS) -> str:
    """``storage/NAME`` for the name of a run there; else `place`, which is a path or a URI.

    A run is often named like the folder of its data, which holds no run.
    """
    if "://" in place:
        return place
    below = Path(storage) / place
    is_name = is_name_below(place, storage) or (below.is_dir() and not Path(place).exists())
    return str(below) if is_name else place


def is_name_below(place: str, storage: str) -> bool:
    """Whether it is a run by its name below `storage`, a local folder, and none by its path."""
    is_local = "://" not in place and "://" not in storage
    return is_local and holds_run(Path(storage) / place) and not holds_run(Path(place))


def config_of_run(place: str) -> TrainConfig | None:
    """Returns the config of a run, or None if there is none.

    The storage and name are those of the folder, and the paths are the current ones.

    Args:
        place: the run's folder, its config.toml, the URI of either, or its name in runs/.

    Raises:
        ConfigError: config.toml is damaged, the folder's name is not valid for a run, or no run is
            at the URI.
        PreflightError: the storage cannot be reached.
    """
    given, slash, last = place.rpartition("/")
    by_file = last == CONFIG_FILE  # a file of that name alone may be a recipe
    place = path_of_run((given or slash or ".") if by_file else place)
    if "://" not in place and not (os.path.isdir(place) and holds_run(Path(place), not by_file)):
        return None
    run = open_run(place)
    manifest = None if run.exists(CONFIG_FILE) else newest_manifest(run)
    if manifest is not None:
        return _at_home(from_dict(manifest.config, where=str(run)), place)
    config, _ = loads(run.read(CONFIG_FILE).decode(errors="replace"), f"{run}/{CONFIG_FILE}")
    return _at_home(config, place)


def config_of(checkpoint: Checkpoint) -> TrainConfig:
    """Returns the config of a checkpoint; like `config_of_run` if the checkpoint is in a run.

    Raises:
        ConfigError: another version wrote it.
    """
    config = from_dict(checkpoint.manifest.config, str(checkpoint), for_training=False)
    folder, name = split_last(split_last(checkpoint.storage.address)[0])
    return _at_home(config, folder) if name == CHECKPOINTS else config


def _at_home(config: TrainConfig, folder: str) -> TrainConfig:
    folder = absolute_path(folder)
    storage, name = split_last(folder)
    config = with_paths(config, moved_with(f"{config.storage}/{config.name}", folder))
    return replace(config, storage=storage, name=name)


def holds_run(folder: Path, alone: bool = True) -> bool:
    """Whether it is the folder of a run or of a checkpoint.

    Args:
        alone: whether a config.toml or a checkpoint's manifest suffices.
    """
    names = (METRICS_FILE, EVENTS_FILE, CHECKPOINTS, *((CONFIG_FILE, MANIFEST_FILE) * alone))
    return any((folder / name).exists() for name in names)


def is_run(folder: Storage) -> bool:
    return any(folder.exists(name) for name in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE))


def open_run(place: str) -> Storage:
    """A run's folder, by its path, URI or name below runs/.

    Raises:
        ConfigError: there is no run, or it is a sweep.
        PreflightError: the storage cannot be reached.
    """
    run = open_storage(path_of_run(place))
    if not is_run(run):
        if run.exists(SWEEP_FILE):
            others = other_runs(path_of_run(place))
            raise ConfigError(f"{without_secrets(place)} is a sweep: name one of its runs.{others}")
        raise ConfigError(
            f"{without_secrets(place)}: no run there (looked for {METRICS_FILE} and "
            f"{EVENTS_FILE}).{other_runs(place)}"
        )
    return run


def other_runs(place: str) -> str:
    """A hint for a place where there is no run: the run of a similar name, or those that exist."""
    if "://" in place:
        return _other_runs_in_store(place)
    folder = Path(place if Path(place).is_dir() else RUNS)
    runs = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
    listed = f" In {folder} there are: {first_names(runs, 8)}." if runs else ""
    return did_you_mean(Path(place).name, runs) or listed


def _other_runs_in_store(uri: str) -> str:
    with suppress(OSError, RaytrainError):
        here = open_storage(uri)
        bucket = here.path.partition("/")[0]
        has_buckets = here.fs.type_name in ("s3", "gcs", "abfs")
        if has_buckets and here.fs.get_file_info(bucket).type.name == "NotFound":
            return f" Bucket {bucket} does not exist."
        above = replace(here, path=here.path.rpartition("/")[0] or here.path)
        for folder in (here, above):
            found = [n for n in folder.names() if RUN_NAME.fullmatch(n)][:_LOOKED_AT]
            runs = [name for name in found if folder.join(name).exists(CONFIG_FILE)]
            if runs:
                return f" In {folder} there are: {first_names(runs, 8)}."
    return ""


def checkpoint_store(run: Storage) -> CheckpointStore:
    return CheckpointStore(run.join(CHECKPOINTS))


def newest_manifest(run: Storage) -> Manifest | None:
    """Returns the manifest of `newest_checkpoint`."""
    found = newest_checkpoint(run)
    return found.manifest if found is not None else None


def newest_checkpoint(run: Storage) -> Checkpoint | None:
    """Returns the newest checkpoint with a readable manifest; files are not verified."""
    store = checkpoint_store(run)
    for name in store.names():
        with suppress(DamagedError):
            return store.open(name)
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


def read_followed(run: Storage) -> list[Eval]:
    """Returns the evaluations in followed.jsonl."""
    records = log_records(read_history(run, FOLLOWED_FILE))
    return [record for record in records if isinstance(record, Eval)]


def read_history(run: Storage, file: str = METRICS_FILE) -> list[dict[str, Any]]:
    """Returns the records of a .jsonl file of the run; an incomplete last line is skipped.

    A null among the numbers of metrics.jsonl or followed.jsonl was a non-finite value, and is
    returned as nan.
    """
    if not run.exists(file):
        return []
    return parsed_lines(run.read(file).decode("utf-8", errors="replace").splitlines(), file)


def parsed_lines(lines: Iterable[str | bytes], file: str) -> list[dict[str, Any]]:
    """As `read_history`, of lines that were read from that file."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record if file == EVENTS_FILE else mapped(_with_nan, record))
        except (ValueError, RecursionError):
            continue
    return records


def _with_nan(value: Any) -> Any:
    return math.nan if value is None else value


class NoCheckpointError(CheckpointError):
    """There is none, as opposed to a damaged one."""


def find_checkpoint(place: str, which: Literal["best", "last"] | None = None) -> Checkpoint:
    """The checkpoint at `place`, or the one of that run that `which` selects (default: best).

    Raises:
        CheckpointError: there is no checkpoint (NoCheckpointError), or it is damaged.
        ConfigError: there is no run, or `which` is given, but `place` is a single checkpoint.
    """
    return with_checkpoint(place, which, lambda found: found)


def with_checkpoint(
    place: str, which: Literal["best", "last"] | None, use: Callable[[Checkpoint], T]
) -> T:
    """What `use` returns for the checkpoint that `find_checkpoint` returns; for another one, if the
    run deletes it meanwhile."""
    while True:
        store, name = _chosen(path_of_run(place), which)
        try:
            found = store.open(name)
            found.verify()
            return use(found)
        except (DamagedError, FileNotFoundError):
            if store.storage.join(str(name)).exists(MANIFEST_FILE):
                raise


def _chosen(
    place: str, which: Literal["best", "last"] | None
) -> tuple[CheckpointStore, CheckpointName]:
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
        return CheckpointStore(replace(folder, path=parent)), parsed
    store = checkpoint_store(folder)
    names = store.names()
    if not names:
        run = open_run(place)
        raise NoCheckpointError(f"{run}: no checkpoint there (looked for {CHECKPOINTS}/).")
    if which != "last":
        bests = [r.step for r in read_log(folder) if isinstance(r, Eval) and r.best]
        names = [name for name in names if bests and name.step == bests[-1]] or names
    return store, names[0]


def recorded_classes(checkpoint: Checkpoint) -> list[str]:
    """The class names of the data that the run was trained on; empty if it recorded none."""
    names: list[str] = recorded(checkpoint).get("data", {}).get("classes") or []
    return names


def recorded(checkpoint: Checkpoint) -> dict[str, Any]:
    """What state.json says, such as the data and the code of the run; empty without one."""
    has_one = STATE_FILE in checkpoint.manifest.files
    state: dict[str, Any] = json.loads(checkpoint.read(STATE_FILE)) if has_one else {}
    return state
