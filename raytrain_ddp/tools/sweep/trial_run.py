"""A trial is an ordinary run, which reports its evaluations, and stops when it is told to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from raytrain_ddp.checkpoint.run_folder import read_log, run_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import ConfigError, DataError, DivergedError, RunLockedError
from raytrain_ddp.events import Eval, LogRecord, SweepStop
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.tools.sweep.space import Point
from raytrain_ddp.tools.sweep.trials import trial_config
from raytrain_ddp.training.local_session import LocalSession
from raytrain_ddp.training.session import Requests

# Of a driver that was killed, the trials may live on for a moment; a lease runs out after a minute.
_LOCKED_S = 90.0
_BEAT_S = 0.5
_WORST = -1e30  # a score that is finite: Tune computes percentiles

Result = dict[str, Any]
Report = Callable[[Result], None]


def train_trial(base: TrainConfig, name: str, values: Point, report: Report) -> Result:
    """Trains the run of a trial to its end; resumes it if it exists.

    Args:
        base: of the sweep.
        report: takes what `evaluated` returns, after each evaluation and at least twice a second;
            raises SystemExit to stop the run.

    Returns:
        The last one, whose "state" is "done" or "failed", with the "message" of an error that would
        come again.

    Raises:
        SystemExit: it was stopped, and has a checkpoint. Others: errors that may not come again.
    """
    until_s, silent = time.monotonic() + _LOCKED_S, Display(Console(quiet=True), live=False)
    try:
        config = trial_config(base, name, values)
        while True:
            try:
                end = fit_locally(config, display=silent, session=partial(TrialSession, report))
                break
            except RunLockedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(1)
        if end.status == "interrupted":
            raise SystemExit(0)
        known = evaluated(read_log(run_storage(config)), load_task(config).goal)
        return {**known, "state": "done"}
    except (ConfigError, DataError, DivergedError) as error:
        return {**evaluated([], ""), "state": "failed", "message": str(error)}


def evaluated(records: Sequence[LogRecord], goal: str) -> Result:
    """What a run has reached by its log: the epochs at its last evaluation, and the value of the
    best one, with a score that is larger for a better one."""
    evals = [record for record in records if isinstance(record, Eval)]
    if not evals:
        return {"state": "running", "epochs": 0, "score": _WORST}
    last, best = evals[-1], [each for each in evals if each.best]
    value = best[-1].metrics[last.monitor] if best else None
    score = _WORST if value is None else value if goal == "max" else -value
    known = {"state": "running", "epochs": last.epoch + 1, "score": score}
    return {**known, "value": value, "metric": last.monitor, "mode": goal}


class TrialSession(LocalSession):
    """Reports as `train_trial` says."""

    def __init__(self, report: Report, *args: Any) -> None:
        super().__init__(*args)
        self._report, self._goal, self._due_s = report, args[2].goal, 0.0

    def log(self, record: LogRecord) -> None:
        super().log(record)
        if isinstance(record, Eval):
            self._beat()

    def requests(self) -> Requests:
        if time.monotonic() > self._due_s:
            self._beat()
        return super().requests()

    def requests_in_evaluation(self) -> Requests:
        return self.requests()

    def _beat(self) -> None:
        try:
            if not self._signal:
                self._report(evaluated(self.records(), self._goal))
        except SystemExit:
            self._reported, self._signal = True, signal.SIGTERM
            self.tell(SweepStop())
        self._due_s = time.monotonic() + _BEAT_S
