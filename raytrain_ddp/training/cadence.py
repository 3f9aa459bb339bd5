"""What is due after which step: the one place that knows."""

from __future__ import annotations

from raytrain_ddp.config.train_config import TrainConfig


class Cadence:
    """Decides by the number of steps done; for saving by time, see checkpoint_interval.py."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int) -> None:
        self.total_steps = config.epochs * steps_per_epoch
        self._epoch = steps_per_epoch
        self._config = config

    def logs(self, step: int) -> bool:
        """Every `log.every_steps` steps, at the end of each epoch, and after the first step."""
        every = self._config.log.every_steps
        return step % every == 0 or step % self._epoch == 0 or step == 1

    def evaluates(self, step: int) -> bool:
        every = self._config.eval.every_epochs * self._epoch
        return step >= self.total_steps or (every > 0 and step % every == 0)

    def saves(self, step: int) -> bool:
        checkpoint = self._config.checkpoint
        every = (checkpoint.every_epochs * self._epoch, checkpoint.every_steps)
        return step == self.total_steps or any(n and step % n == 0 for n in every)
