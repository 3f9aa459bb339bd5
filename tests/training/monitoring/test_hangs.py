"""Rows 32 and 33: workers that hang, with three gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import Died, Group, Raised
from tiny import (
    ScriptedMembership,
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    kept_steps,
    plain,
    run_armed,
    run_tiny,
    tiny_config,
)

from raytrain_ddp.checkpoint.run_folder import HANGS, run_storage
from raytrain_ddp.config.sections import DdpConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, RetriesExhausted

BeforeStep = Callable[[int, Path, int], None]
SHORT_LIMIT = ScalingConfig(hang_s=2.0)
LOST_PEER = Died(RetriesExhausted.exit_status)


def hung_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    return tiny_config(folder, name, scaling=SHORT_LIMIT, **changes)


def run_alongside(
    rank: int, size: int, config: dict[str, Any], folder: str, then: BeforeStep
) -> tuple[WorkerResult, float]:
    """`then` is called on each rank before each step."""

    def prepare(membership: ScriptedMembership) -> None:
        membership.before_step = partial(then, rank, Path(folder))

    started = time.monotonic()
    return run_tiny(rank, size, config, prepare=prepare), time.monotonic() - started


def barrier_on_rank_1(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (1, 6):
        dist.barrier()


def in_backward_on_rank_1(
    at: int, then: Callable[[Any], None], rank: int, _: Path, step: int
) -> None:
    """Calls `then` where only the gradient of the first layer is missing."""
    if (rank, step) == (1, at):
        before = TinyTask.loss

        def loss(self: TinyTask, model: TinyNet, batch: Any) -> Any:
            TinyTask.loss = before  # type: ignore[method-assign]
            model.conv.weight.register_hook(then)
            return before(self, model, batch)

        TinyTask.loss = loss  # type: ignore[assignment,method-assign]


def stick(_: Any) -> None:
    time.sleep(60)


def slow_on_rank_1(rank: int, _: Path, step: int) -> None:
    time.sleep(0.12 if rank == 1 else 0.0)


def fail_on_rank_0(membership: ScriptedMembership) -> None:
    def fail(step: int) -> None:
        if (membership.world.rank, step) == (0, 13):
            raise DataError("a record of rank 0 is bad")

    membership.before_step = fail


def pause_all(rank: int, folder: Path, step: int) -> None:
    """Like a closed laptop lid or a frozen container."""
    if step == 8:
        folder.mkdir(exist_ok=True)
        (folder / f"pid-{rank}").write_text(f"{os.getpid()}\n")
        while len(list(folder.glob("pid-*"))) < 3:
            time.sleep(0.01)
        if rank == 0:
            wake = "sleep 3; kill -CONT $(cat pid-*)"
            subprocess.Popen(["sh", "-c", f"kill -STOP $(cat pid-*); {wake}"], cwd=folder)


def hang_report(config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """The folder with the stacks, and the content of hang.json."""
    (folder,) = (Path(run_storage(config).path) / HANGS).iterdir()
    return folder, json.loads((folder / "hang.json").read_text())


def test_fault_33_a_stopped_rank_is_named_and_killed_and_the_run_resumes_with_the_same_bits(
    workers: Group, tmp_path: Path
):
    whole, config = tiny_config(tmp_path, "whole"), hung_config(tmp_path, "hung")
    workers(3, run_tiny, plain(whole))
    at = "train.before_step:stop@rank=2,step=14"
    ends = workers.outcomes(3, run_armed, at, str(tmp_path / "fired"), plain(config))
    assert ends == [LOST_PEER, LOST_PEER, Died(-9)]
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([2], 14)
    assert "SIGSTOP" in hang["text"]
    for rank in (0, 1):
        assert "in train" in (folder / f"rank-{rank}.txt").read_text()
    workers(3, run_tiny, plain(config))
    assert bits(config) == bits(whole)


def test_fault_33_a_rank_that_holds_the_gil_is_reported_by_its_peers(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "hung")
    at = "train.after_backward:gil(60)@rank=0,step=5"
    ends = workers.outcomes(3, run_armed, at, str(tmp_path / "fired"), plain(config))
    assert ends == [Died(-9), LOST_PEER, LOST_PEER]
    _, hang = hang_report(config)
    assert hang["ranks"] == [0]
    assert "holds the GIL" in hang["text"]


def test_fault_33_a_rank_that_skips_a_collective_is_named_with_its_stack(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "hung")
    ends = workers.outcomes(3, run_alongside, plain(config), str(tmp_path), barrier_on_rank_1)
    assert ends == [LOST_PEER] * 3
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([1], 6)
    assert "barrier_on_rank_1" in (folder / "rank-1.txt").read_text()


def test_fault_33_a_rank_that_hangs_during_the_gradient_exchange_is_named(
    workers: Group, tmp_path: Path
):
    """At step 10, one of four ranks has no samples."""
    size, step = 4, 10
    config = hung_config(tmp_path, "hung", exact=True, ddp=DdpConfig(bucket_cap_mb=0.001))
    then = partial(in_backward_on_rank_1, step, stick)
    assert (
        workers.outcomes(size, run_alongside, plain(config), str(tmp_path), then)
        == [LOST_PEER] * size
    )
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([1], step)
    assert "gradient exchange" in hang["text"]
    assert "it is in compute (" in hang["text"]
    assert "in stick" in (folder / "rank-1.txt").read_text()


def test_fault_32_33_a_slow_rank_or_a_pause_of_all_ranks_is_not_a_hang(
    workers: Group, tmp_path: Path
):
    slow, paused = (hung_config(tmp_path, name, epochs=2) for name in ("slow", "paused"))
    (ran, took_s), *_ = workers(3, run_alongside, plain(slow), str(tmp_path), slow_on_rank_1)
    assert took_s > 0.1 * ran.outcome.step  # many times hang_s in total
    (ran, took_s), *_ = workers(3, run_alongside, plain(paused), str(tmp_path / "p"), pause_all)
    assert took_s > 2.9
    assert ran.outcome.step == ran.outcome.total_steps
    assert not (tmp_path / "slow" / HANGS).exists()
    assert not (tmp_path / "paused" / HANGS).exists()


def test_fault_33_slow_data_are_not_a_hang(workers: Group, tmp_path: Path):
    config = hung_config(tmp_path, "slow", epochs=2)
    at = "data.read:sleep(4)@rank=1,step=8"
    ran = workers(3, run_armed, at, str(tmp_path / "fired"), plain(config))
    assert ran[0].outcome.step == ran[0].outcome.total_steps
    assert not [*(tmp_path / "slow" / HANGS).rglob("hang.json")]


def test_fault_33_a_failed_rank_that_finishes_its_commit_is_not_a_hang(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "failed")
    given = str(tmp_path / "fired"), plain(config), None, 0, 0, fail_on_rank_0
    at = "checkpoint.manifest:sleep(5)@step=10"
    ends = workers.outcomes(3, run_armed, at, *given, wait_s=12)
    assert all(isinstance(end, Raised) for end in ends), ends
    assert ends[0].name == "DataError"
    assert kept_steps(config) == [10]
