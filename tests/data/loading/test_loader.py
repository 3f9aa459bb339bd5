"""Micro-batches in their order, for any number of ranks and threads; and the threads themselves."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from processes import wait_until

from raytrain_ddp.data.loading.loader import (
    LoaderThreads,
    TrainLoader,
    eval_batches,
    prefetched,
    shuffle_for,
)
from raytrain_ddp.data.loading.sources import ArraySource, Data, IterableSource
from raytrain_ddp.data.order import Draws, Plan, items_of_rank
from raytrain_ddp.data.pixels.image_batches import BatchMemory
from raytrain_ddp.errors import DataError

# ------------------------------------------------------------------ threads


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


class Items:
    """Numbers from 0; counts how many were taken."""

    def __init__(self, most: int) -> None:
        self._most, self.taken = most, 0

    def __iter__(self) -> Iterator[int]:
        for item in range(self._most):
            self.taken += 1
            yield item


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetched_raises_a_workers_error_in_order_and_ends_its_threads(threads: int):
    def work(item: int) -> int:
        if item == 3:
            raise DataError("row 3")
        return item

    results = prefetched(range(1000), work, LoaderThreads(threads, ahead=2))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="row 3"):
        next(results)
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [LoaderThreads(1), LoaderThreads(3)])
def test_closing_ends_the_threads_and_starts_no_further_item(threads: LoaderThreads):
    begun: list[int] = []
    got = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item > 1:
            assert got.wait(20.0)
            wait_until(lambda: results.gi_running)  # it is being closed

    items = Items(10**9)
    results = prefetched(items, work, threads)
    assert [next(results), next(results)] == [None, None]
    got.set()
    assert loader_threads()
    results.close()
    assert loader_threads() == []
    most = threads.most
    assert len(begun) <= 2 + 2 * most  # running ones may finish; waiting ones are not started
    assert items.taken == 2 + most * threads.ahead


def test_bytes_prepared_ahead_are_bounded():
    """Results of 100 bytes, 300 allowed: with one thread, three are prepared, not ten."""
    items = Items(100)
    threads = LoaderThreads(1, ahead=10, ahead_bytes=300)
    results = prefetched(items, lambda _: bytes(100), threads, len)
    for taken in range(1, 6):
        next(results)
        assert items.taken <= taken + 3
    assert items.taken == 5 + 3
    results.close()


def test_batch_memory_is_reused_only_when_no_view_is_left() -> None:
    memory = BatchMemory()
    batch = memory.empty(4, 8, 6)
    assert batch.shape == (4, 3, 8, 6)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    place, view = batch.data_ptr(), batch[1:3].flip(0)[0:1].view_as(batch[:1])
    kept = batch.fill_(7)[3:]
    del batch
    other = memory.empty(4, 8, 6).fill_(9)
    assert other.data_ptr() != place
    assert bool((kept == 7).all())
    del kept, view
    gc.collect()
    assert memory.empty(4, 8, 6).data_ptr() == place


# ------------------------------------------------------------------ steps


def rows_data(rows: int) -> Data:
    source = ArraySource({"row": np.arange(rows)}, rows_per_block=8)

    def collate(records: dict[str, np.ndarray], draws: Draws) -> dict[str, torch.Tensor]:
        assert draws.rows.tolist() == records["row"].tolist()
        draw = torch.from_numpy(draws.uniform(1)[:, 0])
        return {"row": torch.from_numpy(records["row"]), "draw": draw}

    return Data(source, collate)


def loader_of(
    data: Data, plan: Plan, shuffle: Any, threads: int, size: int = 1, rank: int = 0, **more: Any
) -> TrainLoader:
    """A window of 3 blocks, seed 9."""
    workers = LoaderThreads(threads, ahead=2)
    return TrainLoader(data, plan, shuffle, 3, 9, size, rank, workers, **more)


def of_all_ranks(
    data: Data, plan: Plan, shuffle: Any, threads: int, size: int, start: int, stop: int
) -> list[list[tuple[Any, ...]]]:
    """Each step's slots: (step, slot, samples, rows, draws)."""
    ranks = [
        loader_of(data, plan, shuffle, threads, size, rank).steps(start, stop)
        for rank in range(size)
    ]
    steps = [
        [
            (slot.step, slot.index, slot.samples, *(v.tolist() for v in slot.batch.values()))
            for part in parts
            for slot in part
        ]
        for parts in zip(*ranks, strict=True)
    ]
    assert len(steps) == stop - start
    return steps


@pytest.mark.parametrize("shuffle", ["full", "block"])
@pytest.mark.parametrize("rows", [107, 3])
def test_the_steps_are_the_same_for_1_2_and_3_ranks_and_0_1_and_3_threads(rows: int, shuffle: str):
    plan, data = Plan(rows, slots=4, micro_batch=6), rows_data(rows)
    steps = 2 * plan.steps_per_epoch
    expected = of_all_ranks(data, plan, shuffle, 0, 1, 0, steps)
    for epoch in (0, 1):
        half = expected[epoch * steps // 2 : (epoch + 1) * steps // 2]
        seen = [row for step in half for slot in step if slot[2] for row in slot[3]]
        assert sorted(seen) == list(range(rows))
    assert expected[: steps // 2] != expected[steps // 2 :]
    for size, threads in ((1, 1), (2, 0), (3, 3), (3, 1)):
        assert of_all_ranks(data, plan, shuffle, threads, size, 0, steps) == expected
        later = of_all_ranks(data, plan, shuffle, threads, size, steps - 1, steps)
        assert later == expected[steps - 1 :]  # any step can be the first
    assert loader_threads() == []


def test_an_empty_slot_has_a_batch_of_the_right_kind_and_an_order_can_be_kept():
    slots = next(loader_of(rows_data(3), Plan(3, 4, 6), "full", 0).steps(0, 1))
    assert [slot.samples for slot in slots] == [0, 1, 1, 1]
    assert slots[0].batch["row"].shape == (1,)
    same = loader_of(rows_data(20), Plan(20, 1, 20), "full", 0, same_order=True)
    (one,), (other,) = same.steps(0, 2)
    assert torch.equal(one.batch["row"], other.batch["row"])
    assert not torch.equal(one.batch["draw"], other.batch["draw"])


@pytest.mark.parametrize("threads", [0, 2])
def test_eval_batches_are_the_chunks_in_stored_order_the_last_one_shorter(threads: int):
    def chunks(numbers: Any) -> list[list[int]]:
        batches = eval_batches(rows_data(20), 8, numbers, LoaderThreads(threads))
        return [batch["row"].tolist() for batch in batches]

    assert chunks(range(3)) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert chunks([1]) == [list(range(8, 16))]
    assert chunks([]) == []


def test_repeats_are_adjacent_and_draw_separate_random_numbers():
    plan, data = Plan(20, slots=4, micro_batch=6, repeats=3), rows_data(20)
    steps = plan.steps_per_epoch
    alone = of_all_ranks(data, plan, "full", 2, 1, 0, 2 * steps)
    assert of_all_ranks(data, plan, "full", 2, 2, 0, 2 * steps) == alone
    for epoch in (0, 1):
        slots = [s for step in alone[epoch * steps : (epoch + 1) * steps] for s in step if s[2]]
        assert sorted(row for slot in slots for row in slot[3]) == sorted([*range(20)] * 3)
        assert len({draw for slot in slots for draw in slot[4]}) == 60
    first = alone[0][0][3]
    assert first[:3] == [first[0]] * 3


@pytest.mark.parametrize("repeats", [3, 4])
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_spread_repeats_are_in_different_slots_on_any_number_of_workers(repeats: int, shuffle: Any):
    plan, data = Plan(50, slots=4, micro_batch=3, repeats=repeats, spread=True), rows_data(50)
    used = 50 // repeats
    assert plan.steps_per_epoch == 4  # 48 samples, not 50 times as many
    assert sum(plan.samples(step) for step in range(4)) == used * repeats == 48
    alone = of_all_ranks(data, plan, shuffle, 2, 1, 0, 8)
    for size, start in ((3, 0), (1, 5)):  # from any start step, too
        assert of_all_ranks(data, plan, shuffle, 2, size, start, 8) == alone[start:]
    chosen = []
    for epoch in (0, 1):
        slots = [s for step in alone[4 * epoch : 4 * epoch + 4] for s in step if s[2]]
        rows = [row for slot in slots for row in slot[3]]
        assert sorted(Counter(rows).values()) == [repeats] * used
        assert len({draw for slot in slots for draw in slot[4]}) == used * repeats
        assert all(len({*slot[3]}) == len(slot[3]) for slot in slots)
        chosen.append({*rows})
    assert chosen[0] != chosen[1]


def test_the_first_spread_samples_equal_torchvisions_sampler():
    """references/classification/sampler.py: each index `repetitions` times, distributed one by
    one."""
    slots, repeats, rows = 8, 3, 64
    plan = Plan(rows, slots, micro_batch=4, repeats=repeats, spread=True)
    indices = [index for index in range(rows) for _ in range(repeats)]
    for rank in range(slots):
        theirs = indices[rank::slots][: rows // slots]
        ours = np.concatenate([plan.samples_of(s, rank)[0] for s in range(plan.steps_per_epoch)])
        assert ours.tolist() == theirs[: len(ours)]
        assert len(ours) >= len(theirs) - 1  # 63 samples, not 64: 21 rows three times each


# ------------------------------------------------------------------ bad records, digests


def bad_rows_data(rows: int, bad: set[int]) -> Data:
    """Rows, some of which are skipped."""

    def collate(records: dict[str, np.ndarray], draws: Draws) -> dict[str, torch.Tensor]:
        kept = [row for row in records["row"].tolist() if row not in bad]
        return {"row": torch.tensor(kept, dtype=torch.int64)}

    return Data(ArraySource({"row": np.arange(rows)}), collate)


def test_fault_20_lost_samples_are_an_error_unless_they_may_be_skipped_and_some_are_left():
    plan = Plan(24, slots=4, micro_batch=3)
    with pytest.raises(DataError, match="2 samples for 3 records"):
        list(loader_of(bad_rows_data(24, {7}), plan, "none", 1).steps(0, plan.steps_per_epoch))
    none = loader_of(bad_rows_data(24, {*range(24)}), plan, "none", 0, skip=True)
    with pytest.raises(DataError):
        none.any_batch()
    last = loader_of(bad_rows_data(24, {*range(21)}), plan, "none", 0, skip=True)
    assert last.any_batch()["row"].tolist() == [21, 22, 23]


def test_digests_differ_by_rows_and_by_pixels():
    def digests(rows: int, draw: float = 0.0) -> list[str]:
        data = rows_data(rows)
        own = Data(data.source, lambda r, d: {"x": torch.from_numpy(d.uniform(1) + draw), "r": 1.0})
        loader = loader_of(own, Plan(rows, 4, 3), "full", 1, digests=True)
        return [slot.digest for slots in loader.steps(0, 2) for slot in slots]

    assert digests(20) == digests(20)
    assert not set(digests(20)) & set(digests(30))
    assert not {d for d in digests(20) if d} & set(digests(20, draw=1e-9))


# ------------------------------------------------------------------ iterable data sets


class SeekableStream(Items):
    def skip_to(self, offset: int) -> Iterator[int]:
        for item in range(offset, self._most):
            self.taken += 1
            yield item


def stream_data(stream: Any, rows: int) -> Data:
    source = IterableSource(stream, rows, shared=True)
    return Data(source, lambda records, _: {"row": torch.tensor(records)})


@pytest.mark.parametrize("kind", [Items, SeekableStream])
@pytest.mark.parametrize("threads", [0, 3])
def test_an_iterable_is_sharded_by_offset_each_item_once(kind: Any, threads: int):
    plan = Plan(107, slots=4, micro_batch=6)
    for size in (1, 3):
        seen = []
        for rank in range(size):
            stream = kind(107)
            data = stream_data(stream, 107)
            assert shuffle_for(data, "full") == "none"
            loader = loader_of(data, plan, "none", threads, size, rank)
            steps = loader.steps(0, plan.steps_per_epoch)
            slots = [s for step in steps for s in step if s.samples]
            for slot in slots:
                place = plan.span(slot.step, slot.index)
                assert slot.batch["row"].tolist() == list(range(*place))
                seen += slot.batch["row"].tolist()
            if kind is SeekableStream:
                assert stream.taken == sum(slot.samples for slot in slots)
            else:  # each lane of a worker skips the items before its own, once
                passed_over = sum(plan.lane(slot)[1] for slot in items_of_rank(4, size, rank))
                assert stream.taken == passed_over
        assert sorted(seen) == list(range(107))


def test_an_iterable_resumes_at_the_right_item_and_restarts_each_epoch():
    loader = loader_of(stream_data(Items(20), 20), Plan(20, 2, 5), "none", 1)
    rows = [[s.batch["row"].tolist() for s in step] for step in loader.steps(1, 4)]
    second = [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]
    assert rows == [second, [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]], second]
    with pytest.raises(DataError, match="18"):
        IterableSource(Items(18), 20).read(np.arange(15, 20))
    with pytest.raises(DataError, match="rows="):
        IterableSource(Items(18))
