"""Keyed permutations, the same in every version of NumPy and on all machines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raytrain_ddp.data.order.sample_rng import Rows, hash64, mix64

Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_LEAST_BITS = 6  # fewer bits do not mix well


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
        return self._walk(places, self._forth)

    def inverse(self, places: Rows) -> Rows:
        """The preimages of `places`, shape (k,)."""
        return self._walk(places, self._back)

    def _walk(self, places: Rows, once: Callable[[Words], Words]) -> Rows:
        with np.errstate(over="ignore"):
            values = once(places.astype(np.uint64))
            while len(outside := np.flatnonzero(values >= self.n)):
                values[outside] = once(values[outside])
        return values.astype(np.int64)

    def _forth(self, values: Words) -> Words:
        low, high = values & self._low_mask, values >> self._low_bits
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= mix64(low ^ even) & self._high_mask
            low ^= mix64(high ^ odd) & self._low_mask
        return (high << self._low_bits) | low

    def _back(self, values: Words) -> Words:
        low, high = values & self._low_mask, values >> self._low_bits
        for even, odd in zip(self._keys[-2::-2], self._keys[::-2], strict=True):
            low ^= mix64(high ^ odd) & self._low_mask
            high ^= mix64(low ^ even) & self._high_mask
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
