"""Learning rates, options of optimizers, label smoothing, and the best evaluation."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyNet

from raytrain_ddp.checkpoint.checkpoints import best_among
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointName, CheckpointStore
from raytrain_ddp.config.sections import OptimConfig, ScheduleConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.optimizer.task_optimizer import build_optimizer
from raytrain_ddp.training.state.train_state import TrainState


def rates(epochs: int, **schedule: Any) -> list[float]:
    """The learning rates of all steps, five per epoch, for a peak of 2."""
    config = TrainConfig(
        epochs=epochs, optim=OptimConfig(lr=2.0), schedule=ScheduleConfig(**schedule)
    )
    return [learning_rate(config, step, 5) for step in range(5 * epochs)]


def test_the_warm_up_is_linear_and_starts_above_0():
    for name in ("cosine", "step", "constant"):
        climb = rates(4, name=name, warmup_epochs=1.8)[:9]  # 9 steps, then the peak
        assert climb == pytest.approx([2.0 * k / 10 for k in range(1, 10)])


def test_constant_step_and_cosine_schedules_have_the_expected_values():
    assert rates(2, name="constant", warmup_epochs=0.0) == [2.0] * 10
    stairs = rates(4, name="step", warmup_epochs=0.0, step_epochs=1.4, gamma=0.5)
    assert stairs == [2.0] * 7 + [1.0] * 7 + [0.5] * 6
    for tenths in (7, 11, 33):  # exactly at the first step of a period
        schedule = ScheduleConfig(name="step", step_epochs=tenths / 10, warmup_epochs=0.0)
        config = TrainConfig(optim=OptimConfig(lr=1.0), schedule=schedule)
        for step in range(200):
            drops = int(step / (Fraction(tenths, 10) * 50))
            assert learning_rate(config, step, 50) == pytest.approx(schedule.gamma**drops)
    cosine = rates(4, name="cosine", warmup_epochs=0.0, final_lr=0.1)
    assert cosine == pytest.approx(
        [0.2 + 1.8 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
    )
    after_warm_up = rates(4, name="cosine", warmup_epochs=2.0)[10:]
    assert after_warm_up == sorted(after_warm_up, reverse=True)
    assert [after_warm_up[0], after_warm_up[5]] == pytest.approx([2.0, 1.0])
    longer_than_the_run = rates(1, name="cosine", warmup_epochs=3.0)
    assert longer_than_the_run == pytest.approx([2.0 * k / 16 for k in range(1, 6)])


def test_momentum_and_betas_are_passed_to_the_optimizer():
    sgd = build_optimizer(TinyNet(), OptimConfig(momentum=0.8, nesterov=False)).param_groups[0]
    assert (sgd["momentum"], sgd["nesterov"]) == (0.8, False)
    assert build_optimizer(TinyNet(), OptimConfig()).param_groups[0]["nesterov"]
    adamw = build_optimizer(TinyNet(), OptimConfig(name="adamw", betas=(0.8, 0.9))).param_groups[0]
    assert adamw["betas"] == (0.8, 0.9)


def test_between_equal_metrics_the_lower_loss_is_the_best_and_nan_never(tmp_path: Path):
    """In memory, and among stored checkpoints."""
    model = TinyNet()
    optimizer = build_optimizer(model, OptimConfig())
    evaluations = [(10, 0.5, 2.0), (20, 0.5, 1.0), (30, 0.5, 1.0), (40, 0.4, 0.1)]
    evaluations += [(50, 0.5, math.nan), (60, 0.5, 0.75), (70, 0.5, 0.8), (80, math.nan, 0.1)]
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    store, best = CheckpointStore(open_storage(str(tmp_path))), []
    for step, top1, loss in evaluations:
        metrics = {"top1": top1, "loss": loss}
        store.commit(Manifest(step, 0, 1, 1, {}, "x", metrics=metrics), {"a": b""})
        best.append(state.improve(step, metrics, "top1", "max"))
    assert best_among(store, "top1", "max") == CheckpointName(60, 1)
    assert best_among(store, "top1", "min") == CheckpointName(40, 1)
    assert best == [True, True, False, False, False, True, False, False]
    assert (state.best, state.best_step) == (0.5, 60)
