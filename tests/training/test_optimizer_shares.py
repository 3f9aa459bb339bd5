"""ddp.shard_optimizer, with three gloo processes: the bits and the checkpoints are those of a run
without it; each rank has only its share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group, Raised
from test_several_optimizers import Watched, gan_config
from tiny import (
    TOTAL_STEPS,
    ScriptedSession,
    TinyTask,
    bits,
    newest,
    plain,
    run_tiny,
    tiny_config,
)
from torch import Tensor, nn

from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    DdpConfig,
    EmaConfig,
    ModelConfig,
    OptimConfig,
    ScalingConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.training import optimizer_shares
from raytrain_ddp.training.optimizer_shares import Shares, deal, parameters_of
from raytrain_ddp.training.several_optimizers import Optimizers
from raytrain_ddp.training.task_optimizer import optimizer_of
from raytrain_ddp.training.world import World

SHARED = DdpConfig(shard_optimizer=True)
OFTEN = CheckpointConfig(every_steps=4, every_s=0.0)
ADAMW = OptimConfig(name="adamw", lr=0.01, clip_norm=0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},  # two slots on one of three ranks: gradients are accumulated
    "exact-adamw-clip-ema": {"exact": True, "optim": ADAMW, "ema": EmaConfig(decay=0.9)},
    "fp16-channels-last": {
        "optim": ADAMW,
        "compute": ComputeConfig(precision="fp16", channels_last=True),
    },
    "powersgd": {"ddp": DdpConfig(compression="powersgd", powersgd_rank=1)},
}


def divided(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(
        config,
        name=f"{config.name}-shared",
        ddp=dataclasses.replace(config.ddp, shard_optimizer=True),
    )


def files(config: TrainConfig) -> dict[str, str]:
    """Hashes of all that the newest checkpoint has of tensors, and the optimizer's structure."""
    checkpoint = newest(config)
    rest = json.loads(checkpoint.read("state.json"))["optimizer"]
    named = checkpoint.manifest.files.items()
    hashes = {name: file.sha256 for name, file in named if name.endswith(".safetensors")}
    return hashes | {"rest": json.dumps(rest)}


class Whole:
    """Runs on three workers without shares; each variant is run once."""

    def __init__(self, workers: Group, folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._done: dict[str, TrainConfig] = {}

    def __call__(self, variant: str) -> TrainConfig:
        if variant not in self._done:
            config = tiny_config(self._folder, variant, checkpoint=OFTEN, **VARIANTS[variant])
            self._workers(3, run_tiny, plain(config))
            self._done[variant] = config
        return self._done[variant]


@pytest.fixture(scope="module")
def whole(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(workers, tmp_path_factory.mktemp("whole"))


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_checkpoints_are_those_of_a_run_without_shares(
    variant: str, whole: Whole, workers: Group
):
    reference = whole(variant)
    config = divided(reference)
    ran = workers(3, run_tiny, plain(config))
    assert {worker.outcome.step for worker in ran} == {TOTAL_STEPS}
    assert len({worker.digest for worker in ran}) == 1
    assert files(config) == files(reference)
