"""The order of samples: each exactly once, for any world size, from any step on."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raytrain_ddp.data.order import EpochOrder, Plan, items_of_rank, runs_of

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
        alone = [row for span in spans for row in order.at(np.arange(*span)).tolist()]
        for world_size in range(1, plan.slots + 1):
            together = [
                row
                for rank in range(world_size)
                for slot in items_of_rank(plan.slots, world_size, rank)
                for row in order.at(np.arange(*plan.span(step, slot))).tolist()
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
        counts = plan.counts(step).tolist()
        assert counts == [len(plan.samples_of(step, slot)[0]) for slot in range(plan.slots)]
        assert plan.samples(step) == sum(counts)
        assert max(counts) <= plan.micro_batch


# ------------------------------------------------------------------ the order of an epoch


@few
@given(blocks, shuffles, st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(1, 20))
def test_every_shuffle_is_a_permutation(
    blocks: np.ndarray, shuffle: str, seed: int, epoch: int, window: int
):
    order = EpochOrder(blocks, shuffle, seed, epoch, window)
    rows = order.at(np.arange(order.rows)).tolist()
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
    sequence = np.concatenate(
        [whole.at(np.arange(place, place + 1)) for place in range(whole.rows)]
    )
    start = data.draw(st.integers(0, whole.rows))
    stop = data.draw(st.integers(start, whole.rows))
    piece = EpochOrder(blocks, shuffle, 5, 2, window)
    assert piece.at(np.arange(start, stop)).tolist() == sequence[start:stop].tolist()
    assert piece.at(np.arange(start, stop, 3)).tolist() == sequence[start:stop:3].tolist()


def test_the_order_is_frozen():
    """Changing these numbers changes what every running run sees after its next restart."""
    blocks = np.array([5, 3, 4, 2, 6])
    full = EpochOrder(blocks, "full", seed=7, epoch=3).at(np.arange(20)).tolist()
    assert full == [12, 6, 4, 14, 9, 15, 7, 8, 5, 18, 11, 2, 0, 17, 1, 13, 16, 19, 3, 10]
    block = EpochOrder(blocks, "block", seed=7, epoch=3, window=2).at(np.arange(20)).tolist()
    assert block == [9, 10, 8, 7, 11, 5, 6, 1, 12, 4, 13, 0, 3, 2, 16, 19, 15, 14, 17, 18]
    large = runs_of(100_000, 1024)
    assert EpochOrder(large, "full", 0, 0).at(np.arange(4)).tolist() == [4540, 41267, 79286, 97881]
    middle = EpochOrder(large, "block", 0, 1, window=16).at(np.arange(50_000, 50_004)).tolist()
    assert middle == [15269, 81899, 2471, 8609]


def test_threads_that_read_the_same_order_at_once_see_the_same_rows():
    """Loader threads share one order, and there are more lanes than cached windows."""
    order = EpochOrder(runs_of(100 * 32, 8), "block", 4, 0, window=4)  # 100 windows of 32 rows
    expected = EpochOrder(runs_of(100 * 32, 8), "block", 4, 0, window=4).at(np.arange(order.rows))
    plan = Plan(order.rows, 80, 4)

    def read(place: tuple[int, int]) -> bool:
        start, stop = plan.span(*place)
        return bool((order.at(np.arange(start, stop)) == expected[start:stop]).all())

    places = [(step, slot) for step in range(plan.steps_per_epoch) for slot in range(plan.slots)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, places))
    finally:
        sys.setswitchinterval(interval)
