"""Short gradients, with three gloo processes: what they save, and that they cost no promise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Died, Group, Raised
from tiny import (
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyTask,
    ScriptedSession,
    bits,
    newest,
    plain,
    run_tiny,
    tiny_config,
    weights,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.checkpoint.layout import read_history, run_storage
from raytrain_ddp.checkpoint.snapshot import decode_tensors
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.recipe import from_dict
from raytrain_ddp.sections import CheckpointConfig, ComputeConfig, DdpConfig, OptimConfig
from raytrain_ddp.training.compression import PowerSgd, compress
from raytrain_ddp.training.prepare import prepare
from raytrain_ddp.training.world import World

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"ddp": DdpConfig(compression="bf16")},
    "fp16": {"ddp": DdpConfig(compression="fp16")},
    "powersgd": {"ddp": DdpConfig(compression="powersgd", powersgd_rank=1)},
    "powersgd-adamw-clip-fp16": {
        "ddp": DdpConfig(compression="powersgd", powersgd_rank=2, gradient_as_bucket_view=False),
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="fp16", channels_last=True),
    },
}
SAME_BITS = ["none", "bf16", "fp16", "powersgd", "powersgd-adamw-clip-fp16"]


def losses_of(config: TrainConfig) -> list[float]:
    history = read_history(run_storage(config))
    return [record["loss"] for record in history if record["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """way -> (config, what the workers saw) of uninterrupted runs."""
    folder = tmp_path_factory.mktemp("whole")
    configs = {way: tiny_config(folder, way, **changes) for way, changes in WAYS.items()}
    return {way: (config, workers(3, run_tiny, plain(config))) for way, config in configs.items()}


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_end_with_the_same_weights_to_the_last_bit(way: str, whole: Mapping[str, Any]):
    config, ran = whole[way]
    assert {worker.outcome.step for worker in ran} == {TOTAL_STEPS}
    assert len({worker.digest for worker in ran}) == 1
    losses = losses_of(config)
    assert len(losses) == TOTAL_STEPS
    print(way, losses[0], losses[-1])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("way", SAME_BITS)
def test_a_stopped_and_a_killed_run_end_with_the_bits_of_the_whole_run(
    way: str, whole: Mapping[str, Any], workers: Group, tmp_path: Path
):
    """Promise 3, for PowerSGD, too: each worker's residual is part of the checkpoint."""
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, "broken", **{**WAYS[way], "checkpoint": often})
    workers(3, run_tiny, plain(config), None, 7)  # asked to stop
    *others, last = workers.outcomes(3, run_tiny, plain(config), None, 0, 18)
    assert last == Died(9)
    assert all(isinstance(other, Raised) for other in others)
    ran = workers(3, run_tiny, plain(config))
    assert 7 < ran[0].start_step < 18
    assert bits(config) == bits(whole[way][0])
    assert losses_of(config) == losses_of(whole[way][0])
