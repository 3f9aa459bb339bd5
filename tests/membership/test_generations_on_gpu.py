"""A worker on a GPU is killed and replaced, and the others keep their state: opt in with ``-m gpu``
(tests/fakecuda runs these tests on emulated GPUs, too)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generation_runs
import pytest
import torch
from generation_runs import Run, W
from logs import log_of
from tiny import TOTAL_STEPS, bits, tiny_config

from raytrain_ddp.config.sections import LogConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig

NCCL = "cpu:gloo,cuda:nccl"
NAN_ROW, NAN_STEP = 100, 16  # in the second epoch, that row is in this step
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def forks() -> Any:
    return generation_runs.forks()


@pytest.fixture(params=["cpu:gloo,cuda:gloo", NCCL], ids=["gloo", "nccl"], scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == NCCL and torch.cuda.device_count() < W:
        pytest.skip(f"NCCL wants a GPU for each of {W} ranks")
    return str(request.param)


def config(folder: Path, **changes: Any) -> TrainConfig:
    return tiny_config(folder, "run", **changes)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "exact"])
def undisturbed(
    forks: Any, backend: str, request: pytest.FixtureRequest, tmp_path_factory: Any
) -> TrainConfig:
    folder = tmp_path_factory.mktemp("undisturbed")
    made = config(folder, exact=request.param)
    notes = Run(forks, made, folder / "fired", "", backend=backend).wait()
    assert [note["step"] for note in notes] == [TOTAL_STEPS] * W
    return made


@pytest.mark.parametrize(
    ("points", "starts"),
    [
        ("train.before_step:kill@rank=1,step=7", [0, 6]),
        ("train.loss:kill@rank=2,step=7", [0, 6]),
        ("train.after_backward:kill@rank=1,step=14", [0, 13]),
        ("train.after_step:kill@rank=1,step=10", [0, 10]),
        ("train.after_step:kill@rank=0,step=10", [0, 10]),
        ("evaluate:kill@rank=1,step=20", [0, 20]),
        ("train.before_step:kill@rank=1,step=7;start.loaded:kill@rank=1,after=1", [0, 6, 6]),
    ],
)
def test_fault_49_a_killed_rank_is_replaced_and_survivors_repeat_no_step(
    forks: Any,
    backend: str,
    undisturbed: TrainConfig,
    tmp_path: Path,
    points: str,
    starts: list[int],
):
    made = config(tmp_path, exact=undisturbed.exact)
    run = Run(forks, made, tmp_path / "fired", points, backend=backend)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert bits(made) == bits(undisturbed)
    assert log_of(made) == log_of(undisturbed)
    on_main = [note["steps"] for note in notes if note["steps"]]
    survived = "rank=0" not in points
    assert on_main == [starts if survived else starts[1:]]


def test_fault_49_with_exact_survivors_do_not_wait_for_the_replacement(
    forks: Any, backend: str, tmp_path: Path
):
    whole, made = config(tmp_path / "whole", exact=True), config(tmp_path, exact=True)
    Run(forks, whole, tmp_path / "whole-fired", "", backend=backend).wait()
    points = "train.after_backward:kill@rank=2,step=3;train.after_step:kill@rank=1,step=5"
    run = Run(forks, made, tmp_path / "fired", points, 1, after_others=True, backend=backend)
    notes = run.wait()
    assert run.deaths == 2
    assert bits(made) == bits(whole)
    assert log_of(made) == log_of(whole)
    assert min(max((note["sizes"] for note in notes), key=len)) == 1


def test_survivors_do_not_continue_from_a_step_that_was_not_finite(
    forks: Any, backend: str, tmp_path: Path
):
    """The host does not know yet whether the step before the kill was applied."""
    changes = {
        "optim": OptimConfig(lr=0.05, nonfinite="skip"),
        "log": LogConfig(every_steps=10, tensorboard=False),
    }
    whole, made = (config(tmp_path / name, **changes) for name in ("whole", "killed"))
    Run(forks, whole, tmp_path / "fired-whole", "", backend=backend, nan_row=NAN_ROW).wait()
    points = f"train.after_backward:kill@rank=1,step={NAN_STEP + 1}"
    run = Run(forks, made, tmp_path / "fired", points, backend=backend, nan_row=NAN_ROW)
    notes = run.wait()
    assert run.deaths == 1
    assert [note["steps"] for note in notes if note["steps"]] == [[0, 10]]
    assert bits(made) == bits(whole)
    assert log_of(made) == log_of(whole)
    assert any(record.get("nonfinite") for record in log_of(made))
