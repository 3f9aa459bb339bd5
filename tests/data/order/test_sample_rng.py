"""Random numbers of a sample: the same wherever and with whatever other samples it is read."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from raytrain_ddp.data.order import Draws, hash64

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

ids = st.integers(0, 2**62)
rows = st.lists(ids, min_size=1, max_size=30).map(lambda r: np.array(r, dtype=np.int64))
few = settings(max_examples=40)


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
    places = list(range(0, len(rows), 2))
    repeated = Draws(seed, epoch, rows, np.arange(len(rows)) % 3)
    picked = repeated.of(places).uniform(count)
    assert picked.tolist() == repeated.uniform(count)[places].tolist()


def test_the_draws_are_frozen():
    """Changing these numbers changes the augmentation of every running run at its next restart."""
    draws = Draws(1, 2, np.array([0, 1, 10**12])).uniform(2).tolist()
    assert draws[0] == [0.4541290122588759, 0.6890179563624814]
    assert draws[1] == [0.7415706071211662, 0.4078410407215908]
    assert draws[2] == [0.24216033061238185, 0.531559214712107]
    assert Draws(1, 2, np.array([0])).uniform(1, stream=1)[0, 0] == 0.22611085363756545
    assert hash64(1, 2, 3) == 7702586659592502839


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
