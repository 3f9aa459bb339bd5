"""Precision and layout set to auto, which a run keeps, and the micro-batch that fits a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import TinyTask, tiny_config
from torch import nn

from raytrain_ddp import fit_locally
from raytrain_ddp.config.recipe import (
    changed_fields,
    have_bf16,
    load,
    settled,
    settled_as_begun,
    to_dict,
)
from raytrain_ddp.config.sections import AugmentConfig, ComputeConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.rehearsal import largest_that_fits
from raytrain_ddp.training.runtime.world import World, set_up

CPU = World(0, 1, 0, torch.device("cpu"), threads=1)
GPU = replace(CPU, device=torch.device("cuda", 0))
FAST = ComputeConfig(precision="bf16", channels_last=True)
PLAIN = ComputeConfig(precision="fp32", channels_last=False)


def test_auto_is_bf16_and_channels_last_where_gpus_have_bf16_and_given_values_stay() -> None:
    assert settled(TrainConfig(), has_bf16=True).compute == FAST
    chosen = settled(TrainConfig(), has_bf16=False)
    assert chosen.compute == PLAIN
    assert settled(chosen, has_bf16=True) == chosen  # once
    half = settled(TrainConfig(compute=ComputeConfig(channels_last=False)), has_bf16=True)
    assert half.compute == ComputeConfig(precision="bf16", channels_last=False)


def test_a_cluster_has_bf16_if_each_of_its_gpus_is_known_to_have_it() -> None:
    nodes = {
        name: {"CPU": 8.0, "GPU": 1.0, f"accelerator_type:{name}": 1.0}
        for name in ("H100", "A100-80G", "A10G", "L40S", "GB200", "RTX-A6000", "T4", "V100", "P4")
    }
    nodes |= {name: {"GPU": 1.0, f"accelerator_type:{name}": 1.0} for name in ("GeForce-RTX-4090",)}
    old = {"T4", "V100", "P4"}
    assert {name for name, node in nodes.items() if not have_bf16([node, {"CPU": 4.0}])} == old
    assert not have_bf16([nodes["H100"], nodes["T4"]])
    assert not have_bf16([{"GPU": 1.0}])  # unknown
    assert not have_bf16([{"CPU": 4.0}])


def test_auto_is_no_change_for_a_run_with_what_auto_chooses() -> None:
    names = lambda then, now: [name for name, *_ in changed_fields(then, now)]  # noqa: E731
    both = ["compute.precision", "compute.channels_last"]
    assert names(to_dict(TrainConfig()), TrainConfig()) == []
    begun = to_dict(settled(TrainConfig(), has_bf16=True))
    assert names(begun, TrainConfig()) == []
    assert settled_as_begun(TrainConfig(), begun).compute == FAST
    assert names(begun, TrainConfig(compute=FAST)) == []
    assert names(begun, TrainConfig(compute=PLAIN)) == both
    half = to_dict(TrainConfig(compute=replace(FAST, channels_last=False)))
    assert names(half, TrainConfig()) == both  # given: auto chooses both or none
    old = {**begun, "settled": [*both, "micro_batch"]}  # of an earlier version
    assert names(old, TrainConfig()) == []


def test_a_run_keeps_what_was_chosen(tmp_path: Path) -> None:
    log = LogConfig(every_steps=1, tensorboard=False)
    auto = TrainConfig(name="a", storage=str(tmp_path), steps=2, log=log)
    half = replace(auto, name="b", compute=replace(PLAIN, precision="bf16"))
    assert fit_locally(auto).step == fit_locally(half).step == 2
    assert load(f"{tmp_path}/a/config.toml").compute == PLAIN
    unnamed = replace(auto, name=None)
    assert find_run(unnamed, "a").config.compute == PLAIN
    assert find_run(unnamed, "b").is_new  # its precision was given


# ------------------------------------------------------------------ sizes that fit


@given(
    st.integers(1, 200),
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
)
def test_sizes_to_try_are_exactly_the_micro_batches_that_are_accepted(
    batch: int, workers: int, repeats: int, spread: bool, mixup: float
) -> None:
    augment = AugmentConfig(repeats=repeats, spread_repeats=spread, mixup=mixup)
    accepted, config = [], None
    for size in range(batch, 0, -1):
        try:
            config = TrainConfig(batch_size=batch, micro_batch=size, augment=augment)
        except ConfigError:
            continue
        accepted += [size] * (config.slots >= workers)
    assert config is None or config.micro_batches(workers) == accepted


class Limited(TinyTask):
    """Runs out of memory in a pass of more than 20 samples; with ``state=4``, of more than 4 if the
    optimizer has a state; with ``fails=True``, raises another error."""

    passes: list[int] = []  # noqa: RUF012

    def __init__(self, config: TrainConfig, state: int = 20, fails: bool = False) -> None:
        super().__init__(config)
        self._state, self._fails = state, fails

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        samples = len(batch["y"])
        self.passes.append(samples)
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if samples > (self._state if self.passes[-2:] == [samples] * 2 else 20):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("options", "size", "tried"),
    [({}, 16, [96, 48, 32, 24, 16]), ({"state": 4}, 4, [96, 48, 32, 24, 16, 12, 8, 6, 4])],
)
def test_sizes_are_tried_from_large_to_small_with_two_updates(
    options: Mapping[str, Any], size: int, tried: list[int], tmp_path: Path
) -> None:
    Limited.passes = []
    limited = tiny_config(tmp_path, "limited", task=Limited, task_options=options, batch_size=96)
    assert largest_that_fits(limited, CPU, limited.micro_batches(1)) == size
    assert list(dict.fromkeys(Limited.passes)) == tried
    assert Limited.passes[-2:] == [size, size]
    assert largest_that_fits(limited, CPU, [96, 48]) == 0
    fails = replace(limited, task_options={"fails": True})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        largest_that_fits(fails, CPU, [8])


# ------------------------------------------------------------------ TF32


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_set_on_gpus_only(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    try:
        compute = ComputeConfig(tf32=tf32, deterministic=False)
        set_up(CPU, compute)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
        set_up(GPU, compute)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
