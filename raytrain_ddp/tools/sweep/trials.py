"""The trials of a sweep, and sweep.json, which says what is known of each.

It is rewritten whole after each change, so a sweep that was killed continues with it. What happened
inside a trial is in its run.
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
from raytrain_ddp.config.recipe import changed_fields, publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.tools.sweep.space import Point, with_point
from raytrain_ddp.uri import below

OVER = ("done", "stopped", "failed")
SEED = "seed"  # among the values of a trial, if each point is trained with several


@dataclass
class Trial:
    """A run of a sweep.

    Args:
        values: of the fields that vary.
        value: the best evaluation so far; None if there is none that is finite.
        state: waiting, running, or one of OVER; "stopped" by the scheduler.
        message: why it failed.
    """

    name: str
    values: Point
    value: float | None = None
    state: str = "waiting"
    message: str = ""

    @property
    def point(self) -> str:
        """The same for all seeds of a point."""
        return repr({**self.values, SEED: None})


@dataclass
class Sweep:
    """A sweep so far.

    Args:
        base: the recipe with its flags; `name` and `storage` are those of the sweep.
        folder: its runs are below.
        settings: the flags that decide its trials; with others, it is another sweep.
        total: of its trials, with those that are not known yet.
        metric, mode: of the task; known from the first evaluation on.
    """

    base: TrainConfig
    folder: Storage
    settings: Mapping[str, Any]
    total: int = 0
    trials: list[Trial] = field(default_factory=list)
    metric: str = ""
    mode: str = "max"

    def add(self, values: Point) -> Trial:
        self.trials.append(Trial(f"trial-{len(self.trials):04}", values))
        return self.trials[-1]

    def of(self, *states: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.state in states]

    def score(self, trial: Trial) -> float:
        """A number that is larger for a better trial, of those with a value."""
        return (trial.value or 0.0) * (1 if self.mode == "max" else -1)

    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first: by the mean of their points, of which those
        with a value for each seed come first; and of a point, by their own values."""
        known, scores = [t for t in self.trials if t.value is not None], defaultdict(list)
        for trial in known:
            scores[trial.point].append(self.score(trial))
        ranks = {point: (len(found), fmean(found)) for point, found in scores.items()}
        return sorted(known, key=lambda t: (ranks[t.point], self.score(t)), reverse=True)

    def save(self) -> None:
        """Raises OSError."""
        best = next((trial.name for trial in self.ranked()), None)
        known = {"version": 1, "metric": self.metric, "mode": self.mode, "best": best}
        known |= {"fields": [*self.trials[0].values], "trials": [*map(vars, self.trials)]}
        known |= {"settings": self.settings, "config": to_dict(publishable(self.base))}
        self.folder.write_atomic(SWEEP_FILE, json.dumps(known, indent=1).encode())

    def load(self) -> None:
        """Takes over what is known of this sweep, if it has begun.

        Raises:
            ConfigError: the folder holds a run or another sweep.
            CheckpointError: sweep.json is damaged, or of another version.
            OSError: the storage does not answer.
        """
        if self.folder.exists(CONFIG_FILE):
            raise ConfigError(f"{self.folder} is a run: give the sweep another --name.")
        if not self.folder.exists(SWEEP_FILE):
            return
        try:
            known = json.loads(self.folder.read(SWEEP_FILE))
            self.trials = [Trial(**each) for each in known["trials"]]
            self.metric, self.mode = known["metric"], known["mode"]
            changed = [name for name, _, _ in changed_fields(known["config"], self.base)]
            changed += [f"--{n}" for n, now in self.settings.items() if known["settings"][n] != now]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{self.folder}/{SWEEP_FILE} is damaged ({type(error).__name__}: {error})"
            raise CheckpointError(f"{what}: restore it, or use another --name.") from None
        if changed:
            raise ConfigError(
                f"{self.folder} is another sweep: {', '.join(changed)} differ. Revert them to "
                "continue it, or give this one another --name."
            )


def trial_config(base: TrainConfig, name: str, values: Point) -> TrainConfig:
    """The config of a trial's run, in the folder of the sweep. Raises ConfigError: see
    `with_point`."""
    config, storage = with_point(base, values), below(base.storage, str(base.name))
    return replace(config, name=name, storage=storage)
