"""Ends a run before its last step: functions of its committed log, so not state of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from raytrain_ddp.config.field_types import value_of
from raytrain_ddp.config.sections import StopConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.data.order.epoch_order import Plan
from raytrain_ddp.events import Eval, LogRecord, Train
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.step_decisions import Cadence


class Patience:
    """Counts evaluations without improvement; the same after a restart, which sees the log again.

    Args:
        goal: "min" or "max", of the metric `monitor`.
    """

    def __init__(self, config: StopConfig, monitor: str, goal: str) -> None:
        self._config, self._monitor = config, monitor
        self._sign = 1 if goal == "max" else -1
        self._best = -math.inf
        self.count = 0

    def replay(self, log: Iterable[LogRecord]) -> bool:
        """Sees the evaluations of a log; whether the run is to end after the last one."""
        ends = [self.see(record.metrics) for record in log if isinstance(record, Eval)]
        return bool(ends) and ends[-1]

    def see(self, metrics: Mapping[str, float]) -> bool:
        """Sees an evaluation; whether the run is to end after it."""
        value = self._sign * metrics.get(self._monitor, math.nan)
        if value > self._best + self._config.min_delta:
            self._best, self.count = value, 0
        else:
            self.count += 1
        return 0 < self._config.patience <= self.count


def ends_of(
    config: TrainConfig, task: Task, plan: Plan, state: TrainState, log: Sequence[LogRecord]
) -> tuple[Cadence, Patience, float]:
    """What ends a run in this state with this log, and the seconds trained before. What it has from
    another run (`TrainState.branched_at`) does not count.

    If it has ended already, the cadence has no further step.
    """
    cadence = Cadence(config, plan.steps_per_epoch)
    patience = Patience(config.stop, task.monitor, task.goal)
    own = [record for record in log if record.step > state.branched_at]
    trained_s = seconds_trained(own)
    if patience.replay(own) or trained_s >= config.max_time_s:
        cadence.total_steps = min(state.step, cadence.total_steps)
    return cadence, patience, trained_s


_OF_EVALUATION = (
    *("stop.patience", "eval.every_steps", "eval.micro_batch"),
    *("limit_eval_batches", "data.eval_size", "data.eval_crop"),
)


def require_evaluation(config: TrainConfig, eval_data: Data | None) -> None:
    """Raises ConfigError if there is no evaluation, and a field that is about it."""
    for name in _OF_EVALUATION if eval_data is None else ():
        rule = "has no effect, as there is no evaluation set: remove it, or provide one"
        value = value_of(config, name)
        require(value == value_of(TrainConfig(), name), name, value, rule)


def last_metrics(log: Sequence[LogRecord], step: int) -> dict[str, float]:
    """Those of the evaluation after `step`; none if it was not evaluated."""
    found = [r.metrics for r in log if isinstance(r, Eval) and r.step == step]
    return dict(found[-1]) if found else {}


def seconds_trained(log: Sequence[LogRecord]) -> float:
    """The training time of all starts up to the last line of a log."""
    times = (r.seconds_total for r in reversed(log) if isinstance(r, Train))
    return next(filter(math.isfinite, times), 0.0)
