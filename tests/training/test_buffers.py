"""Buffers of a model do not depend on the number of workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import TinyNet, TinyTask, bits, plain, run_tiny, tiny_config, weights
from torch import nn

from raytrain_ddp.config.sections import EmaConfig
from raytrain_ddp.data.order import items_of_rank
from raytrain_ddp.training.gradients.buffer_sync import BoolBuffers, SlotBuffers
from raytrain_ddp.training.runtime.world import World


class Buffers(nn.Module):
    def __init__(self, constant: torch.Tensor) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("constant", constant)


def step_buffers(rank: int, size: int, constant: torch.Tensor) -> list[list[Any]]:
    """Three steps of four slots with 8, 8, 5 and 0 samples, divided among the workers."""
    model = Buffers(constant)
    buffers = SlotBuffers(model, World(rank, size, rank, torch.device("cpu"), 1))
    samples = (8, 8, 5, 0)
    for step in range(3):
        buffers.begin()
        for slot in items_of_rank(4, size, rank):
            buffers.rewind()
            if samples[slot]:
                generator = torch.Generator().manual_seed(100 * step + slot)
                model.norm(torch.randn(samples[slot], 3, generator=generator))
            buffers.add(slot, samples[slot] / sum(samples), torch.zeros(()))
        refused = ~buffers.agree()[1].isfinite()
        buffers.finish(refused)
    norm = model.norm
    statistics = norm.running_mean.tolist() + norm.running_var.tolist()
    return [statistics, norm.num_batches_tracked.tolist(), model.constant.tolist()]


def test_buffers_do_not_depend_on_the_number_of_workers(workers: Group):
    constant = torch.tensor([0.1, 1e-30, 3e38])
    (alone,) = workers(1, step_buffers, constant)
    assert alone[1:] == [3, constant.tolist()]  # one batch per step; constants do not drift
    for size in (2, 3, 4):
        results = workers(size, step_buffers, constant)
        assert all(result == results[0] for result in results)  # all ranks are equal, bit for bit
        assert results[0][0] == pytest.approx(alone[0], rel=1e-6)
        assert results[0][1:] == alone[1:]


def test_constant_buffers_of_any_kind_do_not_change(workers: Group):
    for constant in (
        torch.full((2, 2), -math.inf).triu(1),  # the mask of a transformer
        torch.tensor([True, False]),
        torch.tensor([1j, 1 + 1j]),  # rotary embeddings
        torch.tensor([0.5, 3.0], dtype=torch.bfloat16),
        torch.tensor([2**53 + 1, -7]),
        torch.empty(0),
    ):
        for result in workers(3, step_buffers, constant):
            assert result[2] == constant.tolist()


class Observed(TinyNet):
    """An observer, as in quantization-aware training: the range of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("unused", torch.tensor([math.inf, -math.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.low = torch.minimum(self.low, x.detach().min())
        return super().forward(x)


class Observing(TinyTask):
    def model(self) -> nn.Module:
        self.made = Observed()
        return self.made


def test_an_observed_range_that_starts_at_inf_is_resumed_with_the_same_bits(tmp_path: Path):
    whole, stopped = (
        tiny_config(tmp_path, name, epochs=1, ema=EmaConfig(decay=0.9))
        for name in ("whole", "stopped")
    )
    for config, stop in ((whole, 0), (stopped, 4), (stopped, 0)):
        run_tiny(0, 1, plain(config), None, stop, kind=Observing)
    assert bits(stopped) == bits(whole)
    assert -5 < weights(whole)["low"] < -1
    assert weights(whole)["unused"].tolist() == [math.inf, -math.inf]


class FlagModel(nn.Module):
    """Bool buffers: one that a pass modifies, one that a pass replaces, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())

    def forward(self, number: int) -> None:
        self.seen[number % 6] = True
        if number % 2:
            self.odd = torch.tensor([number % 4 == 1, number % 4 == 3]) | self.odd


def step_flags(rank: int, size: int) -> list[list[bool]]:
    """The buffers after each of three steps."""
    model = FlagModel()
    before = BoolBuffers(model)
    model(1)
    changing = before.changed()
    assert [place.name for place in changing] == ["seen", "odd"]
    model.seen.fill_(False)
    model.odd.fill_(False)
    buffers = SlotBuffers(model, World(rank, size, rank, torch.device("cpu"), 1), changing=changing)
    found = []
    for step in range(3):
        buffers.begin()
        for slot in items_of_rank(4, size, rank):
            buffers.rewind()
            if slot:  # slot 0 has no samples
                model(10 * step + slot)
            buffers.add(slot, slot / 6, torch.zeros(()))
        total = buffers.agree()[1]
        buffers.finish(~total.isfinite() | (step == 1))  # the second step is refused
        found.append(model.seen.tolist() + model.odd.tolist())
    assert model.mask.sum() == 10
    return found


def test_bool_buffers_do_not_depend_on_the_number_of_workers(workers: Group):
    seen = [1, 2, 3], [1, 2, 3], [1, 2, 3, 20 % 6 + 1, 20 % 6 + 2, 23 % 6]
    expected = [[n in step for n in range(6)] + [True, True] for step in seen]
    for size in (1, 3, 4):
        for found in workers(size, step_flags):
            assert found == expected


def test_a_counter_is_not_rounded_down():
    """Ten slots of a tenth: their sum is below 1."""
    model = nn.BatchNorm1d(3)
    buffers = SlotBuffers(model, World(0, 1, 0, torch.device("cpu"), 1))
    buffers.begin()
    for slot in range(10):
        buffers.rewind()
        model(torch.randn(4, 3))
        buffers.add(slot, 0.1, torch.zeros(()))
    buffers.agree()
    buffers.finish(torch.tensor(False))
    assert model.num_batches_tracked == 1
