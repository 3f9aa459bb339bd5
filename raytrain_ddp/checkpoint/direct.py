"""Large files on local disks, bypassing the page cache (O_DIRECT).

Its pages would be taken from data sets and other programs; and where new memory is slow, as in
virtual machines that give free memory back, filling them takes longer than the disk does.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from raytrain_ddp.checkpoint.read_ahead import ReadAhead, copy
from raytrain_ddp.checkpoint.streams import CHUNK_BYTES, Content, new_memory, views_of

DIRECT_BYTES = 2**25  # smaller files are left to the page cache
_ALIGNED = 4096
_ROOMS = 4  # of CHUNK_BYTES each
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class UnsupportedError(Exception):
    """The file system does not allow it; what was written is incomplete."""


def write_direct(path: str, data: Content) -> tuple[int, str]:
    """Writes a file durably; returns its size in bytes and hex sha256. One thread hashes and one
    writes while the next chunk is copied.

    Raises:
        UnsupportedError, OSError
    """
    digest, size_bytes = hashlib.sha256(), 0
    busy: deque[tuple[memoryview, Future[None], Future[None]]] = deque()

    def room() -> memoryview:
        if len(busy) < _ROOMS:
            return new_memory(CHUNK_BYTES)
        free, *uses = busy.popleft()
        for use in uses:
            use.result()
        return free

    with (
        _refusal(path),
        _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file,
        ThreadPoolExecutor(1) as hasher,
        ThreadPoolExecutor(1) as writer,
    ):
        for chunk, used in _filled(data, room):
            padded = -(-used // _ALIGNED) * _ALIGNED
            hashed = hasher.submit(digest.update, chunk[:used])
            written = writer.submit(_write_all, file, chunk[:padded], size_bytes)
            busy.append((chunk, hashed, written))
            size_bytes += used
        for _, *uses in busy:
            for use in uses:
                use.result()
        os.ftruncate(file, size_bytes)
        os.fsync(file)
    return size_bytes, digest.hexdigest()


@contextmanager
def reading_direct(path: str) -> Iterator[ReadAhead]:
    """Raises UnsupportedError, OSError."""
    with ExitStack() as stack:
        with _refusal(path):
            file = stack.enter_context(_opened(path, os.O_RDONLY))
            threads = stack.enter_context(ThreadPoolExecutor(2))

            def fetch(offset: int, used: memoryview) -> memoryview:
                room = used or new_memory(CHUNK_BYTES)
                return room[: _read_all(file, room, offset)]

            size_bytes = os.fstat(file).st_size
            reader = ReadAhead(fetch, size_bytes, CHUNK_BYTES, threads, _ROOMS - 1)
        yield reader


def is_cached(path: str) -> bool:
    """Whether the page cache seems to have a file: its first, middle and last byte."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        for at in (0, size // 2, size - 1):
            os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _REFUSED:  # unknown
            return True
        raise
    finally:
        os.close(file)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _refusal(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSED:
            raise UnsupportedError(path) from error
        raise


def _filled(data: Content, room: Callable[[], memoryview]) -> Iterator[tuple[memoryview, int]]:
    """The data, copied to memory of CHUNK_BYTES, and how many bytes of it are used."""
    chunk, used = room(), 0
    for view in views_of(data):
        done = 0
        while done < len(view):
            count = min(len(view) - done, CHUNK_BYTES - used)
            copy(chunk[used : used + count], view[done : done + count])
            done, used = done + count, used + count
            if used == CHUNK_BYTES:
                yield chunk, used
                chunk, used = room(), 0
    if used:
        yield chunk, used


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _read_all(file: int, room: memoryview, offset: int) -> int:
    done = 0
    while done < len(room) and (got := os.preadv(file, [room[done:]], offset + done)):
        done += got
        if got % _ALIGNED:  # the end
            break
    return done
