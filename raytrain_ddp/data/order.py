"""Which sample is in which step and slot, and the random numbers that belong to it.

The order of samples is a permutation per epoch, divided into steps and slots: pure functions of
(seed, epoch, step, slot), independent of the number of workers, except for `items_of_rank`, which
assigns slots to workers. The position in the data is two integers, so any step can be reached at
once and there is no loader state to save.

    epoch order   row ids 0..rows-1, permuted by (seed, epoch)
    lanes         the order divided into `slots` runs of equal length (+-1)
    step k        slot j reads places [k * micro_batch, (k + 1) * micro_batch) of lane j

So every row is used exactly once per epoch, the last step is smaller, and a slot reads its row
groups one after another. With spread repeats, the first rows of the order are used several times
instead: sample i is row i // repeats of the order, and slot j has the samples j, j + slots, ...

The random numbers of a sample or a slot never belong to a worker or a thread. They are counter-
based: a hash of where the number is used. So there is no generator to save, to share between
threads or to seed per sample (`torch.manual_seed` takes 0.1 ms; this, 1 us a row).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
RowMask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Bits = TypeVar("Bits", int, Words)
Shuffle = Literal["full", "block", "none"]

_EPOCH_STREAM = 0x5EED_0001  # separates the shuffle's random bits from other uses
_WINDOW_STREAM = 0x5EED_0002
_GLOBAL_STREAM = 0x5EED_0003
_MASK = (1 << 64) - 1
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
        counts = self.counts(self.steps_per_epoch - 1)
        return int(counts[counts > 0].min())

    @property
    def has_empty_slots(self) -> bool:
        """Whether a slot of the last step of an epoch has no samples."""
        return not self.counts(self.steps_per_epoch - 1).all()

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

    def counts(self, step: int) -> Rows:
        """Samples of each slot in `step` of the epoch, shape (slots,)."""
        slots, most = np.arange(self.slots), self.micro_batch
        if self.spread:
            of_epoch = -((slots - self._used * self.repeats) // self.slots)
        else:
            of_epoch = np.diff(np.arange(self.slots + 1) * self.rows // self.slots) * self.repeats
        return np.clip(of_epoch - step * most, 0, most)

    def samples(self, step: int) -> int:
        """Samples in `step` of the epoch, over all slots."""
        return int(self.counts(step).sum())


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
        self._key, self._shuffle = (seed, epoch), shuffle
        permuted = len(blocks) if shuffle == "block" else self.rows
        self._permutation = Feistel(permuted, seed, epoch, _EPOCH_STREAM)
        self._ends = np.cumsum(runs_of(self.rows, _ROWS_AT_ONCE))
        if shuffle == "block":
            stops = np.cumsum(blocks)
            order = self._permutation(np.arange(permuted))
            spans = np.stack([stops - blocks, stops], 1)[order]  # (blocks, 2): rows, in this order
            self._windows = [spans[n : n + window] for n in range(0, len(spans), window)]
            self._ends = np.cumsum([(span[:, 1] - span[:, 0]).sum() for span in self._windows])
        self._read_window = lru_cache(maxsize=windows_kept)(self._rows_of)

    def at(self, places: Rows) -> Rows:
        """Row ids at these places of the epoch, ascending and near each other, shape (n,)."""
        if not len(places):
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self._ends, places[[0, -1]], side="right")
        rows = np.concatenate([self._read_window(w) for w in range(first, last + 1)])
        found: Rows = rows[places - (self._ends[first - 1] if first else 0)]
        return found

    def _rows_of(self, window: int) -> Rows:
        if self._shuffle == "block":
            spans = self._windows[window]
            stored = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
            order = sorted_permutation(len(stored), *self._key, _WINDOW_STREAM + window)
            shuffled: Rows = stored[order]
            return shuffled
        start = self._ends[window - 1] if window else 0
        rows = np.arange(start, self._ends[window], dtype=np.int64)
        return self._permutation(rows) if self._shuffle == "full" else rows


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


@dataclass(frozen=True)
class Draws:
    """The random numbers of some samples in one epoch, as a function of (seed, epoch, row, repeat).

    `Data.collate` must use these where loader threads share the global generators of torch, NumPy
    and Python: uniform(2) returns shape (n, 2), for the n samples of the batch in order.

    Args:
        rows: row ids, shape (n,).
        repeats: the repetition within the epoch of each row, shape (n,); None: the first.
    """

    seed: int
    epoch: int
    rows: Rows
    repeats: Rows | None = None

    def of(self, places: list[int]) -> Draws:
        """The draws of the samples at these positions."""
        repeats = None if self.repeats is None else self.repeats[places]
        return replace(self, rows=self.rows[places], repeats=repeats)

    def uniform(self, count: int, stream: int = 0) -> npt.NDArray[np.float64]:
        """Uniform numbers in [0, 1), shape (n, count); another `stream` gives other numbers."""
        key = hash64(self.seed, self.epoch, stream)
        with np.errstate(over="ignore"):
            of_row = mix64(self.rows.astype(np.uint64) ^ np.uint64(key))
            if self.repeats is not None:
                of_row += self.repeats.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
            columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            bits = mix64(of_row[:, None] + columns[None, :])
        return np.asarray((bits >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def seed_globals(self, place: int, stream: int = 0) -> None:
        """Seeds the global generators of torch, NumPy and Python for the sample at `place`."""
        repeat = 0 if self.repeats is None else int(self.repeats[place])
        self.seed_globals_of_row(int(self.rows[place]), repeat, stream)

    def seed_globals_of_row(self, row: int, repeat: int = 0, stream: int = 0) -> None:
        """As `seed_globals`, for a row that need not be one of these."""
        seed_globals(hash64(self.seed, self.epoch, _GLOBAL_STREAM + stream, row, repeat) >> 1)

    def seed_globals_of_epoch(self) -> None:
        """Seeds them for what precedes the samples of an epoch, such as a shuffle."""
        seed_globals(hash64(self.seed, self.epoch, _GLOBAL_STREAM + 2) >> 1)


def seed_globals(key: int) -> None:
    """Seeds the generators of torch (CPU only), NumPy and Python with a key below 2^63.

    `torch.manual_seed` takes 0.1 ms because it seeds every device.
    """
    import torch  # the rest does not need torch

    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextmanager
def kept_globals(key: int | None = None) -> Iterator[None]:
    """Restores the state of these generators; meanwhile they are seeded with `key`, if given."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        if key is not None:
            seed_globals(key)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def global_state() -> dict[str, object]:
    """Returns the state of each of these generators, which stays equal while it is not used."""
    import torch

    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (numpy[1].tobytes(), numpy[2:]),
        "Python": random.getstate(),
    }


def hash64(*values: int) -> int:
    """A well-mixed 64-bit hash of integers; order matters."""
    state = 0
    for value in values:
        state = mix64((state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK)
    return state


def mix64(x: Bits) -> Bits:
    """Well-mixed 64-bit numbers from an array of uint64 or from one integer; a bijection: the
    finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    bits: Any = x
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return cast(Bits, bits ^ (bits >> 31))
