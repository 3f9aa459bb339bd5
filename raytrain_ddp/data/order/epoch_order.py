"""The order of samples: a permutation per epoch, divided into steps and slots.

Pure functions of (seed, epoch, step, slot), independent of the number of workers, except for
`items_of_rank`, which assigns slots to workers. The position in the data is two integers, so any
step can be reached at once and there is no loader state to save.

    epoch order   row ids 0..rows-1, permuted by (seed, epoch)
    lanes         the order divided into `slots` runs of equal length (+-1)
    step k        slot j reads places [k * micro_batch, (k + 1) * micro_batch) of lane j

So every row is used exactly once per epoch, the last step is smaller, and a slot reads its row
groups one after another. With spread repeats, the first rows of the order are used several times
instead: sample i is row i // repeats of the order, and slot j has the samples j, j + slots, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from raytrain_ddp.data.order.sample_rng import Rows, hash64, mix64

Words = npt.NDArray[np.uint64]
Shuffle = Literal["full", "block", "none"]

_EPOCH_STREAM = 0x5EED_0001  # separates the shuffle's random bits from other uses
_WINDOW_STREAM = 0x5EED_0002
_ROUNDS = 8  # of a permutation
_LEAST_BITS = 6  # fewer bits do not mix well
_ROWS_AT_ONCE = 4096  # places computed at a time in a full shuffle


@dataclass(frozen=True)
class Plan:
    """Divides an epoch of `rows` rows into steps of `slots` micro-batches.

    Args:
        micro_batch: samples.
        repeats: samples made of each row, consecutively; divides `micro_batch`.
        limit: the most steps of an epoch, which leave out the other rows; 0: all.
        spread: the samples of a row are in different slots of a step (rarely of two), no more than
            one in each, and an epoch has as many samples as there are rows; needs as many slots as
            repeats. (Repeated augmentation as in the RASampler of DeiT and torchvision.)
    """

    rows: int
    slots: int
    micro_batch: int
    repeats: int = 1
    limit: int = 0
    spread: bool = False

    @property
    def rows_at_once(self) -> int:
        """Rows per micro-batch."""
        return self.micro_batch // self.repeats

    @property
    def steps_per_epoch(self) -> int:
        if self.spread:
            steps = -(-self._used * self.repeats // (self.slots * self.micro_batch))
            return min(steps, self.limit or steps)
        longest = -(-self.rows // self.slots)
        steps = -(-longest // self.rows_at_once)
        return min(steps, self.limit or steps)

    @property
    def _used(self) -> int:
        """Rows that are used in an epoch."""
        return max(1, self.rows // self.repeats) if self.spread else self.rows

    @property
    def smallest_slot(self) -> int:
        """Samples of the smallest micro-batch that is not empty."""
        counts = (self.count(self.steps_per_epoch - 1, slot) for slot in range(self.slots))
        return min(count for count in counts if count)

    @property
    def has_empty_slots(self) -> bool:
        """Whether a slot of the last step of an epoch has no samples."""
        return not all(self.count(self.steps_per_epoch - 1, slot) for slot in range(self.slots))

    def lane(self, slot: int) -> tuple[int, int]:
        """Places [start, stop) of the epoch order that `slot` reads in the whole epoch."""
        if self.spread:
            return 0, self._used
        return slot * self.rows // self.slots, (slot + 1) * self.rows // self.slots

    def span(self, step: int, slot: int) -> tuple[int, int]:
        """Places [start, stop) of the epoch order that `slot` reads in `step` of the epoch, unless
        repeats are spread."""
        lane_start, lane_stop = self.lane(slot)
        start = min(lane_start + step * self.rows_at_once, lane_stop)
        return start, min(start + self.rows_at_once, lane_stop)

    def samples_of(self, step: int, slot: int) -> tuple[Rows, Rows]:
        """The samples of `slot` in `step` of the epoch: places of the epoch order, ascending, and
        which repeat of the row each is; shape (n,) each."""
        if self.spread:
            first = step * self.micro_batch
            numbers = np.arange(first, first + self.micro_batch) * self.slots + slot
            numbers = numbers[numbers < self._used * self.repeats]
        else:
            start, stop = self.span(step, slot)
            numbers = np.arange(start * self.repeats, stop * self.repeats)
        return numbers // self.repeats, numbers % self.repeats

    def count(self, step: int, slot: int) -> int:
        """Samples of `slot` in `step` of the epoch."""
        return len(self.samples_of(step, slot)[0])

    def samples(self, step: int) -> int:
        """Samples in `step` of the epoch, over all slots."""
        if self.spread:
            most = self.slots * self.micro_batch
            return min(max(0, self._used * self.repeats - step * most), most)
        shorter, longer = divmod(self.rows, self.slots)  # rows of a lane, and lanes with one more
        most, before = self.rows_at_once, step * self.rows_at_once
        counts = [min(max(0, rows - before), most) for rows in (shorter, shorter + 1)]
        return ((self.slots - longer) * counts[0] + longer * counts[1]) * self.repeats


def items_of_rank(items: int, world_size: int, rank: int) -> range:
    """The contiguous range of `items` (slots, or chunks of an evaluation) assigned to `rank`."""
    return range(rank * items // world_size, (rank + 1) * items // world_size)


def relative_load(items: int, world_size: int, rank: int) -> float:
    """The items of `rank` as a multiple of the other ranks' median, at least 1."""
    counts = [len(items_of_rank(items, world_size, each)) for each in range(world_size)]
    own = counts.pop(rank)
    return max(1.0, own / median(counts)) if counts and median(counts) else 1.0


class EpochOrder:
    """The order of all rows in one epoch, read in parts.

    Args:
        blocks: rows in each block, shape (blocks,); row ids are consecutive over the blocks.
        shuffle: "full" permutes all rows, in constant memory; "block" permutes the blocks, then
            the rows within each window of `window` consecutive blocks; "none" keeps the stored
            order.
        windows_kept: how many windows are cached: lanes and threads alternate between them.
    """

    def __init__(
        self,
        blocks: Rows,
        shuffle: Shuffle,
        seed: int,
        epoch: int,
        window: int = 1,
        windows_kept: int = 64,
    ) -> None:
        self.rows = int(blocks.sum())
        self._key = (seed, epoch)
        if shuffle == "block":
            order = Feistel(len(blocks), seed, epoch, _EPOCH_STREAM)(np.arange(len(blocks)))
            stops = np.cumsum(blocks)
            spans = np.stack([stops - blocks, stops], 1)[order]  # (blocks, 2): rows, in this order
            self._windows = [spans[n : n + window] for n in range(0, len(spans), window)]
            self._ends = np.cumsum([(span[:, 1] - span[:, 0]).sum() for span in self._windows])
            make = self._of_blocks
        else:
            self._ends = np.cumsum(runs_of(self.rows, _ROWS_AT_ONCE))
            self._permutation = Feistel(self.rows, seed, epoch, _EPOCH_STREAM)
            make = self._of_all if shuffle == "full" else self._in_order
        self._read_window = lru_cache(maxsize=windows_kept)(make)

    def read(self, start: int, stop: int) -> Rows:
        """Row ids at places [start, stop) of the epoch, shape (stop - start,)."""
        if stop <= start:
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        rows = np.concatenate([self._read_window(w) for w in range(first, last + 1)])
        begun = self._bounds(int(first))[0]
        return rows[start - begun : stop - begun]

    def at(self, places: Rows) -> Rows:
        """Row ids at these places of the epoch, ascending and near each other, shape (n,)."""
        if not len(places):
            return np.empty(0, np.int64)
        first = int(places[0])
        return self.read(first, int(places[-1]) + 1)[places - first]

    def _bounds(self, window: int) -> tuple[int, int]:
        """The first and one past the last place of a window."""
        return int(self._ends[window - 1]) if window else 0, int(self._ends[window])

    def _in_order(self, window: int) -> Rows:
        return np.arange(*self._bounds(window), dtype=np.int64)

    def _of_all(self, window: int) -> Rows:
        return self._permutation(self._in_order(window))

    def _of_blocks(self, window: int) -> Rows:
        stored = np.concatenate(
            [np.arange(*span, dtype=np.int64) for span in self._windows[window]]
        )
        shuffled: Rows = stored[
            sorted_permutation(len(stored), *self._key, _WINDOW_STREAM + window)
        ]
        return shuffled


def runs_of(rows: int, length: int) -> Rows:
    """Blocks of `length` rows for data without blocks of its own, shape (blocks,)."""
    full, rest = divmod(rows, length)
    return np.array([length] * full + [rest] * (rest > 0), dtype=np.int64)


class Feistel:
    """A permutation of 0..n-1 with random access, in constant memory.

    An unbalanced Feistel network on the next power of two; a value outside 0..n-1 is
    permuted again until it is inside (cycle walking; Black and Rogaway, CT-RSA 2002).
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        bits = max(_LEAST_BITS, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(hash64(*key, n, number)) for number in range(_ROUNDS)]

    def __call__(self, places: Rows) -> Rows:
        """The images of `places`, shape (k,)."""
        with np.errstate(over="ignore"):
            values = self._once(places.astype(np.uint64))
            while len(outside := np.flatnonzero(values >= self.n)):
                values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: Words) -> Words:
        low, high = values & self._low_mask, values >> self._low_bits
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= mix64(low ^ even) & self._high_mask
            low ^= mix64(high ^ odd) & self._low_mask
        return (high << self._low_bits) | low


def sorted_permutation(n: int, seed: int, epoch: int, stream: int) -> Rows:
    """A random permutation of 0..n-1, by sorting random keys. These are Philox's raw bits, which
    are the same in every version of NumPy (its `permutation` has no such guarantee). The low bits
    of each key hold the number itself, so all keys differ, and any sorting algorithm gives the same
    result."""
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=[0, 0, 0, epoch])
    width = np.uint64(max(1, (n - 1).bit_length()))
    keys = (bits.random_raw(n) << width) | np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << width) - np.uint64(1))).astype(np.int64)
