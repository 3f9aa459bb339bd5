"""Row groups in memory: each is read once, within limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from raytrain_ddp.data.formats.row_group_cache import RowGroupCache
from raytrain_ddp.errors import DataError

ROWS = 4
ALL = np.arange(ROWS)
TIMEOUT_S = 20.0


@dataclass
class Block:
    number: int
    nbytes: int = 10


@dataclass
class Store:
    """Counts loads; can let a load wait for its gate, or fail."""

    loaded: list[int] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    threads: set[str] = field(default_factory=set)

    def load(self, block: int) -> Block:
        self.loaded.append(block)
        self.threads.add(threading.current_thread().name)
        if block in self.gates:
            assert self.gates[block].wait(TIMEOUT_S)
        if block in self.failing:
            raise DataError(f"block {block}")
        return Block(block)


def groups_of(store: Store, blocks: int, fitting: int, threads: int = 2) -> RowGroupCache:
    """`blocks` blocks of 10 bytes; the given number of them fits in memory."""
    rows, sizes = np.full(blocks, ROWS), np.full(blocks, 10)
    return RowGroupCache(store.load, rows, sizes, 10 * fitting, threads)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("row-groups")]


@pytest.fixture
def store() -> Iterator[Store]:
    before = reading_threads()  # of a failed test, whose source is not closed
    yield Store()
    assert reading_threads() == before


def test_a_block_stays_until_all_its_rows_have_been_read(store: Store):
    groups = groups_of(store, 3, fitting=2)
    for place in range(ROWS):
        assert groups.get(0, np.array([place, place])).number == 0
        assert groups.get(1, ALL).number == 1  # is released each time
    assert store.loaded == [0, 1, 1, 1, 1]
    groups.get(0, np.array([0]))
    assert store.loaded[5:] == [0]
    assert groups.reloads == 0


def test_the_least_recently_used_blocks_are_evicted_and_counted(store: Store):
    groups = groups_of(store, 4, fitting=2)
    for block in (0, 1, 0, 2, 0):  # 1 is evicted for 2
        groups.get(block, np.array([block]))
    assert store.loaded == [0, 1, 2]
    groups.get(1, np.array([3]))
    assert store.loaded == [0, 1, 2, 1]
    assert (groups.loads, groups.reloads) == (4, 1)


def test_a_block_is_read_once_for_all_readers_without_delaying_other_blocks(store: Store):
    groups = groups_of(store, 3, fitting=3)
    groups.get(1, ALL)
    store.gates[0] = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(groups.get, 0, ALL) for _ in range(4)]
        until(lambda: 0 in store.loaded)
        assert groups.get(1, ALL).number == 1
        assert groups.get(2, ALL).number == 2
        assert not any(future.done() for future in waiting)
        store.gates[0].set()
        assert {future.result(TIMEOUT_S).number for future in waiting} == {0}
    assert store.loaded == [1, 0, 2]


def test_blocks_are_read_ahead_in_order_as_far_as_they_fit(store: Store):
    groups = groups_of(store, 8, fitting=4, threads=3)
    for block in range(8):
        store.gates[block] = threading.Event()
    groups.ahead([0, 1, 2, 3, 4, 5, 0])
    until(lambda: len(store.loaded) == 3)  # threads
    for block in range(8):
        store.gates[block].set()
    until(lambda: len(store.loaded) == 4)  # fit
    groups.get(2, ALL)  # is released: the next one fits
    until(lambda: len(store.loaded) == 5)
    groups.get(0, ALL)
    until(lambda: len(store.loaded) == 6)
    assert store.loaded[4:] == [4, 5]
    for block in (1, 3, 4, 5):
        groups.get(block, ALL)
    assert len(store.loaded) == 6
    assert all(name.startswith("row-groups") for name in store.threads)
    groups.close()


def test_a_block_needed_now_does_not_wait_for_read_ahead(store: Store):
    groups = groups_of(store, 6, fitting=2, threads=1)
    store.gates[0] = threading.Event()
    groups.ahead([0, 1, 2])
    until(lambda: store.loaded == [0])
    assert groups.get(2, ALL).number == 2
    assert groups.get(3, ALL).number == 3
    store.gates[0].set()
    until(lambda: store.loaded == [0, 2, 3, 1])
    groups.close()


def test_a_read_error_reaches_all_waiting_readers_and_is_retried(store: Store):
    groups = groups_of(store, 2, fitting=1)
    store.failing.add(0)
    with pytest.raises(DataError, match="block 0"):
        groups.get(0, ALL)
    groups.ahead([0])
    groups.close()
    assert store.loaded == [0, 0]
    store.failing.clear()
    assert groups.get(0, ALL).number == 0


def test_closing_ends_the_threads_and_drops_pending_reads(store: Store):
    groups = groups_of(store, 9, fitting=1, threads=2)
    groups.ahead(range(9))
    until(lambda: bool(store.loaded))
    groups.close()
    assert reading_threads() == []
    count = len(store.loaded)
    assert groups.get(8, ALL).number == 8  # it remains usable
    assert len(store.loaded) == count + 1
