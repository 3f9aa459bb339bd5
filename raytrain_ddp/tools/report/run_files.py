"""Reads a run's folder without changing it, even while the run is in progress."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.listing import Claim
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    checkpoint_store,
    open_run,
    read_events,
    read_followed,
    read_log,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of, flat, parse
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, PreflightError
from raytrain_ddp.events import Eval, Plan, Train
from raytrain_ddp.records import Timed
from raytrain_ddp.tools.display.curves import RunCurves

Record = Mapping[str, Any]


class Kept(NamedTuple):
    """An existing checkpoint; `manifest` is None if it cannot be read."""

    name: str
    step: int
    manifest: Manifest | None


@dataclass(frozen=True)
class RunFiles(RunCurves):
    """The content of a run's folder.

    Args:
        name: the folder's.
        config: the fields in config.toml, by their full names.
        events: in the order in which they were written.
        followed: the evaluations of `evaluate --follow`.
        kept: the existing checkpoints, newest first.
        owner: the process that holds the run, as far as known.
        claims: the record of each start: host, pid, workers.
        read_at: seconds since 1970.
    """

    place: Storage
    config: Mapping[str, Any]
    events: Sequence[Timed]
    followed: Sequence[Eval]
    kept: Sequence[Kept]
    owner: Owner | None
    claims: Sequence[tuple[int, Record]]
    read_at: float

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the newest readable checkpoint."""
        return next((kept.manifest for kept in self.kept if kept.manifest), None)

    @property
    def last_step(self) -> int:
        """The last step in the log, the events and the checkpoints."""
        steps = [super().last_step]
        steps += [kept.step for kept in self.kept[:1]]
        steps += [e.start_step for e, _, _ in self.events[-1:] if isinstance(e, Plan)]
        return max(steps)

    @property
    def total_steps(self) -> int | None:
        """As planned by the newest start."""
        plans = (each.event for each in reversed(self.events) if isinstance(each.event, Plan))
        return next((plan.total_steps for plan in plans), None)

    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Field -> (value, default) of all fields, including those that this version lacks."""
        defaults = flat(TrainConfig())
        names = list(dict.fromkeys([*defaults, *self.config]))
        return {n: (self.config.get(n, defaults.get(n)), defaults.get(n)) for n in names}


def read_run(place: str) -> RunFiles:
    """The run at a path, at a URI, or of that name below runs/.

    Raises:
        ConfigError: there is no run.
        PreflightError: the storage does not answer.
    """
    storage = open_run(place)
    try:
        return _read(storage)
    except OSError as error:
        raise PreflightError(f"{storage}: cannot be read: {error}") from error


def _read(storage: Storage) -> RunFiles:
    records = [record for record in read_log(storage) if isinstance(record.step, int)]
    return RunFiles(
        place=storage,
        name=storage.path.rstrip("/").rpartition("/")[2],
        config=config_of(storage),
        train=[r for r in records if isinstance(r, Train)],
        evals=[r for r in records if isinstance(r, Eval)],
        events=[each for each in read_events(storage) if each.time],
        followed=read_followed(storage),
        kept=kept_in(storage),
        owner=owner_of(storage),
        claims=claims_in(storage),
        read_at=time.time(),
    )


def config_of(storage: Storage) -> dict[str, Any]:
    """As it was written, whatever version did; {} where there is none."""
    if not storage.exists(CONFIG_FILE):
        return {}
    text = storage.read(CONFIG_FILE).decode("utf-8", errors="replace")
    try:
        return dict(fields_of(parse(text)))
    except ValueError:
        return {}


def kept_in(storage: Storage) -> list[Kept]:
    store, kept = checkpoint_store(storage), []
    for name in store.names():
        manifest = None
        with suppress(CheckpointError, FileNotFoundError):  # damaged, or just pruned
            manifest = store.open(name).manifest
        kept.append(Kept(str(name), name.step, manifest))
    return kept


def claims_in(storage: Storage) -> list[tuple[int, Record]]:
    """(attempt, what it says of itself), the oldest first; of the last starts only."""
    folder, found = storage.join(CHECKPOINTS), []
    for path in folder.walk():
        claim = Claim.parse(path) if "/" not in path else None
        if claim is not None:
            with suppress(FileNotFoundError, ValueError, RecursionError):
                record = json.loads(folder.read(path))
                found.append((claim.attempt, record if isinstance(record, dict) else {}))
    return sorted(found, key=lambda pair: pair[0])
