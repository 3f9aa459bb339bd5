"""Row groups in memory: read in advance, exactly once, within a memory limit.

The order of an epoch visits each row once, so a block is finished when all its rows have been
read, and is dropped at once. (If all blocks fit, they stay.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.sample_rng import RowMask, Rows

Image = bytes | BadRecord
_THREADS = 64  # in all: as many as threads that need a block now, and those that read in advance


@dataclass(frozen=True)
class ImageGroup:
    """A row group in memory: Arrow arrays from which rows are copied when they are read."""

    labels: list[Any]
    nbytes: int
    images: Any = None
    paths: Any = None

    def image(self, place: int) -> Image | str:
        """The image, or the path of its file."""
        if self.images is not None:
            image = self.images[place].as_py()
            if image is not None:
                return bytes(image)
        path = None if self.paths is None else self.paths[place].as_py()
        return str(path) if path else BadRecord("the image is null")


@dataclass(eq=False)
class _Kept:
    size_bytes: int  # expected, then measured
    unread: RowMask  # (rows,): the rows still to be read in this pass over the data
    content: Future[ImageGroup]


class RowGroupCache:
    """Blocks that are loaded by threads of their own, on demand or in advance.

    Thread-safe: threads wait for each other only for the same block.

    Args:
        load: block -> its content. Called by several threads concurrently, for different blocks.
        sizes: approximate bytes of each in memory, shape (blocks,).
        limit_bytes: maximum bytes of blocks kept and read in advance; may be exceeded by a block
            that is needed now and by blocks whose rows are being copied, if nothing can be dropped.
        ahead: maximum number of blocks read in advance concurrently.
        used: block -> whether each of its rows is ever read, shape (rows in the block,).
    """

    def __init__(
        self,
        load: Callable[[int], ImageGroup],
        sizes: Rows,
        limit_bytes: int,
        ahead: int,
        used: Callable[[int], RowMask],
    ) -> None:
        self._load, self._sizes, self._used = load, sizes, used
        self._limit, self._most_ahead = limit_bytes, ahead
        self._all_fit = int(sizes.sum()) <= limit_bytes
        self._lock = Lock()
        self._kept: dict[int, _Kept] = {}  # least recently used first
        self._wanted: dict[int, None] = {}  # to be read in advance, in this order
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="row-groups")

    def get(self, block: int, places: Rows) -> ImageGroup:
        """A block of which the caller reads the rows at `places`, shape (n,)."""
        with self._lock:
            self._wanted.pop(block, None)
            if block not in self._kept:
                self._make_room(block)
                self._begin(block)
            kept = self._kept[block] = self._kept.pop(block)  # now the last one
            kept.unread[places] = False
            if done := not kept.unread.any():
                kept.unread = self._used(block)  # in the next pass over the data
        content = kept.content.result()
        with self._lock:
            if done and not self._all_fit:
                self._drop(block, kept)
            self._read_ahead()
        return content

    def ahead(self, blocks: Iterable[int]) -> None:
        """Announces which blocks will be needed next, in this order. Returns at once.

        Not for rows that may have been read already: their blocks would be read again.
        """
        with self._lock:
            self._wanted |= dict.fromkeys(block for block in blocks if block not in self._kept)
            self._read_ahead()

    def close(self) -> None:
        """Ends the threads after their current reads. Cached blocks and `get` remain usable."""
        with self._lock:
            self._wanted.clear()
            pool = self._pool
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="row-groups")
        pool.shutdown()

    def _loaded(self, block: int) -> ImageGroup:
        """Loads a block. On an error, the waiting threads get it; later calls try again."""
        try:
            content = self._load(block)
        except BaseException:
            with self._lock:
                del self._kept[block]
            raise
        with self._lock:
            self._kept[block].size_bytes = content.nbytes
        return content

    def _go_on(self, _: object) -> None:
        with self._lock:
            self._read_ahead()

    # The following methods require the lock.

    def _begin(self, block: int) -> None:
        content = self._pool.submit(self._loaded, block)
        self._kept[block] = _Kept(int(self._sizes[block]), self._used(block), content)
        content.add_done_callback(self._go_on)

    def _fits(self, block: int) -> bool:
        others = () if self._all_fit else self._kept.values()
        return sum(each.size_bytes for each in others) + int(self._sizes[block]) <= self._limit

    def _make_room(self, block: int) -> None:
        """Drops blocks early to make room for one that is needed now."""
        for other, kept in [*self._kept.items()]:
            if self._fits(block):
                return
            if kept.content.done():
                self._drop(other, kept)

    def _drop(self, block: int, kept: _Kept) -> None:
        if self._kept.get(block) is kept:
            del self._kept[block]

    def _read_ahead(self) -> None:
        """Begins as many as may be read at a time, until the next one does not fit."""
        while self._wanted and self._fits(block := next(iter(self._wanted))):
            if sum(not each.content.done() for each in self._kept.values()) >= self._most_ahead:
                return
            del self._wanted[block]
            self._begin(block)
