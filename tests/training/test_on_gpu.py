"""Training on a GPU: opt in with ``-m gpu``. (tests/fakecuda runs it on an emulated one, too.)"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import bits

from raytrain_ddp import TrainConfig
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig, LogConfig, ScalingConfig
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.membership.connections import all_gather
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.runtime.world import World, broadcast, broadcast_tensor

pytestmark = pytest.mark.gpu


def config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Twelve steps on the digits, with an evaluation and a checkpoint after every fourth."""
    made = TrainConfig(
        name=name,
        storage=str(folder),
        epochs=3,
        batch_size=128,
        micro_batch=64,
        limit_train_batches=4,
        checkpoint=CheckpointConfig(every_s=0.0),
        log=LogConfig(every_steps=1, tensorboard=False),
        compute=ComputeConfig(precision="fp32", channels_last=False),  # `fit` would replace auto
        scaling=ScalingConfig(cpus_per_worker=1),  # on an emulated GPU, the bits depend on threads
    )
    return replace(made, **changes)


def trained(made: TrainConfig, device: str = "cuda:0") -> list[float]:
    """The losses of the steps."""
    task, events = load_task(made), list[Any]()
    world = World(0, 1, 0, torch.device(device), threads=1)
    take_part(Membership(world, events.append), made, lambda _: Build(made, world, task))
    return [event.loss for event in events if type(event).__name__ == "Train"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[float]]:
    """An undisturbed run and its losses."""
    made = config(tmp_path_factory.mktemp("whole"), "whole")
    return made, trained(made)


def test_a_repeated_run_has_the_same_bits(whole: tuple[TrainConfig, list[float]], tmp_path: Path):
    again = config(tmp_path, "again")
    assert trained(again) == whole[1]
    assert bits(again) == bits(whole[0])


def test_a_killed_and_resumed_run_ends_with_the_same_bits(
    whole: tuple[TrainConfig, list[float]], tmp_path: Path
):
    killed = config(tmp_path, "killed")
    recipe = tmp_path / "killed.toml"
    recipe.write_text(dumps(killed))
    command = [sys.executable, "-m", "raytrain_ddp.fit", str(recipe), "--local"]
    faults = {
        VARIABLE: "train.after_backward:kill@step=11",
        FOLDER_VARIABLE: str(tmp_path / "fired"),
    }
    environment = {**os.environ, **faults}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stdout + done.stderr
    # The losses of the steps after the checkpoint, the second if it was committed in time; the log
    # has the others.
    assert trained(killed) in (whole[1][4:], whole[1][8:])
    assert bits(killed) == bits(whole[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_and_a_repeated_run_has_the_same_bits(
    whole: tuple[TrainConfig, list[float]], tmp_path: Path, precision: str
):
    compute = ComputeConfig(precision=precision, channels_last=True)  # type: ignore[arg-type]
    runs = [config(tmp_path, name, compute=compute) for name in ("one", "two")]
    first, second = map(trained, runs)
    assert first == second
    assert bits(runs[0]) == bits(runs[1])
    assert first == pytest.approx(whole[1], rel=0.05)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[World]:
    """A group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield World(0, 1, 0, device, threads=1)
    dist.destroy_process_group()


def test_nccl_supports_all_collectives_of_a_run(nccl: World):
    """All kinds of collectives that a run uses on GPUs, with their dtypes."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        values = torch.arange(6, device=nccl.device).to(dtype)
        total, parts = values.clone(), torch.empty_like(values)
        dist.all_reduce(total)
        all_gather(parts, values)
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, [6], [6], async_op=True).wait()
        broadcast_tensor(total)
        for each in (total, parts, received):
            assert each.tolist() == values.tolist()
    assert broadcast({"text": 1}, nccl) == {"text": 1}
    flags = torch.ones(2)  # ranks agree on decisions on CPUs
    dist.all_reduce(flags)
    assert flags.tolist() == [1, 1]
