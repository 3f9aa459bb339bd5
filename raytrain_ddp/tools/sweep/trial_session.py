"""A trial: an ordinary run in this process, which reports evaluations and stops when asked to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import (
    CheckpointError,
    PreflightError,
    RaytrainError,
    RetriesExhausted,
    RunLockedError,
)
from raytrain_ddp.events import Eval, LogRecord, Note, Plan, Train
from raytrain_ddp.messages import Event
from raytrain_ddp.ray_backend.failure_causes import is_own_exit
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.tools.sweep.conductor import Ended, Evaluation
from raytrain_ddp.tools.sweep.sweep_state import STOP_NOTE, Evaluated
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Requests

# Of a driver that was killed, the trials may live on for a moment; a lease runs out after a minute.
_LOCKED_S, _AGAIN_S = 90.0, 1.0
_MOST_TEXT = 2000


@dataclass(frozen=True)
class StopOrder:
    """A request to stop with a checkpoint: as if by a signal, and why."""

    signal: int
    why: str


@dataclass(frozen=True)
class Ties:
    """What ties a trial to its sweep.

    Args:
        tell: takes each evaluation, and after a resumption the last one again, and answers whether
            to stop: then the next step is the last.
        asked: whether to stop, for other reasons; called once per step, so it must be cheap.
    """

    tell: Callable[[Evaluation], StopOrder | None]
    asked: Callable[[], StopOrder | None]


def train_trial(config: TrainConfig, ties: Ties) -> Ended:
    """Trains the run of a trial to its end, or until it is asked to stop; resumes it if it exists.

    A failure is returned, not raised.
    """
    began = time.monotonic()
    sessions: list[TrialSession] = []

    def session(*args: Any) -> TrialSession:
        sessions.append(TrialSession(ties, *args))
        return sessions[-1]

    while True:
        silent = Display(Console(quiet=True), live=False)  # the sweep has the terminal
        try:
            result = fit_locally(config, display=silent, session=session)
        except RunLockedError as error:
            if time.monotonic() - began < _LOCKED_S:
                time.sleep(_AGAIN_S)
                continue
            return Ended("lost", _text(error))
        except (PreflightError, CheckpointError, RetriesExhausted, OSError) as error:
            return Ended("lost", _text(error))
        except RaytrainError as error:
            return Ended("failed", _text(error))
        except Exception as error:  # of the user's code; its traceback is in the run's events
            return Ended("failed", f"{type(error).__name__}: {_text(error)}")
        except SystemExit as error:
            if not is_own_exit(error):
                raise
            return Ended("failed", f"the task called sys.exit({error.code!r})")
        break
    log = log_records(result.history)
    per_epoch = sessions[-1].steps_per_epoch if sessions else 0
    if not per_epoch:  # it was complete
        whole = (-(-r.step // (r.epoch + 1)) for r in log if isinstance(r, Train | Eval))
        per_epoch = max(whole, default=1)
    evaluations = evaluated(log, per_epoch)
    interrupted = result.status == "interrupted"
    return Ended("interrupted" if interrupted else "finished", evaluations=evaluations)


class TrialSession(LocalSession):
    """Reports each evaluation; stops by an order instead of by signals."""

    def __init__(self, ties: Ties, config: TrainConfig, world: World, best: Best, show: Any):
        super().__init__(config, world, best, show)
        self._ties, self._best_is, self.steps_per_epoch = ties, best, 0
        self._began = False

    def stop_on_signals(self) -> None: ...

    def tell(self, event: Event) -> None:
        if isinstance(event, Plan):
            self.steps_per_epoch = event.steps_per_epoch
        super().tell(event)

    def log(self, record: LogRecord) -> None:
        super().log(record)
        if isinstance(record, Eval):
            self._report()

    def requests(self) -> Requests:
        if not self._began:  # before the first step
            self._report()  # the process before may have died between an evaluation and its stop
        self._obey(self._ties.asked())
        return super().requests()

    def requests_in_evaluation(self) -> Requests:
        self._obey(self._ties.asked())
        return super().requests_in_evaluation()

    def _report(self) -> None:
        self._began = True
        values = evaluated(self.records(), self.steps_per_epoch)
        if values:
            best = self._best_is
            self._obey(self._ties.tell(Evaluation(best.monitor, best.goal, values)))

    def _obey(self, order: StopOrder | None) -> None:
        if order is not None and not self._signal:
            self._reported = True  # here, and with the reason
            self.tell(Note(STOP_NOTE + order.why))
            self._signal = order.signal


def evaluated(log: Iterable[Any], steps_per_epoch: int) -> tuple[Evaluated, ...]:
    """The evaluations in a run's log."""
    return tuple(
        Evaluated(r.step, r.step / steps_per_epoch, r.metrics.get(r.monitor, float("nan")))
        for r in log
        if isinstance(r, Eval)
    )


def _text(error: BaseException) -> str:
    return str(error)[:_MOST_TEXT] or type(error).__name__
