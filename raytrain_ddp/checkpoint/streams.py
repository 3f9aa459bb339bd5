"""Reads and writes files of gigabytes in chunks, which a thread hashes in the meantime."""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

BytesLike = bytes | bytearray | memoryview
Content = BytesLike | Iterable[BytesLike]  # of a file: all at once or in chunks

CHUNK_BYTES = 16 * 2**20
_MOST_WAITING = 8  # chunks that are not hashed yet; they may be copies
# Arrow copies what it sends to S3 in the background: without an end, where the network is slow.
_MOST_UNSENT_BYTES = 2**28
_SMALL_BYTES = 2**16  # hashed at once: passing it to a thread takes longer


class Hasher:
    """sha256 of chunks in their order, computed by a thread while the caller reads or writes more.

    A chunk must not change until `hexdigest` is called.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hasher")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Hasher:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def add(self, chunk: BytesLike) -> None:
        if len(chunk) < _SMALL_BYTES and not self._waiting:
            self._digest.update(chunk)
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digest.update, chunk))

    def hexdigest(self) -> str:
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()


def no_one(_: memoryview) -> None:
    """For a caller that needs the file only as a whole."""


def write_hashed(stream: Any, data: Content) -> tuple[int, str]:
    """Writes to a pyarrow stream; returns the size in bytes and the hex sha256."""
    size_bytes = since_bytes = 0
    with Hasher() as hasher:
        for view in views_of(data):
            size_bytes += len(view)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                hasher.add(chunk)
                stream.write(chunk)
                since_bytes += len(chunk)
                if since_bytes >= _MOST_UNSENT_BYTES:
                    stream.flush()
                    since_bytes = 0
        return size_bytes, hasher.hexdigest()


def read_hashed(
    stream: Any, views: Iterable[memoryview], on_chunk: Callable[[memoryview], None]
) -> str:
    """Fills memory from a stream; returns the hex sha256 of what was there.

    Args:
        views: one after another, together as large as the file.
        on_chunk: receives each chunk of the memory once it is read, before its hash is known.
    """
    with Hasher() as hasher:
        for view in views:
            done = 0
            while got := stream.readinto(view[done : done + CHUNK_BYTES]):
                chunk = view[done : done + got]
                hasher.add(chunk)
                on_chunk(chunk)
                done += got
        return hasher.hexdigest()


def new_memory(size_bytes: int) -> memoryview:
    """Memory zeroed only by the kernel: zeroing slow new pages again takes as long as reading.

    Not in huge pages: where a virtual machine gives free memory back, these are what it has to ask
    for again, for 2.7 s per GB instead of 0.6.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, size_bytes, flags) if size_bytes else bytearray())


def joined(pieces: Sequence[BytesLike]) -> memoryview:
    """One copy of all of them, in memory of its own."""
    data, done = new_memory(sum(map(len, pieces))), 0
    for piece in pieces:
        data[done : done + len(piece)] = piece
        done += len(piece)
    return data


def in_chunks(pieces: Sequence[BytesLike]) -> Iterator[memoryview]:
    """The same bytes in larger pieces of at most CHUNK_BYTES; only smaller ones are copied."""
    waiting: list[memoryview] = []
    size_bytes = 0  # of those waiting
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            part = memoryview(piece)[start : start + CHUNK_BYTES]
            if size_bytes + len(part) > CHUNK_BYTES:
                yield _one(waiting)
                waiting, size_bytes = [], 0
            waiting.append(part)
            size_bytes += len(part)
    if waiting:
        yield _one(waiting)


def _one(pieces: Sequence[memoryview]) -> memoryview:
    alone = len(pieces) == 1 and not pieces[0].readonly  # torch takes none that is
    return pieces[0] if alone else joined(pieces)


def views_of(data: Content) -> Iterator[memoryview]:
    try:
        whole = memoryview(data)  # type: ignore[arg-type]
    except TypeError:  # not a buffer
        yield from (memoryview(piece).cast("B") for piece in data)  # type: ignore[arg-type]
    else:
        yield whole.cast("B")
