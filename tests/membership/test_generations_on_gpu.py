"""A worker on a GPU is killed and replaced, and the others keep their state: opt in with ``-m gpu``
(tests/fakecuda runs these tests on emulated GPUs, too)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from generation_runs import Run, W, disturbed, starts
from tiny import TOTAL_STEPS, log_of, tiny_config

from raytrain_ddp.config.sections import LogConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig

NCCL = "cpu:gloo,cuda:nccl"
NAN_ROW, NAN_STEP = 100, 16  # in the second epoch, that row is in this step
pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cpu:gloo,cuda:gloo", NCCL], ids=["gloo", "nccl"], scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == NCCL and torch.cuda.device_count() < W:
        pytest.skip(f"NCCL wants a GPU for each of {W} ranks")
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "exact"])
def undisturbed(
    backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TrainConfig:
    folder = tmp_path_factory.mktemp("undisturbed")
    made = tiny_config(folder, "run", exact=request.param)
    notes = Run(made, folder / "fired", "", backend=backend).wait()
    assert [note["step"] for note in notes] == [TOTAL_STEPS] * W
    return made


@pytest.mark.parametrize(
    ("points", "steps"),
    [
        ("train.before_step:kill@rank=1,step=7", [0, 6]),
        ("train.loss:kill@rank=2,step=7", [0, 6]),
        ("train.after_backward:kill@rank=1,step=14", [0, 13]),
        ("train.after_step:kill@rank=1,step=10", [0, 10]),
        ("train.after_step:kill@rank=0,step=10", [10]),
        ("evaluate:kill@rank=1,step=20", [0, 20]),
        ("train.before_step:kill@rank=1,step=7;start.loaded:kill@rank=1,after=1", [0, 6, 6]),
    ],
)
def test_fault_49_a_killed_rank_is_replaced_and_survivors_repeat_no_step(
    backend: str, undisturbed: TrainConfig, tmp_path: Path, points: str, steps: list[int]
):
    notes = disturbed(undisturbed, tmp_path, points, backend=backend)
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert starts(notes) == [steps]


def test_fault_49_with_exact_survivors_do_not_wait_for_the_replacement(
    backend: str, tmp_path: Path
):
    whole = tiny_config(tmp_path / "whole", "run", exact=True)
    Run(whole, tmp_path / "whole-fired", "", backend=backend).wait()
    points = "train.after_backward:kill@rank=2,step=3;train.after_step:kill@rank=1,step=5"
    notes = disturbed(whole, tmp_path, points, least=1, after_others=True, backend=backend)
    assert min(max((note["sizes"] for note in notes), key=len)) == 1


def test_survivors_do_not_continue_from_a_step_that_was_not_finite(backend: str, tmp_path: Path):
    """The host does not know yet whether the step before the kill was applied."""
    changes = {
        "optim": OptimConfig(lr=0.05, nonfinite="skip"),
        "log": LogConfig(every_steps=10, tensorboard=False),
    }
    whole = tiny_config(tmp_path / "whole", "run", **changes)
    Run(whole, tmp_path / "fired-whole", "", backend=backend, nan_row=NAN_ROW).wait()
    points = f"train.after_backward:kill@rank=1,step={NAN_STEP + 1}"
    notes = disturbed(whole, tmp_path / "killed", points, backend=backend, nan_row=NAN_ROW)
    assert starts(notes) == [[0, 10]]
    assert any(record.get("nonfinite") for record in log_of(whole))
