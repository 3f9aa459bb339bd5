"""Which sample goes where: the order of an epoch, and its cut into steps and slots.

Pure functions of (seed, epoch, step, slot); nothing here knows how many workers there are until the
last function deals slots to them. The position in the data is two integers, so any step can be
reached at once and there is no loader state to save.

    epoch order   row ids 0..rows-1, permuted by (seed, epoch)
    lanes         the order cut into `slots` runs of equal length (+-1)
    step k        slot j takes places [k * micro_batch, (k + 1) * micro_batch) of lane j

So every row is used exactly once an epoch, the last step is smaller, and a slot reads its row
groups one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

_EPOCH_STREAM = 0x5EED_0001  # keeps the shuffle's random bits apart from those of other uses
_WINDOW_STREAM = 0x5EED_0002
_WINDOWS_KEPT = 64


@dataclass(frozen=True)
class Plan:
    """The cut of an epoch of `rows` samples into steps of `slots` micro-batches."""

    rows: int
    slots: int
    micro_batch: int

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.rows // self.slots)
        return -(-longest // self.micro_batch)

    def span(self, step: int, slot: int) -> tuple[int, int]:
        """Places [start, stop) of the epoch order that `slot` takes in `step` of the epoch."""
        lane_start = slot * self.rows // self.slots
        lane_stop = (slot + 1) * self.rows // self.slots
        start = min(lane_start + step * self.micro_batch, lane_stop)
        return start, min(start + self.micro_batch, lane_stop)

    def samples(self, step: int) -> int:
        """Samples in `step` of the epoch, over all slots."""
        spans = (self.span(step, slot) for slot in range(self.slots))
        return sum(stop - start for start, stop in spans)


def deal(items: int, world_size: int, rank: int) -> range:
    """The contiguous run of `items` (slots, or chunks of an evaluation) that `rank` works on."""
    return range(rank * items // world_size, (rank + 1) * items // world_size)


class EpochOrder:
    """The order of all rows in one epoch, read in pieces.

    Args:
        blocks: rows in each block, shape (blocks,); row ids count through the blocks.
        shuffle: "full" permutes all rows (8 bytes of memory a row); "block" permutes the blocks,
            then the rows within each window of `window` consecutive blocks (8 bytes a block);
            "none" keeps the stored order, for evaluation.
    """

    def __init__(
        self,
        blocks: Rows,
        shuffle: Literal["full", "block", "none"],
        seed: int,
        epoch: int,
        window: int = 16,
    ) -> None:
        self.rows = int(blocks.sum())
        self._permutation: Rows | None = None
        self._key = (seed, epoch)
        if shuffle == "full":
            self._permutation = _permutation(self.rows, seed, epoch, _EPOCH_STREAM)
            return
        starts = np.cumsum(blocks) - blocks
        if shuffle == "block":
            order = _permutation(len(blocks), seed, epoch, _EPOCH_STREAM)
            starts, blocks = starts[order], blocks[order]
        self._window = window if shuffle == "block" else 0
        self._block_starts, self._block_rows = starts, blocks
        self._ends = np.cumsum(blocks)  # (blocks,) place in the order at which each block ends
        # Lanes and threads read in turns, so the newest few are kept.
        self._read_window = lru_cache(maxsize=_WINDOWS_KEPT)(self._make_window)

    def read(self, start: int, stop: int) -> Rows:
        """Row ids at places [start, stop) of the epoch, shape (stop - start,)."""
        if self._permutation is not None:
            return self._permutation[start:stop]
        if stop <= start:
            return np.empty(0, np.int64)
        if not self._window:
            return np.arange(start, stop, dtype=np.int64)
        first = int(np.searchsorted(self._ends, start, side="right")) // self._window
        last = int(np.searchsorted(self._ends, stop - 1, side="right")) // self._window
        rows = np.concatenate([self._read_window(w) for w in range(first, last + 1)])
        offset = self._place(first)
        return rows[start - offset : stop - offset]

    def _place(self, window: int) -> int:
        """The place in the order at which a window begins."""
        block = window * self._window
        return int(self._ends[block - 1]) if block else 0

    def _make_window(self, window: int) -> Rows:
        blocks = slice(window * self._window, (window + 1) * self._window)
        pieces = zip(self._block_starts[blocks], self._block_rows[blocks], strict=True)
        stored = np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in pieces])
        seed, epoch = self._key
        shuffled: Rows = stored[_permutation(len(stored), seed, epoch, _WINDOW_STREAM + window)]
        return shuffled


def runs_of(rows: int, length: int) -> Rows:
    """Blocks of `length` rows for data that has none of its own, shape (blocks,)."""
    full, rest = divmod(rows, length)
    return np.array([length] * full + [rest] * (rest > 0), dtype=np.int64)


def _permutation(n: int, seed: int, epoch: int, stream: int) -> Rows:
    """Sorts n random 64-bit keys. Philox's raw bits are the same in every version of NumPy (its
    `permutation` is not promised to be); the stable sort makes even equal keys deterministic."""
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=[0, 0, 0, epoch])
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.int64, copy=False)
