"""Fields set to auto: the values are chosen at the start of a run, and the run keeps them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import Group
from tiny import TinyTask, bits, newest, plain, tiny_config
from torch import nn

from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.config.automatic import settled_as, settled_without_gpu, unsettled
from raytrain_ddp.config.input_sections import AugmentConfig
from raytrain_ddp.config.recipe import changed_fields, from_dict, load, to_dict
from raytrain_ddp.config.sections import ComputeConfig, DdpConfig, EmaConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.driver.branching import branch_of
from raytrain_ddp.driver.config_flags import command, command_of_run
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.fit_driver import fit_locally, write_config
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.runtime.world import World, set_up
from raytrain_ddp.training.start import settling
from raytrain_ddp.training.start.settling import as_begun, largest_that_fits, settled

CPU = World(0, 1, 0, torch.device("cpu"), threads=1)
GPU = replace(CPU, device=torch.device("cuda", 0))
AUTO = TrainConfig(batch_size=96, micro_batch="auto")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, has_bf16=True)


def gpu(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """Replaces the functions with which `settling` asks torch about a GPU."""
    monkeypatch.setattr(settling, "_has_bf16", lambda device: has_bf16)
    monkeypatch.setattr(settling, "device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(settling, "_limited_memory", lambda *_: contextlib.nullcontext())


# ------------------------------------------------------------------ possible values


@given(
    st.integers(1, 200),
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
)
def test_auto_may_choose_exactly_the_micro_batches_that_are_accepted(
    batch: int, workers: int, repeats: int, spread: bool, mixup: float
):
    augment = AugmentConfig(repeats=repeats, spread_repeats=spread, mixup=mixup)

    def is_accepted(size: int, workers: int) -> bool:
        with contextlib.suppress(ConfigError):
            made = TrainConfig(batch_size=batch, micro_batch=size, augment=augment)
            return made.slots >= workers
        return False

    accepted = [size for size in range(batch, 0, -1) if is_accepted(size, workers)]
    if any(is_accepted(size, 1) for size in range(1, batch + 1)):
        auto = TrainConfig(batch_size=batch, micro_batch="auto", augment=augment)
        assert auto.micro_batches(workers) == accepted
    else:
        with pytest.raises(ConfigError, match="no size divides batch_size"):
            TrainConfig(batch_size=batch, micro_batch="auto", augment=augment)


# ------------------------------------------------------------------ on CPUs


def test_on_cpus_precision_is_fp32_without_a_note():
    chosen, notes = settled(TrainConfig(), CPU)
    assert chosen.compute == ComputeConfig(precision="fp32", channels_last=False)
    assert (chosen.micro_batch, notes, unsettled(chosen)) == (16, [], [])
    assert chosen.settled == ("compute.precision", "compute.channels_last")
    assert settled(chosen, GPU) == (chosen, [])  # once


@pytest.mark.parametrize(
    ("batch", "workers", "size"), [(96, 1, 32), (96, 8, 12), (7, 1, 7), (50, 1, 25), (67, 1, 1)]
)
def test_on_cpus_the_micro_batch_is_the_largest_valid_one_up_to_32(
    batch: int, workers: int, size: int
):
    config = replace(AUTO, batch_size=batch)
    chosen, notes = settled(config, replace(CPU, size=workers))
    assert chosen.micro_batch == size
    assert f"micro_batch = {size} (auto: on CPUs" in notes[0]
    assert f"batch norm sees {size} samples" in notes[0]
    elastic = replace(config, scaling=replace(config.scaling, num_workers=f"1:{workers}"))
    assert (
        settled(elastic, CPU)[0].micro_batch == size
    )  # for the largest possible number of workers


# ------------------------------------------------------------------ on GPUs


@pytest.mark.usefixtures("h100")
def test_a_gpu_with_bf16_uses_it_with_channels_last():
    chosen, notes = settled(TrainConfig(), GPU)
    assert chosen.compute == ComputeConfig(precision="bf16", channels_last=True)
    assert notes == ["On NVIDIA A100: bf16, channels_last images (auto)."]


def test_a_gpu_without_bf16_uses_fp32(monkeypatch: pytest.MonkeyPatch):
    gpu(monkeypatch, has_bf16=False)
    chosen, _ = settled(TrainConfig(), GPU)
    assert chosen.compute == ComputeConfig(precision="fp32", channels_last=False)


@pytest.mark.usefixtures("h100")
def test_given_values_are_kept():
    given = ComputeConfig(precision="fp16", channels_last=False)
    assert settled(TrainConfig(compute=given), GPU) == (TrainConfig(compute=given), [])
    half = TrainConfig(compute=ComputeConfig(channels_last=False))
    chosen, _ = settled(half, GPU)
    assert chosen.compute == ComputeConfig(precision="bf16", channels_last=False)
    assert chosen.settled == ("compute.precision",)


@pytest.mark.usefixtures("h100")
def test_the_largest_micro_batch_that_fits_is_chosen_and_reported(monkeypatch: pytest.MonkeyPatch):
    asked: list[Sequence[int]] = []

    def fits(config: TrainConfig, world: World, sizes: Sequence[int]) -> int:
        assert config.compute.precision == "bf16"  # memory use depends on it
        asked.append(sizes)
        return sizes[1] if len(sizes) > 1 else 0

    monkeypatch.setattr(settling, "largest_that_fits", fits)
    chosen, notes = settled(AUTO, GPU)
    assert (chosen.micro_batch, asked) == (48, [[96, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]])
    assert "micro_batch = 48 (auto: the largest that fits NVIDIA A100)" in notes[1]
    synced = replace(AUTO, ddp=DdpConfig(sync_batchnorm=True))
    with pytest.raises(ConfigError, match="not even 96 samples fit"):
        settled(synced, GPU)
    assert asked[1:] == [[96]]  # one slot per worker


def settled_on_different_gpus(rank: int, size: int) -> TrainConfig:
    settling._has_bf16 = lambda device: rank != 1  # type: ignore[assignment]
    settling.device_name = lambda device: "some GPU"  # type: ignore[attr-defined]
    settling._limited_memory = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    settling.largest_that_fits = lambda config, world, sizes: sizes[2 - rank]  # type: ignore
    return settled(AUTO, World(rank, size, rank, torch.device("cuda", rank), 1))[0]


def test_ranks_on_different_gpus_agree_on_values_that_all_support(workers: Group):
    try:
        chosen = workers(3, settled_on_different_gpus)
    finally:
        workers.end()  # they are patched
    assert chosen[0] == chosen[1] == chosen[2]
    assert (chosen[0].micro_batch, chosen[0].compute.precision) == (16, "fp32")


# ------------------------------------------------------------------ sizes that fit


class Limited(TinyTask):
    """Runs out of memory in a pass of more than 20 samples; `LIMITED_STEP`: of more than 4 if the
    optimizer has a state; `LIMITED_ERROR`: raises another error."""

    passes: list[int] = []  # noqa: RUF012

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        samples = len(batch["y"])
        type(self).passes.append(samples)
        if "LIMITED_ERROR" in os.environ:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        has_state = type(self).passes[-2:] == [samples] * 2
        if samples > 20 or (has_state and samples > 4 and "LIMITED_STEP" in os.environ):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(model, batch)


@pytest.fixture
def limited(tmp_path: Path) -> TrainConfig:
    Limited.passes = []
    return tiny_config(tmp_path, "limited", task=Limited, batch_size=96, micro_batch="auto")


@pytest.mark.parametrize(
    ("variable", "size", "tried"),
    [("", 16, [96, 48, 32, 24, 16]), ("LIMITED_STEP", 4, [96, 48, 32, 24, 16, 12, 8, 6, 4])],
)
def test_sizes_are_tried_from_large_to_small_with_two_updates(
    limited: TrainConfig,
    variable: str,
    size: int,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    if variable:
        monkeypatch.setenv(variable, "1")
    assert largest_that_fits(limited, CPU, limited.micro_batches(1)) == size
    assert list(dict.fromkeys(Limited.passes)) == tried
    assert Limited.passes[-2:] == [size, size]
    assert largest_that_fits(limited, CPU, [96, 48]) == 0


def test_an_error_other_than_out_of_memory_is_raised(
    limited: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LIMITED_ERROR", "1")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        largest_that_fits(limited, CPU, [8])


@pytest.mark.parametrize(
    ("changes", "workers", "copies"),
    [
        ({}, 1, 0),
        ({}, 4, 1),
        ({"ema": EmaConfig(decay=0.9)}, 4, 2),
        ({"ddp": DdpConfig(compression="bf16")}, 4, 2),
        ({"exact": True}, 4, 1 + 3),  # 6 slots per worker: a partial sum for each level of the tree
    ],
)
def test_the_trial_allocates_the_additional_memory_of_a_run(
    changes: Mapping[str, Any], workers: int, copies: int
):
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    config = TrainConfig(batch_size=96, micro_batch="auto", **changes)
    held = settling._kept(config, model, replace(CPU, size=workers), size=4)
    assert sum(tensor.numel() for tensor in held) == 100 * copies


# ------------------------------------------------------------------ a run keeps its values


def test_a_run_with_auto_equals_one_with_the_chosen_size_and_resumes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = LogConfig(every_steps=1, tensorboard=False)
    auto = TrainConfig(
        name="a", storage=str(tmp_path), batch_size=128, micro_batch="auto", steps=4, log=log
    )
    given = replace(auto, name="b", micro_batch=32)
    assert fit_locally(auto).step == fit_locally(given).step == 4
    assert bits(auto) == bits(given)
    for config in (load(f"{tmp_path}/a/config.toml"), from_dict(newest(auto).manifest.config)):
        assert (config.micro_batch, config.compute.precision) == (32, "fp32")
        assert config.settled == ("compute.precision", "compute.channels_last", "micro_batch")

    def chosen_again(*_: object) -> None:
        raise AssertionError("a resumed run keeps what it began with")

    monkeypatch.setattr(settling, "settled_without_gpu", chosen_again)
    assert fit_locally(replace(auto, steps=8)).step == 8
    assert newest(auto).manifest.config["micro_batch"] == 32
    unnamed = replace(auto, name=None, steps=8)
    assert find_run(unnamed, "a").config.micro_batch == 32
    assert find_run(unnamed, "b").is_new  # its micro_batch of 32 was given


def test_auto_is_no_change_for_a_run_that_was_auto():
    fp32 = TrainConfig(compute=ComputeConfig(precision="fp32", channels_last=False))
    names = lambda then, now: [name for name, *_ in changed_fields(then, now)]  # noqa: E731
    assert names(to_dict(TrainConfig()), TrainConfig()) == []  # killed before it was settled
    begun = to_dict(
        settled_as(TrainConfig(), {"compute.precision": "bf16", "compute.channels_last": True})
    )
    assert names(begun, TrainConfig()) == []
    given = ComputeConfig(precision="bf16", channels_last=True)
    assert names(begun, TrainConfig(compute=given)) == []
    assert names(to_dict(TrainConfig(compute=given)), TrainConfig()) == [
        "compute.precision",
        "compute.channels_last",
    ]
    assert names(begun, fp32) == ["compute.precision", "compute.channels_last"]
    assert names(to_dict(replace(AUTO, micro_batch=16)), AUTO) == ["micro_batch"]


def test_a_worker_that_starts_later_uses_the_values_chosen_by_the_first_ones(tmp_path: Path):
    config = replace(AUTO, name="later", storage=str(tmp_path))
    assert as_begun(config) == config  # there is no run
    write_config(config, run_storage(config))
    assert as_begun(config) == config  # no values are chosen yet
    write_config(settled(config, CPU)[0], run_storage(config))
    assert as_begun(config) == settled(config, CPU)[0]
    assert from_dict(plain(as_begun(config))) == as_begun(config)


def test_a_branch_keeps_the_values_of_its_origin(tmp_path: Path):
    origin = tiny_config(tmp_path, "origin", task="tiny:TinyTask", steps=2)
    fit_locally(origin)
    auto = replace(origin, name="branch", micro_batch="auto", steps=4)
    assert branch_of(find_run(auto), "origin").changes == []
    assert fit_locally(auto, resume_from="origin").step == 4
    assert newest(auto).manifest.config["micro_batch"] == 8


def test_a_dry_run_shows_the_expected_value_of_auto(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    config = replace(AUTO, storage=str(tmp_path))
    assert "96 = 3 slots x 32 images" in dry_run(config, local=True)
    monkeypatch.setattr(
        "raytrain_ddp.driver.dry_run.local_resources", lambda: {"CPU": 64.0, "GPU": 8.0}
    )
    text = dry_run(config)
    assert "96 = 8 slots x 12 images, or what fits in a GPU's memory (auto)" in text
    assert 'micro_batch = "auto"' in text


# ------------------------------------------------------------------ TF32


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_set_on_gpus_only(tf32: bool, monkeypatch: pytest.MonkeyPatch):
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


def test_the_command_of_a_stored_config_has_only_fields_that_the_user_gave():
    typed = TrainConfig(name="x", micro_batch="auto", seed=3)
    data = replace(typed.data, classes=("cat", "dog"))
    stored = settled_without_gpu(replace(typed, data=data), 2)
    assert len(stored.settled) == 3
    assert command_of_run(stored) == command(typed)
    in_order = replace(stored, data=replace(data, classes=("dog", "cat")))
    assert command_of_run(in_order) == f"{command(typed)} --data.classes dog cat"
