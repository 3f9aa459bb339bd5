"""What is known of a sweep: its settings and its trials, and the file that keeps both.

The file is written before a trial starts and whenever one is evaluated or ends, so a sweep that was
killed continues with it. What happened inside a trial is in its run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from raytrain_ddp.checkpoint.run_folder import SWEEP_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import fields_of
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.tools.sweep.space import Dimension, Value

SCHEMA = 1
STOP_NOTE = "the sweep stops this run: "  # begins a note in a trial's events
Status = Literal["waiting", "running", "paused", "stopped", "finished", "failed"]
OVER = ("stopped", "finished", "failed")
# Of the recipe's fields: they may change while a sweep is continued.
_FREE = ("scaling.", "log.", "checkpoint.", "name", "storage", "settled")


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of a trial: after how many epochs, and the metric that decides."""

    step: int
    epochs: float
    value: float


@dataclass
class Trial:
    """A point with a seed, which is trained as the run `name`.

    Args:
        point: the values of the fields that vary.
        status: "paused" at a rung, until its fate is decided; "stopped" by the scheduler.
        until: the rung, in epochs, at which it pauses; 0: none.
        starts: how often a process began to train it. deaths: how many of them disappeared.
        seconds: that its processes took, all starts together.
        message: why it was stopped, or has failed.
        origin: the trial whose state it starts from; "": its point was drawn, and it starts anew.
    """

    number: int
    name: str
    point: Mapping[str, Value]
    seed: int
    status: Status = "waiting"
    until: int = 0
    starts: int = 0
    deaths: int = 0
    seconds: float = 0.0
    message: str = ""
    evaluations: list[Evaluated] = field(default_factory=list)
    origin: str = ""

    @property
    def history(self) -> str:
        """Where it came from, and why it ended, in one line."""
        origin = f"a copy of {self.origin}, with other values" if self.origin else ""
        return "; ".join(filter(None, (origin, self.message.partition("\n")[0])))

    def at(self, epochs: int) -> float | None:
        """The value of the first evaluation after this many epochs; None before it."""
        found = (each.value for each in self.evaluations if each.epochs >= epochs)
        return next(found, None)


@dataclass(frozen=True)
class Settings:
    """What decides the trials of a sweep; the same command has the same.

    Args:
        config: the recipe with its flags, as a dict.
        space: the dimensions, in the order in which they were given.
        trials: number of points. seeds: runs of each point.
        first_rung: epochs before the first decision. factor: one in this many continues.
    """

    config: Mapping[str, Any]
    space: Sequence[Dimension]
    trials: int
    seeds: int = 1
    search: Literal["random", "grid", "optuna"] = "random"
    scheduler: Literal["none", "asha", "halving", "pbt"] = "none"
    first_rung: int = 1
    factor: int = 3


@dataclass
class Sweep:
    """A sweep so far. `monitor` and `goal` are those of the task, known from the first trial on."""

    settings: Settings
    trials: list[Trial] = field(default_factory=list)
    monitor: str = ""
    goal: Literal["min", "max"] = "max"
    schema: int = SCHEMA

    def better(self, value: float | None) -> float:
        """A number that is larger for a better value of the metric; worst are none, and what is
        not finite."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.goal == "max" else -value

    def best_of(self, trial: Trial) -> float | None:
        """The best value of a trial; None before its first evaluation."""
        values = [each.value for each in trial.evaluations]
        return max(values, key=self.better, default=None)

    def ranked(self) -> list[Trial]:
        """The trials with an evaluation, the best first: by the means of their points, of which
        those with a result of each seed come first; and of a point, by their own values."""
        seeds, own = self.settings.seeds, {t.number: self.best_of(t) for t in self.trials}
        known = {number: self.better(value) for number, value in own.items() if value is not None}

        def place(trial: Trial) -> tuple[float, ...]:
            same = [known[t.number] for t in self.of_point(trial) if t.number in known]
            order = (trial.number // seeds, -known[trial.number], trial.number)
            return (len(same) < seeds, -fmean(same), *order)

        return sorted((trial for trial in self.trials if trial.number in known), key=place)

    def of_point(self, trial: Trial) -> list[Trial]:
        """The trials of the same point, one for each seed."""
        seeds = self.settings.seeds
        first = trial.number // seeds * seeds
        return self.trials[first : first + seeds]

    @property
    def missing(self) -> int:
        """How many trials are still to be drawn."""
        drawn = sum(not trial.origin for trial in self.trials)
        return self.settings.trials * self.settings.seeds - drawn

    @property
    def total(self) -> int:
        """All trials so far, and those that are still to be drawn."""
        return len(self.trials) + self.missing

    def count(self, *statuses: str) -> int:
        return sum(trial.status in statuses for trial in self.trials)


def differences(then: Settings, now: Settings) -> list[str]:
    """``["seeds: 1 -> 3"]``: what makes `now` another sweep than `then`."""
    lines = []
    old, new = dict(fields_of(then.config)), dict(fields_of(now.config))
    for name in {**new, **old}:
        if not name.startswith(_FREE) and old.get(name) != new.get(name):
            lines.append(f"{name}: {old.get(name)!r} -> {new.get(name)!r}")
    for each in dataclasses.fields(Settings):
        before, after = getattr(then, each.name), getattr(now, each.name)
        more = each.name == "trials" and after > before and now.scheduler not in ("halving", "pbt")
        if each.name not in ("config", "space") and before != after and not more:
            lines.append(f"--{each.name.replace('_', '-')}: {before!r} -> {after!r}")
    old_space, new_space = (
        {each.field: json.dumps(dataclasses.asdict(each)) for each in settings.space}
        for settings in (then, now)
    )
    if [*old_space.items()] != [*new_space.items()]:
        varied = list({**old_space, **new_space})
        changed = [n for n in varied if old_space.get(n) != new_space.get(n)] or ["the order"]
        lines.append(f"--space: {', '.join(changed)} differs")
    return lines


def save(sweep: Sweep, folder: Storage) -> None:
    """Writes the file atomically. Raises OSError."""
    folder.write_atomic(SWEEP_FILE, json.dumps(dataclasses.asdict(sweep), indent=1).encode())


def load_sweep(folder: Storage) -> Sweep | None:
    """The sweep in a folder; None if there is none.

    Raises:
        ConfigError: a newer version has written it.
        CheckpointError: the file is damaged.
        OSError: the storage does not answer.
    """
    if not folder.exists(SWEEP_FILE):
        return None
    from pydantic import TypeAdapter, ValidationError  # 0.1 s

    try:
        content = json.loads(folder.read(SWEEP_FILE))
        schema = int(content["schema"])
        if schema > SCHEMA:
            raise ConfigError(f"{folder}/{SWEEP_FILE}: a newer version of raytrain_ddp wrote it.")
        sweep = TypeAdapter(Sweep).validate_python(content)
        _require_consistent(sweep)
        return sweep
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        what = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder}/{SWEEP_FILE} is damaged ({what}): restore it, or use another --name."
        ) from None


def _require_consistent(sweep: Sweep) -> None:
    """Raises ValueError if the file was edited so that it contradicts itself."""
    numbers = [trial.number for trial in sweep.trials]
    if sweep.settings.seeds < 1 or numbers != [*range(len(numbers))]:
        raise ValueError("its seeds, or the numbers of its trials")
    for trial in sweep.trials:
        try:
            for dimension in sweep.settings.space:
                dimension.share(trial.point[dimension.field])
        except (LookupError, ValueError, ArithmeticError, AssertionError):
            raise ValueError(f"the values of {trial.name} are not in its space") from None
