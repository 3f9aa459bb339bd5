"""The schedules of other trainers, as docs/reference/other-trainers.md translates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.scheduler import create_scheduler_v2
from torch import nn

from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (
            "--epochs 7 --schedule.name cosine --schedule.warmup-epochs 2 --schedule.final-lr 0.02",
            {
                **{"sched": "cosine", "num_epochs": 5, "warmup_epochs": 2, "warmup_prefix": True},
                **{"min_lr": 0.02 * 0.05, "warmup_lr": 0.05 / 15},  # the latter near 0
            },
        ),
        (
            "--epochs 6 --schedule.name step --schedule.warmup-epochs 0 --schedule.step-epochs 2 "
            "--schedule.gamma 0.3",
            {"sched": "step", "num_epochs": 6, "decay_epochs": 2, "decay_rate": 0.3},
        ),
    ],
)
def test_rates_equal_those_of_timm(flags: str, arguments: dict[str, Any]) -> None:
    """min-lr of timm is a learning rate, final-lr here is a fraction of it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.05)
    given: dict[str, Any] = {"step_on_epochs": False, "updates_per_epoch": 7, **arguments}
    scheduler, epochs = create_scheduler_v2(optimizer, **given)
    config = parse_fit(["--optim.lr", "0.05", *flags.split()]).config
    assert config.epochs == epochs
    for step in range(epochs * 7):
        scheduler.step_update(step)
        ours = learning_rate(config, step, 7)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
