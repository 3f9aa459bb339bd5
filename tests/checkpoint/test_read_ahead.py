"""Large files in object stores: several ranges are read concurrently, with the same bytes."""

from __future__ import annotations

import hashlib
import random
import threading
from typing import Any

import pyarrow.fs as pafs
import pytest
from faulty_storage import content, manifest
from s3 import S3

from raytrain_ddp.checkpoint import read_ahead
from raytrain_ddp.checkpoint.manifest import DamagedError
from raytrain_ddp.checkpoint.read_ahead import RANGES
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.checkpoint.streams import new_memory

CHUNK = 3 * 4096
SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 20 * CHUNK, 20 * CHUNK + 7]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(read_ahead, "RANGED_BYTES", 1)


def draw(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(folder: Storage, name: str, size: int) -> tuple[memoryview, str, bytes]:
    """The content in two buffers, its hash, and the progress observed during the read."""
    view, cut, seen = new_memory(size), size // 3, []
    digest = folder.read_into(name, [view[:cut], view[cut:]], lambda c: seen.append(bytes(c)))
    return view, digest, b"".join(seen)


@pytest.mark.usefixtures("small")
def test_ranges_of_an_object_add_up_to_the_file(s3: S3):
    folder = open_storage(s3.uri("same"))
    for size in SIZES:
        s3.put("same/file", data := draw(size))
        assert read(folder, "file", size) == (data, sha256(data), data)
        assert folder.sha256("file") == sha256(data)


@pytest.mark.usefixtures("small")
def test_several_ranges_are_read_concurrently_and_each_byte_once(s3: S3):
    folder, data = open_storage(s3.uri("many")), draw(20 * CHUNK + 7)
    s3.put("many/file", data)
    s3.most_at_once(delay_s=0.03)
    assert read(folder, "file", len(data))[0] == data
    assert 3 <= s3.most_at_once(delay_s=0.0) <= RANGES
    assert read(folder, "file", len(data))[0] == data
    asked = [request.range.removeprefix("bytes=").split("-") for request in s3.gets()]
    ranges = sorted((int(first), int(last)) for first, last in asked)
    assert [first for first, _ in ranges] == [*range(0, len(data), CHUNK)]
    assert sum(last + 1 - first for first, last in ranges) == len(data)


@pytest.mark.usefixtures("small")
def test_a_failed_range_is_retried_and_a_failing_store_leaves_no_reader_threads(s3: S3):
    folder, data = open_storage(s3.uri("fail")), draw(20 * CHUNK)
    s3.put("fail/file", data)
    s3.fail(2)
    assert read(folder, "file", len(data))[1] == sha256(data)
    assert s3.failing()["GET"] == 0
    once = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
    fs = pafs.S3FileSystem(
        **{"access_key": "test", "secret_key": "test", "scheme": "http", "region": "us-east-1"},
        **{"endpoint_override": f"127.0.0.1:{s3.port}", "retry_strategy": once},
    )
    s3.fail(1)
    try:
        with pytest.raises(OSError, match="500"):
            read(Storage(fs, "bucket/fail", False), "file", len(data))
    finally:
        s3.fail(0)
    assert not [each for each in threading.enumerate() if each.name.startswith("ranges")]


@pytest.mark.usefixtures("small")
def test_a_damaged_byte_and_a_truncated_file_are_detected(s3: S3):
    store = CheckpointStore(open_storage(s3.uri("damage")))
    files = {"model.safetensors": draw(20 * CHUNK), "state.json": b"{}"}
    good = store.commit(manifest(1), files)
    good.verify()
    assert content(good) == files
    damaged = bytearray(files["model.safetensors"])
    damaged[11 * CHUNK] ^= 1
    short = files["model.safetensors"][: 7 * CHUNK + 5]
    for stored in (bytes(damaged), short):
        s3.put("damage/step-00000001-a0001/model.safetensors", stored)
        for look in (good.verify, lambda: good.read("model.safetensors")):
            with pytest.raises(DamagedError, match="model"):
                look()
    # A file truncated between the size check and the read has another hash.
    whole = len(files["model.safetensors"])
    assert good.storage.read_into("model.safetensors", [new_memory(whole)]) == sha256(short)


def asynchronous(found: dict[str, bytes], asked: list[tuple[int, int]]) -> Any:
    """An fsspec file system with an event loop."""
    asyn = pytest.importorskip("fsspec.asyn")

    class Cloud(asyn.AsyncFileSystem):  # type: ignore[misc]
        cachable = False

        async def _cat_file(self, path: str, start: int, end: int, **_: Any) -> bytes:
            asked.append((start, end))
            return found[path][start:end]

    return pafs.PyFileSystem(pafs.FSSpecHandler(Cloud()))


@pytest.mark.usefixtures("small")
def test_ranges_of_an_fsspec_file_add_up_to_the_file():
    for size in SIZES:
        data, asked = draw(size), list[tuple[int, int]]()
        folder = Storage(asynchronous({"place/file": data}, asked), "place", False)
        assert read(folder, "file", size) == (data, sha256(data), data)
        assert sorted(asked) == [(at, min(size, at + CHUNK)) for at in range(0, size, CHUNK)]


def test_a_large_file_is_written_in_parts(s3: S3):
    folder, data = open_storage(s3.uri("parts")), draw(25 * 2**20)
    s3.requests()
    assert folder.write("file", data) == (len(data), sha256(data))
    parts = [r for r in s3.requests() if r.method == "PUT"]
    assert len(parts) == 3
    assert all("partNumber" in part.query for part in parts)
    assert folder.sha256("file") == sha256(data)
