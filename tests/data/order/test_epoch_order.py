"""The order of samples: each exactly once, for any world size, from any step on."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan, items_of_rank, runs_of
from raytrain_ddp.data.order.permutation import Feistel, sorted_permutation

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

plans = st.builds(
    Plan, rows=st.integers(1, 900), slots=st.integers(1, 20), micro_batch=st.integers(1, 50)
)
blocks = st.lists(st.integers(1, 60), min_size=1, max_size=60).map(
    lambda rows: np.array(rows, dtype=np.int64)
)
shuffles = st.sampled_from(["full", "block", "none"])
few = settings(max_examples=40)


# ------------------------------------------------------------------ steps and slots


@few
@given(plans)
def test_each_row_occurs_exactly_once_for_every_world_size(plan: Plan):
    for world_size in range(1, plan.slots + 1):
        places = [
            place
            for step in range(plan.steps_per_epoch)
            for rank in range(world_size)
            for slot in items_of_rank(plan.slots, world_size, rank)
            for place in range(*plan.span(step, slot))
        ]
        assert sorted(places) == list(range(plan.rows))


@few
@given(plans, blocks, shuffles, st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_a_step_has_the_same_rows_in_the_same_order_whatever_the_world_size(
    plan: Plan, blocks: np.ndarray, shuffle: str, seed: int, epoch: int
):
    order = EpochOrder(blocks, shuffle, seed, epoch, window=3)
    plan = Plan(order.rows, plan.slots, plan.micro_batch)
    for step in {0, plan.steps_per_epoch // 2, plan.steps_per_epoch - 1}:
        spans = [plan.span(step, slot) for slot in range(plan.slots)]  # in slot order
        alone = [row for span in spans for row in order.read(*span).tolist()]
        for world_size in range(1, plan.slots + 1):
            together = [
                row
                for rank in range(world_size)
                for slot in items_of_rank(plan.slots, world_size, rank)
                for row in order.read(*plan.span(step, slot)).tolist()
            ]
            assert together == alone


@few
@given(plans)
def test_lanes_are_balanced_and_only_the_last_step_is_short(plan: Plan):
    steps, slots = range(plan.steps_per_epoch), range(plan.slots)
    counts = [[stop - start for start, stop in (plan.span(k, j) for j in slots)] for k in steps]
    assert all(count == plan.micro_batch for step in counts[:-1] for count in step)
    lanes = [sum(lane) for lane in zip(*counts, strict=True)]
    assert max(lanes) - min(lanes) <= 1
    assert [plan.samples(step) for step in steps] == [sum(step) for step in counts]
    assert sum(counts[-1]) >= 1
    assert plan.smallest_slot == min(count for count in counts[-1] if count)


@few
@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 70))
def test_slots_and_blocks_are_contiguous_and_balanced(items: int, world_size: int, length: int):
    shares = [items_of_rank(items, world_size, rank) for rank in range(world_size)]
    assert [item for share in shares for item in share] == list(range(items))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    runs = runs_of(items, length).tolist()
    assert sum(runs) == items
    assert all(run == length for run in runs[:-1])
    assert all(0 < run <= length for run in runs)


@few
@given(
    rows=st.integers(1, 400),
    slots=st.integers(1, 9),
    rows_at_once=st.integers(1, 6),
    repeats=st.integers(1, 3),
    limit=st.integers(0, 5),
    spread=st.booleans(),
)
def test_the_samples_of_a_step_are_the_sum_of_its_slots(
    rows: int, slots: int, rows_at_once: int, repeats: int, limit: int, spread: bool
):
    plan = Plan(rows, max(slots, repeats), rows_at_once * repeats, repeats, limit, spread)
    assert plan.steps_per_epoch <= (limit or rows)
    for step in range(plan.steps_per_epoch + 1):
        counts = [plan.count(step, slot) for slot in range(plan.slots)]
        assert plan.samples(step) == sum(counts)
        assert max(counts) <= plan.micro_batch


# ------------------------------------------------------------------ the order of an epoch


@few
@given(blocks, shuffles, st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(1, 20))
def test_every_shuffle_is_a_permutation(
    blocks: np.ndarray, shuffle: str, seed: int, epoch: int, window: int
):
    order = EpochOrder(blocks, shuffle, seed, epoch, window)
    rows = order.read(0, order.rows).tolist()
    assert sorted(rows) == list(range(int(blocks.sum())))
    if shuffle == "none":
        assert rows == sorted(rows)


@few
@given(blocks, shuffles, st.integers(1, 20), st.data())
def test_any_step_of_the_order_can_be_read_directly(
    blocks: np.ndarray, shuffle: str, window: int, data: st.DataObject
):
    """A new order asked only for step k gives what a reader from step 0 sees there."""
    whole = EpochOrder(blocks, shuffle, 5, 2, window)
    sequence = np.concatenate([whole.read(place, place + 1) for place in range(whole.rows)])
    start = data.draw(st.integers(0, whole.rows))
    stop = data.draw(st.integers(start, whole.rows))
    piece = EpochOrder(blocks, shuffle, 5, 2, window)
    assert piece.read(start, stop).tolist() == sequence[start:stop].tolist()
    assert piece.at(np.arange(start, stop, 3)).tolist() == sequence[start:stop:3].tolist()


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_epochs_and_seeds_give_different_well_mixed_orders(shuffle: str):
    blocks = runs_of(5000, 10)
    keys = [(seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1, 7)]
    orders = [EpochOrder(blocks, shuffle, *key, window=16).read(0, 5000) for key in keys]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.mean(one == other) < 0.01
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.2  # 500 blocks: a standard error of 0.045
    rows = EpochOrder(runs_of(16_000, 100), shuffle, 3, 1, window=16).read(0, 16_000)
    assert np.mean(rows[1:] // 100 == rows[:-1] // 100) < 2 / 16  # no block stays together


def test_the_order_is_frozen():
    """Changing these numbers changes what every running run sees after its next restart."""
    blocks = np.array([5, 3, 4, 2, 6])
    full = EpochOrder(blocks, "full", seed=7, epoch=3).read(0, 20).tolist()
    assert full == [12, 6, 4, 14, 9, 15, 7, 8, 5, 18, 11, 2, 0, 17, 1, 13, 16, 19, 3, 10]
    block = EpochOrder(blocks, "block", seed=7, epoch=3, window=2).read(0, 20).tolist()
    assert block == [9, 10, 8, 7, 11, 5, 6, 1, 12, 4, 13, 0, 3, 2, 16, 19, 15, 14, 17, 18]
    large = runs_of(100_000, 1024)
    assert EpochOrder(large, "full", 0, 0).read(0, 4).tolist() == [4540, 41267, 79286, 97881]
    middle = EpochOrder(large, "block", 0, 1, window=16).read(50_000, 50_004).tolist()
    assert middle == [15269, 81899, 2471, 8609]


# ------------------------------------------------------------------ locality of the block shuffle


@few
@given(
    st.integers(1, 12),  # rows per block
    st.integers(1, 80),  # blocks
    st.integers(1, 8),  # window
    st.integers(1, 8),  # slots
    st.integers(1, 16),  # micro batch
    st.integers(0, 9),  # seed
)
def test_a_lane_reads_few_row_groups(
    length: int, count: int, window: int, slots: int, micro_batch: int, seed: int
):
    """In any range of steps, a slot touches only the blocks of the windows it crosses.

    A block is read by several slots only where their lanes meet within its window.
    """
    order = EpochOrder(np.full(count, length, np.int64), "block", seed, 0, window)
    plan = Plan(order.rows, slots, micro_batch)
    pairs: set[tuple[int, int]] = set()
    steps_at_once = 3
    for slot in range(slots):
        touched = []
        for step in range(plan.steps_per_epoch):
            touched.append(set((order.read(*plan.span(step, slot)) // length).tolist()))
            pairs |= {(slot, block) for block in touched[-1]}
            lately = set().union(*touched[-steps_at_once:])
            windows_crossed = 1 + -(-(steps_at_once * micro_batch - 1) // (window * length))
            assert len(lately) <= windows_crossed * window
    windows = -(-count // window)
    assert len(pairs) <= window * (windows + slots - 1)
    shortest_lane = order.rows // slots
    for block in range(count) if shortest_lane else ():
        readers = [slot for slot, read in pairs if read == block]
        assert max(readers) - min(readers) <= 1 + (window * length - 1) // shortest_lane


def test_threads_that_read_the_same_order_at_once_see_the_same_rows():
    """Loader threads share one order, and there are more lanes than cached windows."""
    order = EpochOrder(runs_of(100 * 32, 8), "block", 4, 0, window=4)  # 100 windows of 32 rows
    expected = EpochOrder(runs_of(100 * 32, 8), "block", 4, 0, window=4).read(0, order.rows)
    plan = Plan(order.rows, 80, 4)

    def read(place: tuple[int, int]) -> bool:
        start, stop = plan.span(*place)
        return bool((order.read(start, stop) == expected[start:stop]).all())

    places = [(step, slot) for step in range(plan.steps_per_epoch) for slot in range(plan.slots)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, places))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_an_epoch_of_a_billion_rows_needs_little_memory(shuffle: str):
    blocks = np.full(10**7, 100)
    blocks[99::100] = 37  # the last row group of each file
    tracemalloc.start()
    try:
        order = EpochOrder(blocks, shuffle, 0, 0)
        assert len(np.unique(order.read(5 * 10**8, 5 * 10**8 + 256))) == 256
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


# ------------------------------------------------------------------ permutations


@pytest.mark.parametrize("n", [1, 2, 3, 5, 63, 64, 65, 1000, 4096, 70_001])
def test_both_kinds_of_permutation_reach_each_number_once(n: int):
    everything = np.arange(n)
    for epoch in range(3):
        feistel = Feistel(n, 0, epoch)
        for permuted in (feistel(everything), sorted_permutation(n, 0, epoch, 1)):
            assert np.array_equal(np.sort(permuted), everything)
        assert np.array_equal(feistel.inverse(feistel(everything)), everything)


def test_feistel_permutations_are_uniform():
    """All 24 of 4 numbers, from 1200 keys: 50 each, with a standard deviation of 7. Of a million
    numbers, neighbors are spread evenly."""
    forms = Counter(tuple(Feistel(4, key)(np.arange(4)).tolist()) for key in range(1200))
    assert len(forms) == 24
    assert min(forms.values()) > 20
    assert max(forms.values()) < 80
    permuted = Feistel(10**6, 3)(np.arange(10**6))
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < 0.005
    landed = np.histogram2d(np.arange(10**6), permuted, bins=10)[0]
    assert np.abs(landed / 10_000 - 1).max() < 0.05
