"""compute.deterministic: an operation without a deterministic kernel is named at the start. A
nondeterministic run keeps every promise except the same bits.

On CPUs, `Tensor.put_` has no deterministic kernel; here it stands for such layers on GPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group
from tiny import (
    ROWS,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyNet,
    TinyTask,
    WorkerResult,
    plain,
    run_tiny,
    tiny_config,
)
from torch import Tensor, nn

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.run_folder import read_history, run_storage
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def restore_torch_switches() -> Iterator[None]:
    """torch's switches apply to the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def without_deterministic_kernel(x: Tensor) -> Tensor:
    copy = x.clone()
    return copy.put_(torch.tensor([0]), x.flatten()[:1])


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return without_deterministic_kernel(gradient)


class BadNet(TinyNet):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.apply_bad = without_deterministic_kernel if where == "forward" else Backward.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_bad(super().forward(x))  # type: ignore[no-any-return,operator]


class BadTask(TinyTask):
    def __init__(self, config: TrainConfig, where: str) -> None:
        super().__init__(config)
        self.where = where

    def model(self) -> nn.Module:
        self.made = BadNet(self.where)
        return self.made


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_operation_without_a_deterministic_kernel_is_named_before_the_first_step(
    where: str, tmp_path: Path
):
    config = tiny_config(tmp_path, "bad", task=BadTask, task_options={"where": where})
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ConfigError, match=r"kernel for put_\. .*--compute.no-deterministic"):
        fit_locally(config)
    assert torch.are_deterministic_algorithms_enabled() == before
    compute = ComputeConfig(deterministic=False)
    allowed = replace(config, name="good", steps=2, compute=compute)
    assert fit_locally(allowed).step == 2


# ------------------------------------------------------------------ nondeterministic runs


def run_nondeterministic(
    rank: int, size: int, config: Mapping[str, Any], die_at: int = 0
) -> WorkerResult:
    """With torch.compile's tracing but without compiled kernels: compiling takes a minute."""
    own = nn.Module.compile
    nn.Module.compile = partialmethod(own, backend="eager")  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)  # of Python 3.13.0
    try:
        return run_tiny(rank, size, config, None, 0, die_at)
    finally:
        nn.Module.compile = own  # type: ignore[method-assign]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=SLOW)])
def test_a_nondeterministic_run_keeps_every_promise_except_the_same_bits(
    compiles: bool, workers: Group, tmp_path: Path
):
    """Killed between checkpoints and resumed: each sample is used once, and no step is repeated."""
    config = tiny_config(
        tmp_path,
        "fast",
        compute=ComputeConfig(deterministic=False, compile=compiles),
        checkpoint=CheckpointConfig(every_steps=4, every_s=0.0),
    )
    died = workers.outcomes(3, run_nondeterministic, plain(config), 7)
    assert died[-1] == Died(9)
    ran = workers(3, run_nondeterministic, plain(config))
    assert (ran[0].start_step, ran[0].outcome.step) == (4, TOTAL_STEPS)
    assert len({each.digest for each in ran}) == 1  # the replicas are equal
    for epoch in range(1, TOTAL_STEPS // STEPS_PER_EPOCH):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        rows = [row for each in ran for step, rows in each.seen if step in steps for row in rows]
        assert sorted(set(rows)) == list(range(ROWS))
    log = read_history(run_storage(config))
    assert [r["step"] for r in log if r["kind"] == "train"] == [*range(1, TOTAL_STEPS + 1)]
    assert [r["step"] for r in log if r["kind"] == "eval"] == [10, 20, 30]
