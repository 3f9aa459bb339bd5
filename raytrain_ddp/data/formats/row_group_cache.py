"""Row groups in memory: read in advance, exactly once, within a memory limit.

The order of an epoch visits each row once, so a block is finished when all its rows have been
read, and is dropped at once. (If all blocks fit, they stay.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.sample_rng import RowMask, Rows

Image = bytes | BadRecord


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


class RowGroupCache:
    """Blocks that are loaded on demand by the thread that needs them, or in advance by other
    threads.

    Thread-safe: threads wait for each other only for the same block.

    Args:
        load: block -> its content. Called by several threads concurrently, for different blocks.
        sizes: approximate bytes of each in memory, shape (blocks,).
        limit_bytes: maximum bytes of blocks kept and read in advance; may be exceeded by a block
            that is needed now and by blocks whose rows are being copied, if nothing can be dropped.
        threads: maximum number of blocks read in advance concurrently.
        used: block -> whether each of its rows is ever read, shape (rows in the block,).
    """

    def __init__(
        self,
        load: Callable[[int], ImageGroup],
        sizes: Rows,
        limit_bytes: int,
        threads: int,
        used: Callable[[int], RowMask],
    ) -> None:
        self._load, self._sizes, self._used = load, sizes, used
        self._limit, self._threads = limit_bytes, threads
        self._all_fit = int(sizes.sum()) <= limit_bytes
        self._lock = Lock()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._wanted: dict[int, None] = {}  # to be read in advance, in this order
        self._reading = 0  # blocks that the pool is reading
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="row-groups")

    def get(self, block: int, places: Rows) -> ImageGroup:
        """A block of which the caller reads the rows at `places`, shape (n,)."""
        with self._lock:
            self._wanted.pop(block, None)
            kept = self._kept.get(block)
            mine = kept is None
            if kept is None:
                self._make_room(block)
                kept = self._begin(block)
            self._kept.move_to_end(block)
            kept.unread[places] = False
            done = not kept.unread.any()
            if done:
                kept.unread = self._used(block)  # in the next pass over the data
        if mine:
            self._fill(block, kept)
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
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="row-groups")
        pool.shutdown()

    # The following methods require the lock, except `_fill` and `_fill_ahead`.

    def _begin(self, block: int) -> _Kept:
        kept = self._kept[block] = _Kept(int(self._sizes[block]), self._used(block))
        self._bytes += kept.size_bytes
        return kept

    def _fits(self, block: int) -> bool:
        return self._bytes + int(self._sizes[block]) <= self._limit

    def _make_room(self, block: int) -> None:
        """Drops blocks early to make room for one that is needed now."""
        while not self._fits(block):
            loaded = (item for item in self._kept.items() if item[1].content.done())
            if (item := next(loaded, None)) is None:
                return
            self._drop(*item)

    def _drop(self, block: int, kept: _Kept) -> None:
        if self._kept.get(block) is kept:
            del self._kept[block]
            self._bytes -= kept.size_bytes

    def _read_ahead(self) -> None:
        while self._wanted and self._reading < self._threads:
            block = next(iter(self._wanted))
            if not self._fits(block):
                return  # until other blocks are finished
            del self._wanted[block]
            self._reading += 1
            self._pool.submit(self._fill_ahead, block, self._begin(block))

    def _fill_ahead(self, block: int, kept: _Kept) -> None:
        self._fill(block, kept)
        with self._lock:
            self._reading -= 1
            self._read_ahead()

    def _fill(self, block: int, kept: _Kept) -> None:
        """Loads a block. On an error, the waiting threads get it; later calls try again."""
        try:
            content = self._load(block)
        except BaseException as error:
            with self._lock:
                self._drop(block, kept)
            kept.content.set_exception(error)
            return
        with self._lock:
            if self._kept.get(block) is kept:
                self._bytes += content.nbytes - kept.size_bytes
            kept.size_bytes = content.nbytes
        kept.content.set_result(content)


@dataclass(eq=False)
class _Kept:
    size_bytes: int  # expected, then measured
    unread: RowMask  # (rows,): the rows still to be read in this pass over the data
    content: Future[ImageGroup] = field(default_factory=Future)
