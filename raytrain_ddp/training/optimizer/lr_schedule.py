"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of

_MAX_CHECKED = 100_000  # steps whose factor is checked before the first one


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then the schedule."""
    schedule, peak = config.schedule, config.optim.lr
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    total = config.total_steps(steps_per_epoch)
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        periods = step / (schedule.step_epochs * steps_per_epoch)
        return peak * schedule.gamma ** int(periods + 1e-9)  # 55 / (1.1 * 50) is below 1
    done = min(1.0, (step - warmup) / max(1.0, total - warmup))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_lr + (1 - schedule.final_lr) * cosine)


class LearningRates:
    """The learning rate of each parameter group as a function of the step.

    A group's own peak is its `lr` times its `lr_scale`, if it has one. It follows the configured
    schedule, or the factor that the task's `schedule` gives.

    Args:
        optimizer: as it was made; its groups tell the peaks.
    """

    def __init__(
        self, task: Task, optimizer: Optimizer, config: TrainConfig, steps_per_epoch: int
    ) -> None:
        total_steps = config.total_steps(steps_per_epoch)
        self._config, self._steps_per_epoch = config, steps_per_epoch
        self._peaks = [float(g["lr"]) * g.get("lr_scale", 1.0) for g in optimizer.param_groups]
        self._schedule, self._given = task.schedule, dict[int, list[float]]()
        if self._schedule is not None:
            stride = max(1, total_steps // _MAX_CHECKED)
            checked = [*range(0, total_steps, stride), total_steps - 1]
            self._given = {step: self._factors(self._schedule, step) for step in checked}

    def __call__(self, step: int) -> list[float]:
        """The rates in `step` (from 0), one for each group.

        Raises:
            TaskError: the task's schedule gives something else than finite factors of 0 or more, or
                other factors than at the start.
        """
        if self._schedule is None:
            rate = learning_rate(self._config, step, self._steps_per_epoch)
            peak = self._config.optim.lr
            return [rate * (each / peak) for each in self._peaks]
        factors = self._factors(self._schedule, step)
        if factors != self._given.get(step, factors):
            raise TaskError(
                f"{place_of(self._schedule)}: returned {factors} for step {step}, but "
                f"{self._given[step]} at the start: it must depend only on the step, so that "
                "workers and resumed runs agree."
            )
        return [peak * factor for peak, factor in zip(self._peaks, factors, strict=True)]

    def _factors(self, schedule: Callable[[int], Any], step: int) -> list[float]:
        given = schedule(step)
        groups = len(self._peaks)
        factors = list(given) if isinstance(given, Sequence) else [given] * groups
        numbers = [float(each) for each in factors if isinstance(each, Real)]
        fit = all(math.isfinite(each) and each >= 0 for each in numbers)
        if not fit or len(numbers) != len(factors) or len(factors) != groups:
            what = f"returned {given!r} for step {step}"
            several = f", or one for each of the {groups} parameter groups" if groups > 1 else ""
            raise TaskError(
                f"{place_of(schedule)}: {what}; expected a finite factor of 0 or more{several}."
            )
        return numbers
