"""The order of samples: each exactly once, for any world size, from any step on."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan, RowRuns, items_of_rank, runs_of
from raytrain_ddp.data.order.permutation import Feistel, sorted_permutation

plans = st.builds(
    Plan, rows=st.integers(1, 2000), slots=st.integers(1, 40), micro_batch=st.integers(1, 50)
)
blocks = st.lists(st.integers(1, 60), min_size=1, max_size=60).map(
    lambda rows: np.array(rows, dtype=np.int64)
)
shuffles = st.sampled_from(["full", "block", "none"])


def step_of_rank(plan: Plan, order: EpochOrder, step: int, world_size: int, rank: int) -> list[int]:
    slots = items_of_rank(plan.slots, world_size, rank)
    return [row for slot in slots for row in order.read(*plan.span(step, slot)).tolist()]


# ------------------------------------------------------------------ steps and slots


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
            ranks = range(world_size)
            together = [step_of_rank(plan, order, step, world_size, rank) for rank in ranks]
            assert [row for rows in together for row in rows] == alone


@given(plans)
def test_samples_of_the_steps_add_up_to_the_rows(plan: Plan):
    samples = [plan.samples(step) for step in range(plan.steps_per_epoch)]
    assert sum(samples) == plan.rows
    assert min(samples) >= 1


@given(plans)
def test_only_the_last_step_is_short_or_has_empty_slots(plan: Plan):
    for step in range(plan.steps_per_epoch - 1):
        for slot in range(plan.slots):
            start, stop = plan.span(step, slot)
            assert stop - start == plan.micro_batch


@given(plans)
def test_lanes_are_balanced_to_one_row(plan: Plan):
    steps = range(plan.steps_per_epoch)
    lanes = [
        sum(stop - start for start, stop in (plan.span(step, slot) for step in steps))
        for slot in range(plan.slots)
    ]
    assert max(lanes) - min(lanes) <= 1


@given(st.integers(0, 500), st.integers(1, 64))
def test_deal_is_contiguous_and_balanced_to_one(items: int, world_size: int):
    shares = [items_of_rank(items, world_size, rank) for rank in range(world_size)]
    assert [item for share in shares for item in share] == list(range(items))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 5000), st.integers(1, 700))
def test_runs_of_covers_all_rows_with_blocks_of_one_length_and_a_rest(rows: int, length: int):
    runs = runs_of(rows, length).tolist()
    assert sum(runs) == rows
    assert all(run == length for run in runs[:-1])
    assert all(0 < run <= length for run in runs)


# ------------------------------------------------------------------ the order of an epoch


@given(blocks, shuffles, st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(1, 20))
def test_every_shuffle_is_a_permutation(
    blocks: np.ndarray, shuffle: str, seed: int, epoch: int, window: int
):
    order = EpochOrder(blocks, shuffle, seed, epoch, window)
    assert sorted(order.read(0, order.rows).tolist()) == list(range(int(blocks.sum())))


@given(blocks, shuffles, st.integers(1, 20), st.data())
def test_any_step_of_the_order_can_be_read_directly(
    blocks: np.ndarray, shuffle: str, window: int, data: st.DataObject
):
    """O(1) start: a new order asked only for step k gives what a reader from step 0 sees there."""
    whole = EpochOrder(blocks, shuffle, 5, 2, window)
    sequence = np.concatenate([whole.read(place, place + 1) for place in range(whole.rows)])
    start = data.draw(st.integers(0, whole.rows))
    stop = data.draw(st.integers(start, whole.rows))
    piece = EpochOrder(blocks, shuffle, 5, 2, window).read(start, stop)
    assert piece.tolist() == sequence[start:stop].tolist()


def test_a_step_is_reached_without_computing_the_preceding_order():
    """Block shuffle of a million blocks: the first read computes one window, not the epoch."""
    order = EpochOrder(runs_of(10**9, 1000), "block", 0, 0)
    order.read(5 * 10**8, 5 * 10**8 + 64)
    assert order._read_window.cache_info().currsize <= 2


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_epochs_and_seeds_give_different_orders(shuffle: str):
    blocks = runs_of(5000, 10)
    keys = [(seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1, 7)]
    orders = [EpochOrder(blocks, shuffle, *key).read(0, 5000) for key in keys]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.mean(one == other) < 0.01
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.2  # 500 blocks: a standard error of 0.045


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_windows_and_blocks_are_mixed_well(shuffle: str):
    """No block stays together: adjacent rows come from the same block only by chance."""
    rows = EpochOrder(runs_of(16_000, 100), shuffle, 3, 1, window=16).read(0, 16_000)
    together = np.mean(rows[1:] // 100 == rows[:-1] // 100)
    assert together < 2 / 16


def test_shuffle_none_keeps_the_stored_order():
    order = EpochOrder(runs_of(100, 7), "none", 3, 1)
    assert order.read(0, 100).tolist() == list(range(100))


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


def test_a_slot_never_returns_to_an_earlier_window():
    order = EpochOrder(runs_of(4096, 16), "block", 1, 0, window=4)
    plan = Plan(order.rows, 4, 8)
    for slot in range(plan.slots):
        rows = [order.read(*plan.span(step, slot)) for step in range(plan.steps_per_epoch)]
        seen = [int(block) for block in np.concatenate(rows) // 16]
        last = {block: place for place, block in enumerate(seen)}
        first = {block: seen.index(block) for block in last}
        alive = [sum(first[b] <= place <= last[b] for b in last) for place in range(len(seen))]
        assert max(alive) <= 4  # so a cache of one window of row groups never fetches twice


def test_threads_that_read_the_same_order_at_once_see_the_same_rows():
    """Loader threads share one order, and there are more lanes than cached windows."""
    order = EpochOrder(runs_of(200 * 32, 8), "block", 4, 0, window=4)  # 200 windows of 32 rows
    expected = EpochOrder(runs_of(200 * 32, 8), "block", 4, 0, window=4).read(0, order.rows)
    plan = Plan(order.rows, 100, 4)

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


# ------------------------------------------------------------------ permutations


@pytest.mark.parametrize("n", [1, 2, 3, 5, 63, 64, 65, 1000, 4096, 70_001])
def test_both_kinds_of_permutation_reach_each_number_once(n: int):
    everything = np.arange(n)
    for epoch in range(3):
        for permuted in (Feistel(n, 0, epoch)(everything), sorted_permutation(n, 0, epoch, 1)):
            assert np.array_equal(np.sort(permuted), everything)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 70_001])
def test_a_feistel_permutation_can_be_inverted(n: int):
    permutation = Feistel(n, 1, 2)
    everything = np.arange(n)
    assert np.array_equal(permutation.inverse(permutation(everything)), everything)


@given(blocks, st.integers(0, 3))
def test_row_runs_start_and_contain_positions_according_to_their_lengths(
    lengths: np.ndarray, key: int
):
    permutation = Feistel(len(lengths), key)
    order = permutation(np.arange(len(lengths)))
    for runs, laid in (
        (RowRuns.of(lengths), lengths),
        (RowRuns.of(lengths).permuted(permutation), lengths[order]),
    ):
        starts = np.concatenate([[0], np.cumsum(laid)])
        assert runs.start(np.arange(len(laid) + 1)).tolist() == starts.tolist()
        holds = np.repeat(np.arange(len(laid)), laid)
        assert runs.at(np.arange(laid.sum())).tolist() == holds.tolist()


def test_any_part_of_a_feistel_permutation_can_be_computed():
    permutation = Feistel(10**9, 5)
    places = np.array([0, 1, 999_999_999, 123_456_789])
    together = permutation(places)
    assert [int(permutation(np.array([place]))[0]) for place in places] == together.tolist()
    assert permutation(places[::-1]).tolist() == together.tolist()[::-1]
    assert len(np.unique(permutation(np.arange(5 * 10**8, 5 * 10**8 + 100_000)))) == 100_000


def test_all_permutations_of_a_small_feistel_domain_are_equally_frequent():
    """24 permutations, 1200 keys: 50 each, with a standard deviation of 7."""
    forms = Counter(tuple(Feistel(4, key)(np.arange(4)).tolist()) for key in range(1200))
    assert len(forms) == 24
    assert min(forms.values()) > 20
    assert max(forms.values()) < 80


def test_a_feistel_permutation_spreads_neighbors_uniformly():
    """A million positions cut into 10 ranges: the members of a range are spread evenly, too."""
    permuted = Feistel(10**6, 3)(np.arange(10**6))
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < 0.005
    landed = np.histogram2d(np.arange(10**6), permuted, bins=10)[0]
    assert np.abs(landed / 10_000 - 1).max() < 0.05


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
    """Computed without visiting the slots, of which a large run has thousands."""
    micro_batch = rows_at_once * repeats
    plan = Plan(rows, max(slots, repeats), micro_batch, repeats, limit, spread)
    for step in range(plan.steps_per_epoch + 1):
        slots_of_step = range(plan.slots)
        assert plan.samples(step) == sum(plan.count(step, slot) for slot in slots_of_step)
