"""The trials of a sweep. They are runs: what became of each is read from its run.

sweep.json has the points of the trials, in their order, and what decides them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, SWEEP_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.recipe import changed_fields, publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.tools.report.history import State, state_of
from raytrain_ddp.tools.report.run_files import Run, read_run
from raytrain_ddp.tools.sweep.space import Point, with_point
from raytrain_ddp.uri import below

OVER = ("finished", "stopped", "failed")
Trial = dict[str, Any]  # its "name" and its "point"
SEED = "seed"  # in a point, if each is trained with several


@dataclass
class Sweep:
    """A sweep so far. A trial is named by its number, as ``trial-0007``.

    Args:
        base: the recipe with its flags; `name` and `storage` are those of the sweep.
        folder: the runs of its trials are below.
        settings: the flags that decide the trials; with others, it is another sweep.
        total: of the trials, with those that are not known yet.
        points: of the trials that are known, by their names.
        over: the runs of those that need no training anymore, as they were read.
    """

    base: TrainConfig
    folder: Storage
    settings: Mapping[str, Any]
    total: int = 0
    points: dict[str, Point] = field(default_factory=dict)
    over: dict[str, Run] = field(default_factory=dict)

    def add(self, point: Point) -> Trial:
        """The next trial."""
        name = f"trial-{len(self.points):04}"
        self.points[name] = point
        return {"name": name, "point": point}

    def waiting(self) -> list[Trial]:
        """The trials that are known, and not over."""
        return [{"name": n, "point": p} for n, p in self.points.items() if n not in self.over]

    def read(self, name: str) -> tuple[Run, State]:
        """The run of a trial, and its state; both also if it has not begun. Raises
        RaytrainError."""
        run = read_run(self.folder.join(name), name)
        return run, state_of(run)

    def end(self, name: str, cause: str) -> str:
        """Takes over the run of a trial that has ended; returns a line about it.

        Args:
            cause: the cause of its failure, as Tune knows it; "" for none.
        """
        self.over[name], state = self.read(name)
        ended = state.name if state.name in OVER else "stopped"  # it may be about to end
        shown, cause = "failed" if cause else ended, state.cause or cause
        return f"{shown}  {self.shown(name)}  ({len(self.over)} of {self.total})  {cause}".rstrip()

    def shown(self, name: str) -> str:
        """A trial that is over, with its best evaluation and its point, as text."""
        point = (f"{field} {as_text(value)}" for field, value in self.points[name].items())
        return "  ".join((name, self.over[name].best_summary or "-", *point))

    def best(self, goal: str) -> list[str]:
        """The trials of the best point, the best of them first: the point with the best mean, of
        those that have a value for the most seeds. Failed trials do not count."""
        sign, found = 1 if goal == "max" else -1, defaultdict[str, list[tuple[float, str]]](list)
        for name, run in self.over.items():
            if run.best and state_of(run).name != "failed":
                found[repr({**self.points[name], SEED: None})].append((sign * run.value, name))
        ranked = [(len(each), fmean(value for value, _ in each), each) for each in found.values()]
        _, _, best = max(ranked, default=(0, 0.0, []))
        return [name for _, name in sorted(best, reverse=True)]

    def save(self) -> None:
        """Raises OSError."""
        known = {"version": 2, "settings": self.settings, "points": [*self.points.values()]}
        known |= {"config": to_dict(publishable(self.base))}
        self.folder.write_atomic(SWEEP_FILE, json.dumps(known, indent=1).encode())

    def load(self) -> None:
        """Takes over the trials of this sweep, if it has begun.

        Raises:
            ConfigError: the folder holds a run or another sweep.
            CheckpointError: its file is damaged, or of another version.
            RaytrainError, OSError: a run cannot be read.
        """
        if self.folder.exists(CONFIG_FILE):
            raise ConfigError(f"{self.folder} is a run: give the sweep another --name.")
        if not self.folder.exists(SWEEP_FILE):
            return
        try:
            known = json.loads(self.folder.read(SWEEP_FILE))
            config, settings, points = (known[part] for part in ("config", "settings", "points"))
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder.join(SWEEP_FILE)} is damaged, or of another version: give the sweep "
                "another --name. Its runs are whole."
            ) from error
        changed = [name for name, _, _ in changed_fields(config, self.base)]
        changed += [f"--{n}" for n, now in self.settings.items() if settings.get(n) != now]
        if changed:
            raise ConfigError(
                f"{self.folder} is another sweep: {', '.join(changed)} differ. Revert them to "
                "continue it, or give this one another --name."
            )
        for point in points:
            name = self.add(point)["name"]
            run, state = self.read(name)
            if state.name in OVER:
                self.over[name] = run


def trial_config(base: TrainConfig, name: str, point: Point) -> TrainConfig:
    """The config of a trial's run, in the folder of the sweep. Raises ConfigError: see
    `with_point`."""
    storage = below(base.storage, str(base.name))
    return replace(with_point(base, point), name=name, storage=storage)
