"""The trials of a sweep, and sweep.json, which says what is known of each.

It is rewritten whole after each change, so a sweep that was killed continues with it. What happened
inside a trial is in its run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, EVENTS_FILE, SWEEP_FILE
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.tools.sweep.space import Dimension, Value, with_point
from raytrain_ddp.uri import below

OVER = ("done", "stopped", "failed")
SEED = "seed"  # among the values of a trial, if each point is trained with several
_VERSION = 1


@dataclass
class Trial:
    """A run of a sweep.

    Args:
        values: of the fields that vary.
        value: the best evaluation so far; None if there is none that is finite.
        state: waiting, running, or one of OVER; "stopped" by the scheduler.
        epochs: in which it was evaluated last, from 1. message: why it failed.
    """

    name: str
    values: dict[str, Value]
    value: float | None = None
    state: str = "waiting"
    epochs: int = 0
    message: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass
class Sweep:
    """A sweep so far.

    Args:
        base: the recipe with its flags; `name` and `storage` are those of the sweep.
        folder: its runs are below. fields: the names of a trial's values.
        settings: what decides its trials; with others, it is another sweep.
        total: of its trials, with those that are not known yet.
        metric, mode: of the task; known from the first evaluation on.
    """

    base: TrainConfig
    folder: Storage
    space: Sequence[Dimension]
    fields: Sequence[str]
    settings: Mapping[str, Any]
    total: int
    trials: list[Trial] = field(default_factory=list)
    metric: str = ""
    mode: str = "max"

    def add(self, values: Mapping[str, Value]) -> Trial:
        self.trials.append(Trial(f"trial-{len(self.trials):04}", dict(values)))
        return self.trials[-1]

    def named(self, name: str) -> Trial:
        return self.trials[int(name.rpartition("-")[2])]

    def count(self, *states: str) -> int:
        return sum(trial.state in states for trial in self.trials)

    def score(self, trial: Trial) -> float:
        """A number that is larger for a better trial, of those with a value."""
        return (trial.value or 0.0) * (1 if self.mode == "max" else -1)

    def of_point(self, trial: Trial) -> list[Trial]:
        """The trials with these values, one for each seed, as far as they have been evaluated."""
        same = (t for t in self.trials if {**t.values, SEED: 0} == {**trial.values, SEED: 0})
        return [each for each in same if each.value is not None]

    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first: by the mean of their points, of which those
        with a value for each seed come first; and of a point, by their own values."""

        def place(trial: Trial) -> tuple[float, ...]:
            scores = [*map(self.score, self.of_point(trial) if SEED in trial.values else [trial])]
            return (len(scores), fmean(scores), self.score(trial))

        known = [trial for trial in self.trials if trial.value is not None]
        return sorted(known, key=place, reverse=True)

    def save(self) -> None:
        """Raises OSError."""
        own = {name: getattr(self, name) for name in ("metric", "mode", "fields", "settings")}
        trials, best = [asdict(trial) for trial in self.trials], self.ranked()[:1]
        own |= {"version": _VERSION, "trials": trials, "best": best[0].name if best else None}
        self.folder.write_atomic(SWEEP_FILE, json.dumps(own, indent=1).encode())


def opened(new: Sweep) -> Sweep:
    """The sweep in the folder of `new`, which is returned if there is none that has begun.

    Raises:
        ConfigError: the folder holds a run or another sweep.
        CheckpointError: sweep.json is damaged, or of a newer version.
        OSError: the storage does not answer.
    """
    folder = new.folder
    if not folder.exists(SWEEP_FILE):
        if any(folder.exists(name) for name in (CONFIG_FILE, EVENTS_FILE)):
            raise ConfigError(f"{folder} is a run: give the sweep another --name.")
        return new
    try:
        content = json.loads(folder.read(SWEEP_FILE))
        trials = [Trial(**each) for each in content["trials"]]
        found = replace(new, trials=trials, metric=content["metric"], mode=content["mode"])
        old, now = dict(content["settings"]), json.loads(json.dumps(new.settings))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{folder}/{SWEEP_FILE} is damaged ({type(error).__name__}: {error})"
        raise CheckpointError(f"{what}: restore it, or use another --name.") from None
    changed = [name for name in {**now, **old} if old.get(name) != now.get(name)]
    if not changed:
        return found
    if all(trial.state == "waiting" for trial in trials):
        return new  # it could not start; nothing of it is lost
    lines = "\n  ".join(f"{name}: {old.get(name)!r} -> {now.get(name)!r}" for name in changed)
    raise ConfigError(
        f"{folder} contains a different sweep (then -> now):\n  {lines}\n"
        "Revert these changes to continue it, or give this one another --name."
    )


def trial_config(base: TrainConfig, trial: Trial) -> TrainConfig:
    """The config of a trial's run, in the folder of the sweep. Raises ConfigError: see
    `with_point`."""
    storage = below(base.storage, str(base.name))
    return replace(with_point(base, trial.values), name=trial.name, storage=storage)
