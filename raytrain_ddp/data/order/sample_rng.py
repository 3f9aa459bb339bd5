"""Random numbers that belong to a sample or a slot, never to a worker or a thread.

Both kinds are counter-based: a hash of where the number is used. So there is no generator to save,
to share between threads or to seed per sample (`torch.manual_seed` takes 0.1 ms; this, 1 us a row).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
RowMask = npt.NDArray[np.bool_]

_MASK = (1 << 64) - 1
_GLOBAL_STREAM = 0x5EED_0003  # separates the seeds of global generators from other uses


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
    import torch  # epoch_order.py does not need torch

    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextmanager
def kept_globals() -> Iterator[None]:
    """Restores the state of these generators."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def seeded_globals(key: int) -> Iterator[None]:
    """These generators, seeded with a key below 2^63; afterward, they are as before."""
    with kept_globals():
        seed_globals(key)
        yield


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
        state = _mix_int((state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK)
    return state


# The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), on arrays and on one integer.


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well-mixed 64-bit numbers from an array; a bijection. The caller must permit overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
