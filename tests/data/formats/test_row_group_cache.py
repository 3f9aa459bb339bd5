"""Row groups in memory and on disk: each is read once, within limits."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raytrain_ddp.data.formats import disk_cache as disk_cache_module
from raytrain_ddp.data.formats.disk_cache import DiskCache
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


# ------------------------------------------------------------------ in memory


def test_a_block_stays_until_all_its_rows_have_been_read(store: Store):
    groups = groups_of(store, 3, fitting=2)
    for place in range(ROWS):
        assert groups.get(0, np.array([place, place])).number == 0
        assert groups.get(1, ALL).number == 1  # is released each time
    assert store.loaded == [0, 1, 1, 1, 1]
    groups.get(0, np.array([0]))
    assert store.loaded[5:] == [0]
    assert groups.reloads == 0


def test_blocks_that_all_fit_in_memory_are_read_only_once(store: Store):
    groups = groups_of(store, 3, fitting=3)
    for _ in range(3):
        for block in range(3):
            groups.get(block, ALL)
    assert store.loaded == [0, 1, 2]


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
    time.sleep(0.02)
    assert sorted(store.loaded) == [0, 1, 2, 3]
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


def test_many_threads_read_each_block_once(store: Store):
    groups = groups_of(store, 60, fitting=20, threads=3)
    windows = np.arange(240).reshape(6, 10, ROWS)  # ten blocks are read at a time
    order = windows.transpose(0, 2, 1).reshape(-1)

    def read(start: int) -> list[int]:
        rows = order[start : start + 5]
        return [groups.get(row // ROWS, np.array([row % ROWS])).number for row in rows]

    with ThreadPoolExecutor(4) as pool:
        futures = []
        for start in range(0, 240, 5):
            groups.ahead((order[start : start + 60] // ROWS).tolist())
            futures.append(pool.submit(read, start))
            if len(futures) > 6:
                futures[-6].result()
        numbers = [future.result() for future in futures]
    assert [number for part in numbers for number in part] == (order // ROWS).tolist()
    assert sorted(store.loaded) == list(range(60))
    groups.close()


# ------------------------------------------------------------------ on disk


def table(value: int, size: int = 1000) -> pa.Table:
    return pa.table({"image": [bytes([value]) * size], "label": [value]})


def cache_of(folder: Path, limit_bytes: int = 10**6, *keys: str) -> DiskCache:
    return DiskCache(str(folder), limit_bytes, keys)


def never() -> Any:
    raise AssertionError("was to be found in the cache")


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "usage")


def entries(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir() if path.name != "usage")


def set_age(folder: Path, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / f"{name}.arrow", (then, then))


def test_a_table_is_kept_for_the_next_process(tmp_path: Path):
    assert cache_of(tmp_path).table("a-0", lambda: table(1)) == table(1)
    assert cache_of(tmp_path).table("a-0", never) == table(1)
    with pytest.raises(DataError, match="block 1"):
        cache_of(tmp_path).table("a-1", lambda: Store(failing={1}).load(1))
    assert entries(tmp_path) == ["a-0"]


def test_a_damaged_cache_entry_is_dropped_and_reread(tmp_path: Path):
    path = tmp_path / "a-0.arrow"
    cache = cache_of(tmp_path)
    cache.table("a-0", lambda: table(1))
    content = path.read_bytes()
    random = np.random.default_rng(0)
    damages = [b"", content[:7], content[:-1], content[: len(content) // 2], content + b"x"]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[random.integers(len(content))] ^= 1 << random.integers(8)
        damages.append(bytes(flipped))
    for damage in damages:
        path.write_bytes(damage)
        assert cache.table("a-0", lambda: table(1)) == table(1)
        assert path.read_bytes() == content
        assert cache.table("a-0", never) == table(1)


def test_the_longest_unused_data_sets_are_evicted_first(tmp_path: Path):
    old = cache_of(tmp_path, 10**6, "old")
    for number in range(5):
        old.table(f"old-{number}", lambda: table(0))
        set_age(tmp_path, f"old-{number}", seconds=100 - number)
    size = bytes_in(tmp_path) // 5
    cache = cache_of(tmp_path, 6 * size, "new")
    cache.table("old-0", never)  # is used now, so 1 is the least recently used
    for number in range(3):
        cache.table(f"new-{number}", lambda: table(1))
    assert entries(tmp_path) == ["new-0", "new-1", "new-2", "old-0", "old-3", "old-4"][:6]
    assert bytes_in(tmp_path) <= 6 * size


def test_the_size_limit_holds_and_a_data_set_does_not_evict_its_own_entries(tmp_path: Path):
    size = 1000
    cache_of(tmp_path).table("size-0", lambda: table(0))
    size = bytes_in(tmp_path)
    (tmp_path / "size-0.arrow").unlink()
    cache = cache_of(tmp_path, 4 * size, "a")
    for _ in range(2):
        found = []
        for number in range(8):
            loads: list[int] = []
            assert cache.table(f"a-{number}", lambda: loads.append(1) or table(1)) == table(1)  # noqa: B023
            found.append(not loads)
        assert bytes_in(tmp_path) <= 4 * size
    assert found == [True] * 4 + [False] * 4
    again = cache_of(tmp_path, 3 * size, "a")  # the limit is lower now
    for number in range(4):
        set_age(tmp_path, f"a-{number}", seconds=100 - number)
    again.table("a-8", lambda: table(1))
    assert bytes_in(tmp_path) <= 3 * size
    assert "a-0" not in entries(tmp_path)


def test_workers_on_a_node_read_a_row_group_once(tmp_path: Path):
    loads: list[int] = []

    def load() -> pa.Table:
        loads.append(1)
        time.sleep(0.05)
        return table(1)

    with ThreadPoolExecutor(6) as pool:
        caches = [cache_of(tmp_path) for _ in range(6)]
        results = list(pool.map(lambda cache: cache.table("a-0", load), caches))
    assert results == [table(1)] * 6
    assert len(loads) == 1
    assert entries(tmp_path) == ["a-0"]


def test_a_worker_that_dies_while_writing_leaves_no_lock(tmp_path: Path):
    code = (
        "import os, signal\nfrom raytrain_ddp.data.formats.disk_cache import DiskCache\n"
        f"cache = DiskCache({str(tmp_path)!r}, 10**6, ())\n"
        "cache.table('a-0', lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["a-0.part"]
    (tmp_path / "b-0.part").write_bytes(b"of another dead one")
    cache = cache_of(tmp_path)
    assert cache.table("a-0", lambda: table(1)) == table(1)
    assert entries(tmp_path) == ["a-0"]  # b-0.part was cleared away
    assert cache.table("a-0", never) == table(1)


def test_the_wait_for_a_worker_that_hangs_while_writing_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hanging, gate = threading.Event(), threading.Event()

    def load() -> pa.Table:
        hanging.set()
        assert gate.wait(TIMEOUT_S)
        return table(1)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cache_of(tmp_path).table, "a-0", load)
        assert hanging.wait(TIMEOUT_S)
        monkeypatch.setattr(disk_cache_module, "_WAIT_S", 0.05)
        assert cache_of(tmp_path).table("a-0", lambda: table(2)) == table(2)
        gate.set()
        assert other.result(TIMEOUT_S) == table(1)
    assert cache_of(tmp_path).table("a-0", never) == table(1)


def test_a_full_disk_or_an_impossible_folder_is_reported_once_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cache = cache_of(tmp_path)
    cache.table("a-0", lambda: table(1))

    def full(file: int, content: Any) -> None:
        os.write(file, b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_cache_module, "_write", full)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert cache.table(f"b-{number}", lambda: table(2)) == table(2)
    assert cache.table("a-0", never) == table(1)
    assert entries(tmp_path) == ["a-0"]
    assert [record.getMessage() for record in caplog.records] == [
        f"data.cache = {tmp_path}: No space left on device: row groups are read from the store "
        "instead."
    ]
    caplog.clear()
    (tmp_path / "file").touch()
    assert cache_of(tmp_path / "file").table("a-0", lambda: table(1)) == table(1)
    assert len(caplog.records) == 1
