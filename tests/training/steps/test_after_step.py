"""Logged scalars and `after_step` of a task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group, Raised
from tiny import (
    STEPS_PER_EPOCH,
    TinyNet,
    TinyTask,
    bits,
    log_of,
    newest,
    plain,
    run_tiny,
    tiny_config,
    weights,
)
from torch import nn

from raytrain_ddp.config.sections import CheckpointConfig, OptimConfig
from raytrain_ddp.data.loading.sources import Batch

STEPS = range(1, STEPS_PER_EPOCH + 1)


class LogsScalars(TinyTask):
    """Logs the mean of the row numbers, and a scalar that is NaN in one step."""

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        odd = math.nan if 5 in batch["row"].tolist() else 1.0
        return super().loss(model, batch), {"row": batch["row"].float().mean(), "odd": odd}


def test_scalars_are_means_over_the_samples_of_a_step_and_if_exact_equal_after_a_kill(
    workers: Group, tmp_path: Path
):
    """Also in a short last step with an empty slot. A nonfinite scalar does not end the run."""
    found, often = [], CheckpointConfig(every_steps=4, every_s=0.0)
    for size, die_at in ((1, 0), (3, 7)):
        made = {"epochs": 1, "exact": True, "checkpoint": often}
        config = tiny_config(tmp_path, f"on-{size}", **made)
        if die_at:
            workers.outcomes(size, run_tiny, plain(config), None, 0, die_at, None, LogsScalars)
        ran = workers(size, run_tiny, plain(config), None, 0, 0, None, LogsScalars)
        found.append([r["scalars"] for r in log_of(config) if r["kind"] == "train"])
        if not die_at:
            rows = [[r for at, seen in ran[0].seen if at == step for r in seen] for step in STEPS]
    assert str(found[0]) == str(found[1])
    means = [sum(each) / len(each) for each in rows]
    assert [scalars["row"] for scalars in found[0]] == pytest.approx(means, rel=1e-9)
    odd = [math.nan if 5 in each else 1.0 for each in rows]
    assert [scalars["odd"] for scalars in found[0]] == pytest.approx(odd, nan_ok=True)


class RenamesScalar(TinyTask):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        loss = super().loss(model, batch)
        assert self.membership is not None
        return loss, {"late" if self.membership.step == 3 else "early": 1.0}


class Adding(TinyTask):
    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 3:
            model.late = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("task", "named"), [(RenamesScalar, "early late"), (Adding, "late Adding.after_step")]
)
def test_scalars_and_parameters_that_change_end_all_ranks_with_an_error(
    task: type[TinyTask], named: str, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "ended", epochs=1)
    ended = workers.outcomes(3, run_tiny, plain(config), None, 0, 0, None, task)
    assert all(isinstance(each, Raised) and each.name == "TaskError" for each in ended)
    assert all(word in each.text for each in ended for word in named.split())


# ------------------------------------------------------------------ after_step


class Teacher(TinyTask):
    """Keeps an average of the weights in a frozen copy, clips a weight, and counts in a buffer."""

    def model(self) -> nn.Module:
        model = super().model()
        teacher = TinyNet()
        teacher.load_state_dict(model.state_dict())
        self.made.teacher = teacher.eval().requires_grad_(False)
        self.made.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        assert not torch.is_grad_enabled()
        assert self.membership is not None
        assert step == self.membership.step
        student = dict(model.named_parameters())
        for name, average in model.teacher.named_parameters():  # type: ignore[union-attr]
            average.lerp_(student[name], 0.1)
        student["head.bias"].clamp_(-0.01, 0.01)
        model.updates += 1  # type: ignore[operator]


@pytest.mark.parametrize("exact", [False, True])
def test_after_step_runs_after_each_applied_update_and_its_changes_are_in_the_checkpoint(
    exact: bool, workers: Group, tmp_path: Path
):
    """Once per step; never after a refused one. Runs are stopped, killed and, if exact, resized."""
    made = {
        "optim": OptimConfig(lr=0.05, nonfinite="skip"),
        "checkpoint": CheckpointConfig(every_steps=4, every_s=0.0),
        "exact": exact,
        "epochs": 2,
    }
    options = {"nan_row": 7}
    whole = tiny_config(tmp_path, "whole", **made)
    ran = workers(3, run_tiny, plain(whole), options, 0, 0, None, Teacher)
    assert len({worker.digest for worker in ran}) == 1
    found = weights(whole)
    assert int(found["updates"]) == 2 * (STEPS_PER_EPOCH - 1)
    assert found["head.bias"].abs().max() <= 0.0101
    assert not torch.equal(found["teacher.conv.weight"], found["conv.weight"])

    config = tiny_config(tmp_path, "disturbed", **made)
    workers(3, run_tiny, plain(config), options, 5, 0, None, Teacher)
    size = 2 if exact else 3
    *_, last = workers.outcomes(size, run_tiny, plain(config), options, 0, 18, None, Teacher)
    assert last == Died(9)
    workers(1 if exact else 3, run_tiny, plain(config), options, 0, 0, None, Teacher)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
