"""Row groups on disk: each is read once, within limits."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raytrain_ddp.data.formats import disk_cache as disk_cache_module
from raytrain_ddp.data.formats.disk_cache import DiskCache
from raytrain_ddp.errors import DataError

TIMEOUT_S = 20.0


def table(value: int, size: int = 1000) -> pa.Table:
    return pa.table({"image": [bytes([value]) * size], "label": [value]})


def cache_of(folder: Path, limit_bytes: int = 10**6, *keys: str) -> DiskCache:
    return DiskCache(str(folder), limit_bytes, keys)


def never() -> Any:
    raise AssertionError("was to be found in the cache")


def fails() -> Any:
    raise DataError("block 1")


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
        cache_of(tmp_path).table("a-1", fails)
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
