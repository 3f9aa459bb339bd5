"""A trial is an ordinary run, which reports its evaluations, and stops when it is asked to."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from raytrain_ddp.checkpoint.run_folder import read_log, run_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import ConfigError, DataError, DivergedError, RunLockedError
from raytrain_ddp.events import Eval, LogRecord, SweepStop
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.session import Requests

# Of a driver that was killed, the trials may live on for a moment; a lease runs out after a minute.
_LOCKED_S, _AGAIN_S = 90.0, 1.0

Tell = Callable[[dict[str, Any]], None]


def train_trial(
    config: TrainConfig, tell: Tell, stop: threading.Event, is_over: bool = False
) -> dict[str, Any]:
    """Trains the run of a trial to its end, or until `stop` is set; resumes it if it exists.

    Args:
        tell: takes each evaluation, those of earlier starts first: "epochs", "value", "metric",
            "mode" and a "score" that is larger for a better one. Once it has returned, `stop` says
            whether to go on.
        is_over: only report what is known.

    Returns:
        Its "state", "done" or "failed", with the "message" of an error that would come again.
        Other errors are raised.
    """
    began, known = time.monotonic(), _known(config)
    for evaluated in known:
        tell(evaluated)
    silent = Display(Console(quiet=True), live=False)  # the sweep has the terminal
    while not is_over and not stop.is_set():
        try:
            session = lambda *args: TrialSession(tell, stop, known, *args)  # noqa: E731
            fit_locally(config, display=silent, session=session)
            break
        except (ConfigError, DataError, DivergedError) as error:
            return {"state": "failed", "message": str(error), "done": True}
        except RunLockedError:
            if time.monotonic() - began > _LOCKED_S:
                raise
            time.sleep(_AGAIN_S)
    return {"state": "done", "done": True}


class TrialSession(LocalSession):
    """Reports each evaluation that is not `known`; stops by an event instead of by signals."""

    def __init__(self, tell: Tell, stop: threading.Event, known: Any, *args: Any) -> None:
        super().__init__(*args)
        self._to_sweep, self._stop, self._best_of = tell, stop, args[2]
        self._known = {each["step"] for each in known}

    def stop_on_signals(self) -> None: ...

    def log(self, record: LogRecord) -> None:
        super().log(record)
        if isinstance(record, Eval) and record.step not in self._known:
            self._to_sweep(_evaluated(record, self._best_of.goal))

    def requests(self) -> Requests:
        if self._stop.is_set() and not self._signal:
            self._reported, self._signal = True, signal.SIGTERM
            self.tell(SweepStop())
        return super().requests()

    def requests_in_evaluation(self) -> Requests:
        return self.requests()


def _known(config: TrainConfig) -> list[dict[str, Any]]:
    """The evaluations that a run has committed. Raises OSError."""
    evals = [record for record in read_log(run_storage(config)) if isinstance(record, Eval)]
    goal = load_task(config).goal if evals else ""
    return [_evaluated(record, goal) for record in evals]


def _evaluated(record: Eval, mode: str) -> dict[str, Any]:
    value = record.metrics.get(record.monitor, math.nan)
    score = value if mode == "max" else -value
    known = {"step": record.step, "epochs": record.epoch + 1, "metric": record.monitor}
    return {**known, "mode": mode, "value": value, "score": score}
