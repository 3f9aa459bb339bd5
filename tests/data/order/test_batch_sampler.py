"""A batch sampler resumes at any step, on another number of workers, without reading on the way."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raytrain_ddp import BatchSampler
from raytrain_ddp.errors import ConfigError

ROWS, BATCH = 104, 10  # 11 steps, the last of 4 rows


def samplers(size: int) -> list[BatchSampler]:
    return [BatchSampler(ROWS, BATCH, rank=rank, world_size=size) for rank in range(size)]


def test_another_number_of_workers_goes_on_with_the_same_steps() -> None:
    data = TensorDataset(torch.arange(ROWS))
    whole = [sorted(rows) for rows in samplers(1)[0]]
    assert sorted(itertools.chain(*whole)) == [*range(ROWS)]
    assert whole != [sorted(rows) for rows in itertools.chain(BatchSampler(ROWS, BATCH, seed=1))]

    def used(each: BatchSampler, most: int) -> list[list[int]]:
        loader = DataLoader(data, batch_sampler=each, num_workers=0, prefetch_factor=None)
        return [x.tolist() for (x,) in itertools.islice(each.counted(loader), most)]

    first, then = samplers(3), samplers(2)
    assert [len(used(each, 99)) for each in samplers(3)] == [11] * 3
    before = [used(each, 4) for each in first]
    for each in then:
        each.load_state_dict(first[0].state_dict())
        assert len(each) == 7
    after = [used(each, 99) for each in then]
    steps = [*zip(*before, strict=True), *zip(*after, strict=True)]
    assert [sorted(itertools.chain(*step)) for step in steps] == whole
    assert [(each.epoch, each.step) for each in then] == [(1, 0)] * 2


def test_a_step_far_away_is_reached_at_once() -> None:
    sampler = BatchSampler(200_000_000, 256, rank=1, world_size=4)
    sampler.load_state_dict({**sampler.state_dict(), "step": 500_000})
    began = time.process_time()
    assert len(next(iter(sampler))) == 64
    assert time.process_time() - began < 1


def test_what_cannot_be_dealt_or_is_another_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=10"):
        BatchSampler(ROWS, BATCH, rank=0, world_size=5)
    with pytest.raises(ConfigError, match="seed"):
        samplers(1)[0].load_state_dict(BatchSampler(ROWS, BATCH, seed=1).state_dict())
