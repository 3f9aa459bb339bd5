"""Caches row groups of remote files on a node's local disk, shared by the workers of the node.

    NAME.arrow   a row group's columns: an Arrow IPC file, then magic bytes, its CRC and its size
    NAME.part    being written; the writer holds a lock on it, which ends with its process
    usage        bytes in the folder, changed under a lock

An entry is renamed into place when it is complete, and verified when it is opened.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from raytrain_ddp.files import expanded

_log = logging.getLogger("raytrain_ddp")

_TRAILER = struct.Struct("<4sIQ")  # magic bytes, CRC, bytes before the trailer
_MAGIC = b"rtc1"
_SPARE_SHARE = 0.02  # of the limit; freed in addition, to evict less often
_FULL_S = 60.0  # no attempt to free space for this long
_WAIT_S = 120.0  # for another worker reading the same row group
_LOOK_S = 0.01


class DiskCache:
    """Arrow tables by name, at most `limit_bytes` of them on disk.

    When the folder is full, the least recently used entries of other data sets are evicted, unless
    they were used since this object was created; after that, new tables are not cached. (Each epoch
    reads everything once, so an LRU cache would evict everything before it is used again.) Errors
    of the cache are reported once and otherwise ignored.

    Args:
        keys: the first parts of the names, before "-", that belong to this data set.
    """

    def __init__(self, folder: str, limit_bytes: int, keys: Collection[str]) -> None:
        self._folder = expanded(folder)
        self._limit, self._keys = limit_bytes, frozenset(keys)
        self._opened = time.time()
        self._full_until = 0.0
        self._reported = Lock()
        self._writes = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)

    def table(self, name: str, load: Callable[[], Any]) -> Any:
        """The table of that name if cached, else the result of `load`, which is then cached."""
        path = self._folder / f"{name}.arrow"
        table = _read(path)
        if table is not None:
            return table
        with self._only_one(name) as part:
            table = _read(path)  # another worker may have read it in the meantime
            if table is None:
                table = load()
                if part is not None:
                    self._keep(table, part, path)
        return table

    def _keep(self, table: Any, part: int, path: Path) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue()
        try:
            if self._reserve(part, len(content) + _TRAILER.size):
                _write(part, content)
                os.replace(path.with_suffix(".part"), path)
        except OSError as error:
            self._give_up(error)

    @contextmanager
    def _only_one(self, name: str) -> Iterator[int | None]:
        """Waits while another worker reads the same table; then yields a file to write to, or None.

        A worker that waited finds the entry of the other. If the other died, its lock is released.
        """
        part, path = None, self._folder / f"{name}.part"
        if self._writes and time.monotonic() >= self._full_until:
            try:
                part = _lock(path)
            except OSError as error:
                self._give_up(error)
        try:
            yield part
        finally:
            if part is not None:
                if _is_at(part, path):  # nothing was cached
                    path.unlink()
                os.close(part)

    def _reserve(self, part: int, size: int) -> bool:
        """Allocates the file at its full size, if there is room in the folder."""
        usage = os.open(self._folder / "usage", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(usage, fcntl.LOCK_EX)
            recorded = os.pread(usage, 32, 0)
            used = int(recorded) if recorded.isdigit() else self._limit
            if used + size > self._limit:
                used = self._make_room(size)
            fits = used + size <= self._limit
            if fits:
                os.truncate(part, size)
            else:
                self._full_until = time.monotonic() + _FULL_S
            os.pwrite(usage, b"%032d" % (used + size * fits), 0)
            return fits
        finally:
            os.close(usage)

    def _make_room(self, size: int) -> int:
        """Evicts entries; returns the bytes in the folder."""
        used, old = 0, []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):
                is_part = entry.name.endswith(".part")
                if not (is_part or entry.name.endswith(".arrow")):
                    continue
                if is_part and _is_left_behind(entry.path):
                    continue
                status = entry.stat()
                used += status.st_size
                is_own = entry.name.partition("-")[0] in self._keys
                if not is_part and status.st_mtime < self._opened:
                    old.append((is_own, status.st_mtime, status.st_size, entry.path))
        if used + size > self._limit:
            for is_own, _, freed, path in sorted(old):
                # Entries of this data set only if there are too many: the limit was higher before.
                if used <= self._limit * (1 - _SPARE_SHARE) - size * (not is_own):
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= freed
        return used

    def _give_up(self, error: OSError) -> None:
        with self._reported:
            if self._writes:
                self._writes = False
                _log.warning(
                    "data.cache = %s: %s: row groups are read from the store instead.",
                    self._folder,
                    error.strerror or error,
                )


def _read(path: Path) -> Any:
    """An entry, mapped into memory; None if there is none. A damaged one is deleted."""
    try:
        if path.stat().st_size <= _TRAILER.size:
            raise ValueError("truncated")
        with pa.memory_map(str(path)) as source:
            content = source.read_buffer()
        size = len(content) - _TRAILER.size
        body = content.slice(0, size)
        if content.slice(size).to_pybytes() != _trailer(body):
            raise ValueError("damaged")
        with pa.ipc.open_file(body) as reader:
            table = reader.read_all()
        os.utime(path)  # marks it as used now
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        with suppress(OSError):
            path.unlink()
        return None
    return table


def _write(file: int, content: Any) -> None:
    with open(file, "wb", closefd=False) as stream:
        stream.write(content)
        stream.write(_trailer(content))


def _trailer(body: Any) -> bytes:
    return _TRAILER.pack(_MAGIC, zlib.crc32(body), len(body))


def _lock(path: Path) -> int | None:
    """A locked empty file at `path`; None if another process holds the lock for very long."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):  # not a file that has since become the entry
                os.truncate(file, 0)
                return file
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:
            os.close(file)
            raise
        os.close(file)
    return None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_left_behind(part: str) -> bool:
    """Deletes a file whose writer has died; returns whether it did."""
    file = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if _is_at(file, Path(part)):
            os.unlink(part)
        return True
    finally:
        os.close(file)
