"""Reads the folders of runs without changing them, even while the runs are in progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raytrain_ddp.checkpoint.committed import CheckpointName
from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    checkpoint_store,
    open_run,
    parsed_lines,
    read_events,
    read_followed,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of, flat, parse
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, PreflightError
from raytrain_ddp.events import Eval, LogRecord, Plan, Train
from raytrain_ddp.records import Timed, log_records
from raytrain_ddp.tools.report.curves import RunCurves


@dataclass(frozen=True)
class RunFiles(RunCurves):
    """The content of a run's folder.

    Args:
        name: the folder's.
        config: the fields in config.toml, by their full names.
        events: in the order in which they were written.
        followed: the evaluations of `evaluate --follow`.
        kept: the existing checkpoints, newest first; None if it cannot be read.
        owner: the process that holds the run, as far as known.
        read_at: seconds since 1970.
    """

    place: Storage
    config: Mapping[str, Any]
    events: Sequence[Timed]
    followed: Sequence[Eval]
    kept: Sequence[tuple[CheckpointName, Manifest | None]]
    owner: Owner | None
    read_at: float

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the newest readable checkpoint."""
        return next((manifest for _, manifest in self.kept if manifest), None)

    @property
    def last_step(self) -> int:
        """The last step in the log, the events and the checkpoints."""
        steps = [super().last_step]
        steps += [name.step for name, _ in self.kept[:1]]
        steps += [e.start_step for e, _, _ in self.events[-1:] if isinstance(e, Plan)]
        return max(steps)

    @property
    def total_steps(self) -> int:
        """As planned by the newest start; 0 if unknown."""
        plans = (each.event for each in reversed(self.events) if isinstance(each.event, Plan))
        return next((plan.total_steps for plan in plans), 0)

    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Field -> (value, default) of all fields, including those that this version lacks."""
        defaults = flat(TrainConfig())
        names = list(dict.fromkeys([*defaults, *self.config]))
        return {n: (self.config.get(n, defaults.get(n)), defaults.get(n)) for n in names}


def read_run(place: str | Storage, most: int = 2**40) -> RunFiles:
    """The run in a folder, or at a path, at a URI, or of that name below runs/.

    Args:
        most: of a longer log, only about so many training records are read.

    Raises:
        ConfigError: there is no run.
        PreflightError: the storage does not answer.
    """
    storage = open_run(place) if isinstance(place, str) else place
    try:
        records = _log_in(storage, most)
        return RunFiles(
            place=storage,
            name=storage.path.rstrip("/").rpartition("/")[2],
            config=_config_of(storage),
            train=[r for r in records if isinstance(r, Train)],
            evals=[r for r in records if isinstance(r, Eval)],
            events=[each for each in read_events(storage) if each.time],
            followed=read_followed(storage),
            kept=_kept_in(storage),
            owner=owner_of(storage),
            read_at=time.time(),
        )
    except OSError as error:
        raise PreflightError(f"{storage}: cannot be read: {error}") from error


def _log_in(storage: Storage, most: int) -> list[LogRecord]:
    if not storage.exists(METRICS_FILE):
        return []
    lines = storage.read(METRICS_FILE).splitlines()
    some = {*range(0, len(lines), -(-len(lines) // most) or 1), len(lines) - 1}
    kept = [line for n, line in enumerate(lines) if n in some or b'"eval"' in line[:20]]
    return log_records(parsed_lines(kept, METRICS_FILE))


def _config_of(storage: Storage) -> dict[str, Any]:
    """As it was written, whatever version did; {} where there is none."""
    if not storage.exists(CONFIG_FILE):
        return {}
    text = storage.read(CONFIG_FILE).decode("utf-8", errors="replace")
    try:
        return dict(fields_of(parse(text)))
    except ValueError:
        return {}


def _kept_in(storage: Storage) -> list[tuple[CheckpointName, Manifest | None]]:
    store, kept = checkpoint_store(storage), []
    for name in store.names():
        manifest = None
        with suppress(CheckpointError, FileNotFoundError):  # damaged, or just pruned
            manifest = store.open(name).manifest
        kept.append((name, manifest))
    return kept
