"""Reads the folder of a run without changing it, even while the run is in progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from raytrain_ddp.bottleneck import split_of
from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    FOLLOWED_FILE,
    METRICS_FILE,
    newest_manifest,
    open_run,
    parsed_lines,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of, parse
from raytrain_ddp.errors import PreflightError, first_line
from raytrain_ddp.events import Eval, Plan, Train
from raytrain_ddp.formatting import format_count, format_metric, plural
from raytrain_ddp.records import Timed, log_records, stored_events


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        train, evals: of its log, by step; and the evaluations of `evaluate --follow`.
        events: in the order in which they were written.
        config: the fields in config.toml, by their full names.
        manifest: of the newest readable checkpoint.
        owner: the process that drives the run, as far as known.
        damage: a line for each of its files that cannot be read in full.
    """

    name: str
    train: Sequence[Train]
    evals: Sequence[Eval]
    place: str = ""
    events: Sequence[Timed] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    owner: Owner | None = None
    damage: Sequence[str] = ()

    @property
    def plans(self) -> list[Plan]:
        """Of all starts."""
        return [event for event, _, _ in self.events if isinstance(event, Plan)]

    @property
    def plan(self) -> Plan:
        """Of the newest start; one of zeros before the first."""
        return [Plan(), *self.plans][-1]

    @property
    def monitor(self) -> str:
        """The metric that decides which evaluation is the best; "" before the first."""
        return self.evals[-1].monitor if self.evals else ""

    @property
    def best(self) -> Eval | None:
        """The best evaluation, if it has that metric."""
        found = (e for e in reversed(self.evals) if e.best and self.monitor in e.metrics)
        return next(found, None)

    @property
    def value(self) -> float:
        """Of the best evaluation; nan without one."""
        return self.best.metrics[self.monitor] if self.best else math.nan

    @property
    def best_summary(self) -> str:
        """``top1 97.50 % at step 184``; "" without an evaluation."""
        if self.best is None:
            return ""
        metric = format_metric(self.monitor, self.value)
        return f"{self.monitor} {metric} at step {format_count(self.best.step)}"

    @property
    def last_step(self) -> int:
        """The last step in the log, the plans and the checkpoints."""
        known: list[Train | Eval | Manifest] = [*self.train[-1:], *self.evals[-1:]]
        known += [self.manifest] if self.manifest else []
        return max([self.plan.start_step, *(each.step for each in known)])

    @property
    def newest(self) -> list[Train]:
        """The training records of the newest start."""
        return [record for record in self.train if record.step > self.plan.start_step]

    @property
    def timed(self) -> list[Train]:
        """The training records with timing."""
        return [record for record in self.train if record.timing.split_s]

    @property
    def limit(self) -> str:
        """The main bottleneck; "" if unknown."""
        return split_of(self.timed).limit()

    @property
    def speed(self) -> str:
        """The speed of all workers, the median of the newest start, such as ``1437 images/s``. The
        run must have records."""
        speed = median(record.samples_per_s for record in self.newest or self.train)
        return f"{format_count(speed)} {self.plan.unit}/s"


def read_run(place: str | Storage, name: str = "") -> Run:
    """The run in a folder, or at a path, at a URI, or of that name below runs/.

    Args:
        name: how it is called. Default: as its folder.

    Raises:
        ConfigError: there is no run.
        PreflightError: the storage does not answer.
    """
    storage = open_run(place) if isinstance(place, str) else place
    damage: list[str] = []

    def text_of(file: str) -> str:
        return storage.read(file).decode(errors="replace") if storage.exists(file) else ""

    def records(file: str) -> list[dict[str, Any]]:
        text = text_of(file)
        found = parsed_lines(text.splitlines(), file)
        lost = len(text.splitlines()) - len(found)
        if lost > text.rpartition("\n")[2].startswith("{"):  # the last one may be on its way
            damage.append(f"{file}: {plural(lost, 'line')} cannot be read")
        return found

    def config() -> dict[str, Any]:  # as it was written, whatever version did
        try:
            return dict(fields_of(parse(text_of(CONFIG_FILE))))
        except (ValueError, RecursionError) as error:
            damage.append(f"{CONFIG_FILE} cannot be read: {first_line(error)}")
            return {}

    try:
        log = log_records([*records(FOLLOWED_FILE), *records(METRICS_FILE)])
        evals = {each.step: each for each in log if isinstance(each, Eval)}
        return Run(
            name or Path(storage.path).name,
            [each for each in log if isinstance(each, Train)],
            [evals[step] for step in sorted(evals)],
            storage.address,
            [each for each in stored_events(records(EVENTS_FILE)) if each.time],
            config(),
            newest_manifest(storage),
            owner_of(storage),
            damage,
        )
    except OSError as error:
        raise PreflightError(f"{storage}: cannot be read: {error}") from error
