"""Decides what the cluster does next: draws points, starts trials, takes their results.

Called from the thread of Ray Tune and from that of the display. Every decision is in the file of
the sweep before anything acts on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.branching import begun_from, run_and_branch
from raytrain_ddp.driver.preflight import answered, check
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.sweep import policy
from raytrain_ddp.tools.sweep.optuna_search import suggested_point
from raytrain_ddp.tools.sweep.space import Point, with_point
from raytrain_ddp.tools.sweep.sweep_state import Evaluated, Status, Sweep, Trial, save
from raytrain_ddp.tools.sweep.trial_configs import known_points, trial_config

MOST_DEATHS = 3  # of a trial's process
_SAVE_EVERY_S = 1.0  # while trials are only evaluated


@dataclass(frozen=True)
class Evaluation:
    """What a trial's process says after an evaluation: all of its run so far."""

    monitor: str
    goal: str
    evaluations: Sequence[Evaluated]


def branched(config: TrainConfig, origin: str) -> None:
    """Begins a run from the newest checkpoint of another in the same storage; does nothing if it
    has begun there already.

    Raises:
        ConfigError, CheckpointError: as `branch_of`.
    """
    run, branch = run_and_branch(check(config), None, origin)
    if branch is not None:
        begun_from(run, branch)


def stopped_after(config: TrainConfig, step: int) -> bool:
    """Whether a run's newest checkpoint is of a later step. Raises OSError."""
    names = checkpoint_store(run_storage(config)).names()
    return bool(names) and names[0].step > step


@dataclass(frozen=True)
class Ended:
    """The end of a trial's process.

    Args:
        status: "interrupted" if it was asked to stop, after its checkpoint; "failed" if it would
            fail again; "lost" if another start may help.
        evaluations: all of the run, if known.
    """

    status: Literal["finished", "interrupted", "failed", "lost"]
    message: str = ""
    evaluations: Sequence[Evaluated] = ()


class Conductor:
    """The trials of a sweep, and what becomes of them; thread-safe.

    Args:
        base: the recipe with its flags and the resources of a trial; it may be replaced.
        folder: of the sweep.
        tell: receives a trial whenever one has ended or paused.
        branch: begins the run of a config from another trial, with the fields that differ.
        stopped: whether the run of a config has a checkpoint after a step.
    """

    def __init__(
        self,
        sweep: Sweep,
        base: TrainConfig,
        folder: Storage,
        tell: Callable[[Trial], None] = lambda trial: None,
        branch: Callable[[TrainConfig, str], None] = branched,
        stopped: Callable[[TrainConfig, int], bool] = stopped_after,
    ) -> None:
        self.sweep = sweep
        self.stopping = 0  # the number of a signal
        self.base, self.folder, self._tell, self._branch = base, folder, tell, branch
        self._stopped = stopped
        self._lock = threading.RLock()
        self._began: dict[int, float] = {}  # monotonic, of the running trials
        self._saved_at = 0.0

    def take_up(self) -> None:
        """Takes up a sweep where a kill may have left it, and draws the points that are missing."""
        answered(self.base, self.folder.mkdir)
        for trial in self.sweep.trials:
            trial.deaths = 0
        settings = self.sweep.settings
        have = settings.trials - self.sweep.missing // settings.seeds
        for point in known_points(settings, self.base.seed)[have:]:
            self._add(point)
        self.release()

    def next(self, parallel: int) -> Trial | None:
        """The trial to start now, which counts as running; None if there is none at the moment."""
        with self._lock:
            if self.stopping or self.sweep.count("running") >= parallel:
                return None
            stopped, clones = policy.promote(self.sweep, self.base.seed)
            for each in clones:
                self._begin(each)
            for each in stopped:
                self._tell(each)
            trial = next((t for t in self.sweep.trials if t.status == "waiting"), None)
            if trial is None and self.sweep.missing > 0:
                trial = self._suggested()
            if trial is None:
                self._save()  # of what `promote` has stopped
                return None
            trial.status, trial.starts = "running", trial.starts + 1
            self._began[trial.number] = time.monotonic()
            self._save()
            return trial

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to start, now or later."""
        with self._lock:
            if self.sweep.count("running"):
                return False
            left = self.sweep.count("waiting", "paused") or self.sweep.missing > 0
            return bool(self.stopping) or not left

    def config_of(self, trial: Trial) -> TrainConfig:
        """Of the run of a trial, which is in the folder of the sweep."""
        return trial_config(self.base, trial)

    def evaluated(self, number: int, evaluation: Evaluation) -> str:
        """Takes an evaluation, or a known one again; why the trial is to stop, or ""."""
        with self._lock:
            trial = self.sweep.trials[number]
            self.sweep.monitor = evaluation.monitor
            self.sweep.goal = "min" if evaluation.goal == "min" else "max"
            known = [each.step for each in trial.evaluations[-1:]]
            trial.evaluations = [*evaluation.evaluations]
            # One that is reported again, after a resumption, matters only to a pause.
            if trial.until or known != [evaluation.evaluations[-1].step]:
                trial.message = trial.message or policy.stop_reason(self.sweep, trial)
            if trial.message or time.monotonic() - self._saved_at > _SAVE_EVERY_S:
                self._save()
            return trial.message

    def ended(self, number: int, end: Ended) -> None:
        """Takes the end of a trial's process: as it says, or of one that disappeared."""
        with self._lock:
            trial = self.sweep.trials[number]
            if trial.status != "running":
                return  # Ray Tune says it again
            since = self._began.pop(number, time.monotonic())
            trial.seconds += time.monotonic() - since
            if end.evaluations:
                trial.evaluations = [*end.evaluations]
            match end.status:
                case "finished":
                    trial.status, trial.message = "finished", ""
                case "failed":
                    trial.status, trial.message = "failed", end.message
                case "interrupted":
                    trial.status = _left(trial)
                case "lost":
                    trial.deaths += not self.stopping
                    self._disappeared(trial)
                    if trial.deaths >= MOST_DEATHS:
                        trial.status = "failed"
                        trial.message = f"lost {trial.deaths} times: {end.message}"
            self._save()
            self._tell(trial)

    def release(self) -> None:
        """Trials whose processes were ended without a word wait for their next start."""
        with self._lock:
            for trial in self.sweep.trials:
                if trial.status == "running":
                    self._disappeared(trial)
            self._save()

    def left_s(self, parallel: int) -> float | None:
        """Seconds until all is done, from the mean of the trials so far; None before the first."""
        with self._lock:
            done = [t.seconds for t in self.sweep.trials if t.status in ("finished", "stopped")]
            if not done:
                return None
            mean, now = sum(done) / len(done), time.monotonic()
            began = [now - since for since in self._began.values()]
            left = sum(max(0.0, mean - spent) for spent in began)
            waiting = self.sweep.missing + self.sweep.count("waiting", "paused")
            return (left + waiting * mean) / max(1, parallel)

    def _disappeared(self, trial: Trial) -> None:
        """Of a trial whose process is gone: if it was to pause, it has if a checkpoint came after
        that evaluation. If none did, it does so at its next start: others start from that state."""
        trial.status = _left(trial)
        if trial.status == "paused":
            config, step = self.config_of(trial), trial.evaluations[-1].step
            if not answered(self.base, lambda: self._stopped(config, step)):
                trial.status, trial.message = "waiting", ""

    def _suggested(self) -> Trial | None:
        """The first trial of the next point that the config accepts."""
        while self.sweep.missing > 0:
            number = len(self.sweep.trials) // self.sweep.settings.seeds
            point = suggested_point(self.sweep, self.base.seed, number)
            trials = self._add(point)
            try:
                with_point(self.base, point)
                return trials[0]
            except ConfigError as error:
                for trial in trials:
                    trial.status, trial.message = "failed", f"refused: {error}"
                    self._tell(trial)
        return None

    def _begin(self, clone: Trial) -> None:
        """Adds a trial that starts from another's newest checkpoint, which is copied now, before
        the other continues."""
        origin = next(each for each in self.sweep.trials if each.name == clone.origin)
        try:
            config = self.config_of(clone)
        except ConfigError:  # its values do not go together
            clone.point = origin.point
            config = self.config_of(clone)
        self._branch(config, clone.origin)
        self.sweep.trials.append(clone)

    def _add(self, point: Point) -> list[Trial]:
        settings, made = self.sweep.settings, []
        number = len(self.sweep.trials) // settings.seeds
        for seed in range(self.base.seed, self.base.seed + settings.seeds):
            name = f"trial-{number:04}" + (f"-seed-{seed}" if settings.seeds > 1 else "")
            trial = Trial(len(self.sweep.trials), name, point, seed)
            policy.begin(settings, trial)
            self.sweep.trials.append(trial)
            made.append(trial)
        return made

    def _save(self) -> None:
        answered(self.base, lambda: save(self.sweep, self.folder))
        self._saved_at = time.monotonic()


def _left(trial: Trial) -> Status:
    """What a trial becomes whose process has ended: as the scheduler said, or as before."""
    if not trial.message:
        return "waiting"
    return "paused" if trial.until else "stopped"
