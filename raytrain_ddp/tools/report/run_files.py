"""Reads the folder of a run without changing it, even while the run is in progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from raytrain_ddp.bottleneck import split_of
from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    newest_manifest,
    open_run,
    read_events,
    read_followed,
    read_log,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of, parse
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.events import Eval, LogRecord, Plan, Train
from raytrain_ddp.formatting import format_count, format_metric
from raytrain_ddp.records import Timed


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        train, evals: of its log, by step; and the evaluations of `evaluate --follow`.
        events: in the order in which they were written.
        config: the fields in config.toml, by their full names.
        manifest: of the newest readable checkpoint.
        owner: the process that drives the run, as far as known.
    """

    name: str
    train: Sequence[Train]
    evals: Sequence[Eval]
    place: str = ""
    events: Sequence[Timed] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    owner: Owner | None = None

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
        steps = [self.plan.start_step, *(record.step for record in self.train[-1:])]
        steps += [each.step for each in self.evals[-1:]]
        return max(*steps, self.manifest.step if self.manifest else 0)

    @property
    def timed(self) -> list[Train]:
        """The training records with timing."""
        return [record for record in self.train if record.timing.split_s]

    @property
    def limit(self) -> str:
        """The main bottleneck; "" if unknown."""
        return split_of(self.timed).limit()

    @property
    def worked_s(self) -> float:
        """Seconds of training in all starts, without work that a later start repeated."""
        return self.train[-1].seconds_total if self.train else 0.0

    @property
    def speed(self) -> str:
        """``1437 images/s``: of all workers, the median of the newest start; "" before the first
        record of the log."""
        newest = [r for r in self.train if r.step > self.plan.start_step] or self.train
        speed = median(record.samples_per_s for record in newest) if newest else math.nan
        return "" if math.isnan(speed) else f"{format_count(speed)} {self.plan.unit}/s"


def of_log(name: str, records: Sequence[LogRecord]) -> Run:
    """A run of which only the log is known."""
    evals = {each.step: each for each in records if isinstance(each, Eval)}
    train = [each for each in records if isinstance(each, Train)]
    return Run(name, train, [evals[step] for step in sorted(evals)])


def read_run(place: str | Storage, name: str = "") -> Run:
    """The run in a folder, or at a path, at a URI, or of that name below runs/.

    Args:
        name: how it is called. Default: as its folder.

    Raises:
        ConfigError: there is no run.
        PreflightError: the storage does not answer.
    """
    storage = open_run(place) if isinstance(place, str) else place
    try:
        return replace(
            of_log(
                name or storage.path.rstrip("/").rpartition("/")[2],
                [*read_followed(storage), *read_log(storage)],
            ),
            place=storage.address,
            events=[each for each in read_events(storage) if each.time],
            config=_config_of(storage),
            manifest=newest_manifest(storage),
            owner=owner_of(storage),
        )
    except OSError as error:
        raise PreflightError(f"{storage}: cannot be read: {error}") from error


def _config_of(storage: Storage) -> dict[str, Any]:
    """As it was written, whatever version did; {} where there is none."""
    if not storage.exists(CONFIG_FILE):
        return {}
    with suppress(ValueError):
        return dict(fields_of(parse(storage.read(CONFIG_FILE).decode(errors="replace"))))
    return {}
