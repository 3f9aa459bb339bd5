"""Reads several chunks of a large file at once, and passes them on in order.

A connection to an object store has a part of the network's bandwidth, and each request waits for
its answer: so ranges of a file are requested over several connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.streams import CHUNK_BYTES
from raytrain_ddp.uri import fsspec_inside

RANGED_BYTES = 2**20  # smaller files are not read into several tensors, with a request for each
RANGES = 8  # requests under way: what the network takes, and memory
_LEAST_BYTES = 2**22  # of a request; a small file is divided among fewer

Fetch = Callable[[int], memoryview]


class ReadAhead:
    """A file from its beginning.

    Args:
        fetch: reads the chunk at an offset; it is shorter only at the end of the file. Called
            from the threads.
        chunk_bytes: the size of a chunk.
        ahead: this many are read before they are needed.
    """

    def __init__(
        self,
        fetch: Fetch,
        size_bytes: int,
        chunk_bytes: int,
        threads: ThreadPoolExecutor,
        ahead: int,
    ) -> None:
        self._fetch, self._size, self._step = fetch, size_bytes, chunk_bytes
        self._threads, self._most, self._next = threads, ahead, 0
        self._ahead: deque[Future[memoryview]] = deque()
        self._rest = memoryview(b"")
        self._advance()

    def readinto(self, view: memoryview) -> int:
        """Fills `view`; returns how many bytes it got, fewer only at the end of the file."""
        done = 0
        while done < len(view) and (self._rest or self._advance()):
            count = min(len(view) - done, len(self._rest))
            # NumPy copies without the GIL, so that other threads can run.
            np.copyto(_as_array(view[done : done + count]), _as_array(self._rest[:count]))
            self._rest = self._rest[count:]
            done += count
        return done

    def read(self, _: int) -> memoryview:
        """The next chunk, valid until the next call; empty at the end of the file."""
        chunk = self._rest if self._rest or self._advance() else memoryview(b"")
        self._rest = memoryview(b"")
        return chunk

    def _advance(self) -> bool:
        while len(self._ahead) < self._most and self._next < self._size:
            self._ahead.append(self._threads.submit(self._fetch, self._next))
            self._next += self._step
        if not self._ahead:
            return False
        self._rest = self._ahead.popleft().result()
        return len(self._rest) > 0


def reading(fs: Any, path: str, size_bytes: int) -> Any:
    """A stream of a file, for `with`. Raises OSError, also while it is read.

    Args:
        size_bytes: of the file; 0 if it is unknown and small.
    """
    if is_ranged(fs, size_bytes):
        return reading_ranges(fs, path, size_bytes)
    # Without compression=None, pyarrow would guess it from the name and decompress "x.gz".
    return fs.open_input_stream(path, compression=None)


def is_ranged(fs: Any, size_bytes: int) -> bool:
    """Whether `reading_ranges` reads a file of this size: of a store that answers several threads
    at once. Of fsspec's, those do that have an event loop."""
    inner = fsspec_inside(fs)
    if isinstance(fs, (pafs.LocalFileSystem, pafs.PyFileSystem)) and inner is None:
        return False
    return size_bytes >= RANGED_BYTES and (inner is None or bool(inner.async_impl))


@contextmanager
def reading_ranges(fs: Any, path: str, size_bytes: int) -> Iterator[ReadAhead]:
    """Reads at most `size_bytes` of a file in an object store."""
    with ExitStack() as stack:
        if inner := fsspec_inside(fs):
            read_at = partial(_read_fsspec, inner, path)
        else:
            file = stack.enter_context(fs.open_input_file(path))
            read_at, size_bytes = file.read_at, min(size_bytes, file.size())

        step = min(CHUNK_BYTES, max(_LEAST_BYTES, -(-size_bytes // RANGES)))

        def fetch(offset: int) -> memoryview:
            count = min(step, size_bytes - offset)
            data = memoryview(read_at(count, offset))
            if len(data) != count:  # more: the store does not know ranges
                raise OSError(f"{path}: {len(data)} bytes came, not the {count} from {offset} on")
            return data

        # They end before the file is closed.
        threads = stack.enter_context(ThreadPoolExecutor(RANGES, thread_name_prefix="ranges"))
        yield ReadAhead(fetch, size_bytes, step, threads, RANGES)


def _read_fsspec(inner: Any, path: str, count: int, offset: int) -> Any:
    return inner.cat_file(path, start=offset, end=offset + count)


def _as_array(view: memoryview) -> Any:
    return np.frombuffer(view, dtype=np.uint8)
