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

import pytest
import torch
import torch.distributed as dist
from processes import Died, Group
from tiny import Ran, ScriptedSession, bits, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.layout import HANGS, run_storage
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.failpoints import arm
from raytrain_ddp.sections import ScalingConfig

Meddle = Callable[[int, Path, int], None]
SOON = ScalingConfig(hang_s=1.0)
LOST = Died(RetriesExhausted.exit_status)


def hung_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    return tiny_config(folder, name, scaling=SOON, **changes)


def run_with(rank: int, size: int, config: dict[str, Any], text: str, folder: str) -> object:
    arm(text, folder)
    try:
        return run_tiny(rank, size, config)
    finally:
        arm("", "")


def run_alongside(
    rank: int, size: int, config: dict[str, Any], folder: str, then: Meddle
) -> tuple[Ran, float]:
    """`then` is called on each rank before each step."""

    def meddle(session: ScriptedSession) -> None:
        session.before_step = partial(then, rank, Path(folder))

    started = time.monotonic()
    return run_tiny(rank, size, config, meddle=meddle), time.monotonic() - started


def barrier_on_rank_1(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (1, 6):
        dist.barrier()


def receive_on_rank_1(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (1, 6):
        dist.recv(torch.zeros(1), 0)  # which sends nothing


def slow_on_rank_1(rank: int, _: Path, step: int) -> None:
    time.sleep(0.12 if rank == 1 else 0.0)


def pause_all(rank: int, folder: Path, step: int) -> None:
    """As a laptop's lid, or a frozen container."""
    if step == 8:
        folder.mkdir(exist_ok=True)
        (folder / f"pid-{rank}").write_text(f"{os.getpid()}\n")
        while len(list(folder.glob("pid-*"))) < 3:
            time.sleep(0.01)
        if rank == 0:
            wake = "sleep 4; kill -CONT $(cat pid-*)"
            subprocess.Popen(["sh", "-c", f"kill -STOP $(cat pid-*); {wake}"], cwd=folder)


def found(config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """Where the stacks are, and what the ranks found."""
    (folder,) = (Path(run_storage(config).path) / HANGS).iterdir()
    return folder, json.loads((folder / "hang.json").read_text())


def test_fault_33_a_stopped_rank_is_named_ended_and_the_run_goes_on_with_the_same_bits(
    workers: Group, tmp_path: Path
):
    whole, config = tiny_config(tmp_path, "whole"), hung_config(tmp_path, "hung")
    workers(3, run_tiny, plain(whole))
    at = "train.before_step:stop@rank=2,step=14"
    ends = workers.outcomes(3, run_with, plain(config), at, str(tmp_path / "fired"))
    assert ends == [LOST, LOST, Died(-9)]
    folder, hang = found(config)
    assert (hang["ranks"], hang["step"]) == ([2], 14)
    assert hang["text"].startswith("rank 2 (")
    assert "did not enter the all-reduce" in hang["text"]
    assert "its process is stopped (SIGSTOP" in hang["text"]
    for rank in (0, 1):
        assert "in train" in (folder / f"rank-{rank}.txt").read_text()
    workers(3, run_tiny, plain(config))
    assert bits(config) == bits(whole)


def test_fault_33_a_rank_that_holds_pythons_lock_is_told_by_its_peers_and_leaves_its_stack(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "hung")
    at = "train.after_backward:gil(60)@rank=0,step=5"
    ends = workers.outcomes(3, run_with, plain(config), at, str(tmp_path / "fired"))
    assert ends == [Died(-9), LOST, LOST]
    folder, hang = found(config)
    assert hang["ranks"] == [0]
    assert "Python's lock" in hang["text"]
    assert "in act" in (folder / "rank-0.txt").read_text()  # of failpoints.py


@pytest.mark.parametrize("then", [barrier_on_rank_1, receive_on_rank_1])
def test_fault_33_a_rank_that_skips_a_collective_is_named_with_what_it_does_instead(
    workers: Group, tmp_path: Path, then: Meddle
):
    config = hung_config(tmp_path, "hung")
    ends = workers.outcomes(3, run_alongside, plain(config), str(tmp_path), then)
    assert ends == [LOST] * 3
    folder, hang = found(config)
    assert (hang["ranks"], hang["step"]) == ([1], 6)
    assert "did not enter the all-reduce of step 6" in hang["text"]
    assert then.__name__ in (folder / "rank-1.txt").read_text()


def test_fault_32_33_a_slow_rank_and_a_pause_of_all_are_no_hangs(workers: Group, tmp_path: Path):
    slow, paused = (hung_config(tmp_path, name) for name in ("slow", "paused"))
    (ran, took_s), *_ = workers(3, run_alongside, plain(slow), str(tmp_path), slow_on_rank_1)
    assert took_s > 0.1 * ran.outcome.step  # many times hang_s in all
    (ran, took_s), *_ = workers(3, run_alongside, plain(paused), str(tmp_path / "p"), pause_all)
    assert took_s > 4
    assert ran.outcome.step == ran.outcome.total_steps
    assert not (tmp_path / "slow" / HANGS).exists()
    assert not (tmp_path / "paused" / HANGS).exists()
