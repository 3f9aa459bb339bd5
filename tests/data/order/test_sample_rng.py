"""Random numbers of a sample: the same wherever and with whatever other samples it is read."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from raytrain_ddp.data.order.sample_rng import Draws, hash64

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

ids = st.integers(0, 2**62)
rows = st.lists(ids, min_size=1, max_size=30).map(lambda r: np.array(r, dtype=np.int64))
few = settings(max_examples=40)


def of_many(seed: int = 0, epoch: int = 0, count: int = 2, stream: int = 0) -> np.ndarray:
    return Draws(seed, epoch, np.arange(20_000)).uniform(count, stream)  # (20000, count)


@few
@given(ids, ids, rows, st.integers(1, 9))
def test_a_rows_draws_do_not_depend_on_the_other_rows_or_their_order(
    seed: int, epoch: int, rows: np.ndarray, count: int
):
    together = Draws(seed, epoch, rows).uniform(count)
    alone = [Draws(seed, epoch, rows[i : i + 1]).uniform(count)[0] for i in range(len(rows))]
    assert together.tolist() == [draws.tolist() for draws in alone]
    assert Draws(seed, epoch, rows[::-1]).uniform(count).tolist() == together[::-1].tolist()
    more = Draws(seed, epoch, rows).uniform(count + 5)  # further numbers do not change these
    assert more[:, :count].tolist() == together.tolist()
    assert ((together >= 0) & (together < 1)).all()


def test_seed_epoch_row_column_and_stream_each_change_the_numbers():
    base = of_many()
    others = [of_many(seed=1), of_many(epoch=1), of_many(stream=1), np.roll(base, 1, axis=0)]
    others += [of_many(seed=2**40), base[:, ::-1]]
    for other in others:
        assert not (base == other).any()
        assert abs(np.corrcoef(base[:, 0], other[:, 0])[0, 1]) < 0.03
    assert not (of_many(seed=1, epoch=0) == of_many(seed=0, epoch=1)).any()
    assert not (of_many(epoch=1, stream=0) == of_many(epoch=0, stream=1)).any()


def test_draws_are_uniform_over_rows_and_over_columns():
    for draws in (of_many(count=1)[:, 0], Draws(3, 4, np.array([7])).uniform(20_000)[0]):
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]  # 1000 expected in each
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 50  # 19 degrees of freedom: exceeded once in 10,000 seeds
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.03
    draws = of_many(count=8)
    assert len(np.unique(draws)) == draws.size  # not one counter over rows and columns


def test_the_draws_are_frozen():
    """Changing these numbers changes the augmentation of every running run at its next restart."""
    draws = Draws(1, 2, np.array([0, 1, 10**12])).uniform(2).tolist()
    assert draws[0] == [0.4541290122588759, 0.6890179563624814]
    assert draws[1] == [0.7415706071211662, 0.4078410407215908]
    assert draws[2] == [0.24216033061238185, 0.531559214712107]
    assert Draws(1, 2, np.array([0])).uniform(1, stream=1)[0, 0] == 0.22611085363756545
    assert hash64(1, 2, 3) == 7702586659592502839


def test_hash64_depends_on_order_and_number_of_values_and_no_two_slots_share_a_seed():
    for values in ((0,), (1, 2), (2**62, 0, 7)):
        assert 0 <= hash64(*values) < 2**64
        assert hash64(*values) != hash64(*values, 0)
    assert hash64(1, 2) != hash64(2, 1)
    seen = {hash64(0, step, slot) >> 1 for step in range(2000) for slot in range(32)}
    assert len(seen) == 64_000


def test_the_global_generators_are_seeded_by_seed_epoch_row_repeat_and_stream():
    found = set()
    for seed, epoch, repeat, stream in itertools.product((0, 1), repeat=4):
        draws = Draws(seed, epoch, np.arange(5), np.full(5, repeat))
        for place in range(5):
            for _ in range(2):  # twice the same
                draws.seed_globals(place, stream)
                drawn = random.random(), float(np.random.random()), torch.rand(()).item()
                found.add((seed, epoch, repeat, stream, place, *drawn))
    assert len(found) == 5 * 2**4
    for generator in (-3, -2, -1):
        assert len({each[generator] for each in found}) == 5 * 2**4
