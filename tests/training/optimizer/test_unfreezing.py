"""Parameters that are frozen until an epoch (`model.unfreeze_epoch`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import (
    TinyNet,
    TinyTask,
    bits,
    decode_tensors,
    newest,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import nn

from raytrain_ddp import ModelConfig, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import CheckpointConfig, DdpConfig, ScheduleConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan
from raytrain_ddp.driver.preflight import try_model
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.training.optimizer.lr_schedule import build_optimizer
from raytrain_ddp.training.runtime.seeding import seed_all


class FrozenAtFirst(TinyTask):
    @property
    def frozen_at_first(self) -> tuple[str, ...]:  # the built-in task uses model.freeze
        return ("conv", "norm") if self._norm else ("conv",)


UNFREEZE = ModelConfig(freeze=("conv", "norm"), unfreeze_epoch=1)


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_unfreezes_has_the_same_bits_if_stopped_before_and_after_that(
    exact: bool, workers: Group, tmp_path: Path
):
    """In exact mode, on any number of workers. Frozen statistics do not change, either."""
    every = CheckpointConfig(every_epochs=1, every_s=0.0, keep_last=9)
    optim = OptimConfig(name="adamw", lr=0.01, clip_norm=1.0)
    made = {"model": UNFREEZE, "exact": exact, "optim": optim, "checkpoint": every}
    whole = tiny_config(tmp_path, "whole", **made)
    ran = workers(3, run_tiny, plain(whole), None, 0, 0, None, FrozenAtFirst)
    assert len({worker.digest for worker in ran}) == 1
    config = tiny_config(tmp_path, "stopped", **made)
    for number, stop in enumerate((7, 12, 0)):
        size = (1, 3, 2)[number] if exact else 3
        workers(size, run_tiny, plain(config), None, stop, 0, None, FrozenAtFirst)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")

    store = checkpoint_store(run_storage(whole))
    by_step = {name.step: store.open(name).read("model.safetensors") for name in store.names()}
    seed_all(whole.seed)
    began = TinyNet().state_dict()
    after = [decode_tensors(by_step[step]) for step in (10, 20)]
    for name, tensor in began.items():
        rests = name.startswith(("conv.", "norm."))
        assert torch.equal(tensor, after[0][name]) is rests
        assert not torch.equal(tensor, after[1][name])


def test_a_run_that_unfreezes_has_the_weights_of_a_plain_loop(workers: Group, tmp_path: Path):
    schedule = ScheduleConfig("constant", warmup_epochs=0.0)
    optim = OptimConfig(lr=0.05, weight_decay=0.01)
    config = tiny_config(tmp_path, "ours", model=UNFREEZE, schedule=schedule, optim=optim, epochs=2)
    options = {"rows": 75, "norm": False}
    workers(3, run_tiny, plain(config), options, 0, 0, None, FrozenAtFirst)
    seed_all(config.seed)
    model, plan = TinyNet(norm=False), Plan(75, config.slots, config.micro_batch)
    optimizer = build_optimizer(model, optim)
    arrays = {name: torch.from_numpy(array) for name, array in tiny_arrays(75, 0).items()}
    blocks = ArraySource(tiny_arrays(75, 0), rows_per_block=16).blocks
    for epoch in range(2):
        order = EpochOrder(blocks, "full", config.seed, epoch)
        model.conv.requires_grad_(epoch > 0)
        for step in range(plan.steps_per_epoch):
            spans = [order.read(*plan.span(step, slot)) for slot in range(config.slots)]
            batch = torch.cat([torch.from_numpy(span) for span in spans])
            model.zero_grad()
            nn.functional.cross_entropy(model(arrays["x"][batch]), arrays["y"][batch]).backward()
            optimizer.step()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(config)[key], tensor, rtol=1e-4, atol=1e-5)


def test_the_built_in_task_is_unfrozen_at_the_unfreeze_epoch(tmp_path: Path):
    config = TrainConfig(
        name="unfrozen",
        storage=str(tmp_path),
        epochs=2,
        limit_train_batches=2,
        model=ModelConfig(freeze=("backbone",), unfreeze_epoch=1),
        optim=OptimConfig(head_lr=0.2),
        checkpoint=CheckpointConfig(every_epochs=1, keep_last=9),
    )
    fit_locally(config)
    store = checkpoint_store(run_storage(config))
    by_step = {name.step: store.open(name).read("model.safetensors") for name in store.names()}
    seed_all(config.seed)
    began = DigitsCNN(10).state_dict()
    first, last = (decode_tensors(by_step[step]) for step in (2, 4))
    assert {n for n in began if not torch.equal(began[n], first[n])} == {"head.weight", "head.bias"}
    assert all(not torch.equal(began[name], last[name]) for name in began)
    log = (tmp_path / "unfrozen" / "events.jsonl").read_text()
    assert "All are trained from epoch 2 on." in log


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"model": ModelConfig(freeze=("head",), unfreeze_epoch=12)}, "must be below epochs = 12"),
        ({"model": ModelConfig(freeze=("x",), unfreeze_epoch=1)}, "'x' matches no parameter"),
        (
            {"model": UNFREEZE, "ddp": DdpConfig(static_graph=True)},
            "ddp.static_graph = True: cannot be used with model.unfreeze_epoch",
        ),
    ],
)
def test_an_unfreeze_epoch_without_effect_or_with_incompatible_settings_is_refused(
    changes: dict[str, Any], reported: str
):
    with pytest.raises(ConfigError, match=reported):
        try_model(TrainConfig(**changes), is_new=True)
