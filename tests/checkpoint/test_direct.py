"""Large files on local disks bypass the page cache, with the same bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_ddp.checkpoint import direct
from raytrain_ddp.checkpoint.direct import (
    UnsupportedError,
    is_cached,
    reading_direct,
    write_direct,
)
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.streams import new_memory


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(direct, "CHUNK_BYTES", 3 * 4096)
    monkeypatch.setattr(direct, "DIRECT_BYTES", 1)
    try:
        write_direct(str(tmp_path / "probe"), b"1")
    except UnsupportedError:
        pytest.skip("this file system has no O_DIRECT")


SIZES = [1, 4095, 4096, 4097, 3 * 4096, 3 * 4096 + 1, 20 * 4096, 100_003]


@pytest.mark.parametrize("size", SIZES)
def test_a_direct_write_has_the_same_bytes(size: int, tmp_path: Path) -> None:
    draw, path = random.Random(size), tmp_path / "file"
    data = draw.randbytes(size)
    cuts = sorted(draw.choices(range(size + 1), k=5))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert write_direct(str(path), pieces) == (size, hashlib.sha256(data).hexdigest())
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
def test_a_direct_read_has_the_same_bytes(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data := random.Random(size).randbytes(size))
    view = new_memory(size)
    with reading_direct(str(path)) as stream:
        cut = size // 3
        assert stream.readinto(view[:cut]) == cut
        assert stream.readinto(view[cut:]) == size - cut
        assert stream.readinto(new_memory(8)) == 0
    assert view == data


def test_querying_the_page_cache_does_not_fill_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_direct(str(path), random.Random(1).randbytes(2**20))
    assert not is_cached(str(path))
    assert not is_cached(str(path))
    path.read_bytes()
    assert is_cached(str(path))


def refused(code: int, flags: Sequence[int]) -> Any:
    opened = os.open

    def act(path: Any, flag: int, *given: Any, **named: Any) -> int:
        if flag & os.O_DIRECT and flag & os.O_ACCMODE in flags:
            raise OSError(code, os.strerror(code))
        return opened(path, flag, *given, **named)

    return act


@pytest.mark.parametrize("flags", [(os.O_WRONLY,), (os.O_RDONLY,), (os.O_WRONLY, os.O_RDONLY)])
def test_without_direct_io_support_files_are_written_and_read_normally(
    flags: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refused(errno.EINVAL, flags))
    monkeypatch.setattr(direct, "is_cached", lambda _: False)
    file, folder = encode_tensors({"a": torch.arange(50_000.0)}), open_storage(str(tmp_path))
    size, digest = folder.write("x", file)
    data = b"".join(file)
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    view = new_memory(size)
    assert folder.read_into("x", [view[:70], view[70:]]) == digest
    assert view == data == (tmp_path / "x").read_bytes()


def test_a_full_disk_is_not_treated_as_missing_direct_io_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    file = encode_tensors({"a": torch.arange(50_000.0)})
    with pytest.raises(OSError, match="full"):
        open_storage(str(tmp_path)).write("x", file)
