"""``--data.holdout``: keeps a part of the training rows for evaluation. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from raytrain_ddp.data.loading.sources import ImageSource
from raytrain_ddp.data.order.sample_rng import RowMask, Rows, hash64, mix64
from raytrain_ddp.errors import DataError

_STREAM = 0x5EED_0007  # separates these random bits from other uses


def held_out(labels: Rows, fraction: float, seed: int) -> Rows:
    """The rows to evaluate on, ascending, shape (held,): the given fraction of all rows and, up to
    rounding, of each class; each class keeps at least one row for training.

    Depends only on its arguments, with the same result in every NumPy version.

    Args:
        labels: the class of each row, shape (rows,).

    Raises:
        DataError: there are too few rows.
    """
    rows_of_class = np.bincount(labels)
    counts = _shares(rows_of_class, fraction, seed)
    if not counts.any():
        raise DataError(
            f"data.holdout = {fraction:g} holds out none of the {len(labels)} rows: each class "
            "keeps at least one row to train on. Increase it, or set it to 0."
        )
    with np.errstate(over="ignore"):
        keys = mix64(np.arange(len(labels), dtype=np.uint64) ^ np.uint64(hash64(seed, _STREAM)))
    order = np.lexsort((keys, labels))  # rows grouped by class, shuffled within each class
    starts = np.cumsum(rows_of_class) - rows_of_class
    place_in_class = np.arange(len(labels)) - np.repeat(starts, rows_of_class)
    return np.sort(order[place_in_class < np.repeat(counts, rows_of_class)]).astype(np.int64)


def _shares(rows_of_class: Rows, fraction: float, seed: int) -> Rows:
    """Rows to hold out per class: rounded down, with the remaining rows assigned to the classes
    with the largest remainders; ties are broken at random."""
    exact = rows_of_class * fraction
    counts: Rows = np.floor(exact).astype(np.int64)
    missing = round(float(fraction * rows_of_class.sum())) - int(counts.sum())
    with np.errstate(over="ignore"):
        ties = mix64(np.arange(len(counts), dtype=np.uint64) ^ np.uint64(hash64(seed, ~_STREAM)))
    remainders = np.round(exact - counts, 9)
    fitting = np.where(counts + 1 < rows_of_class, remainders, -1.0)
    for number in np.lexsort((ties, -fitting))[: max(0, missing)].tolist():
        counts[number] += fitting[number] > 0
    return counts


class HoldoutPart(ImageSource):
    """Some rows of an image source: those held out, or the others.

    Its blocks are those of the source without the other rows.

    Args:
        rows: their numbers in the source, ascending.
        identity: identifies these rows in the fingerprint.
    """

    def __init__(self, source: ImageSource, rows: Rows, identity: str) -> None:
        self._rows, self._identity = rows, identity
        ends = np.searchsorted(rows, np.cumsum(source.blocks))
        counts = np.diff(ends, prepend=0)  # rows in each block of the source
        self.blocks: Rows = counts[counts > 0]
        sizes = source.block_bytes
        self.block_bytes = None if sizes is None else sizes[counts > 0]
        # It keeps a row group until all rows of this part have been read.
        self.whole = source.part(self._used)
        self.class_names = source.class_names
        self.prefers_blocks = source.prefers_blocks

    def _used(self, start: int, stop: int) -> RowMask:
        first, last = np.searchsorted(self._rows, [start, stop])
        used = np.zeros(stop - start, bool)
        used[self._rows[first:last] - start] = True
        return used

    def rows_of_whole(self, rows: Sequence[int]) -> Rows:
        """The rows of `whole` that these rows of this part are."""
        return self._rows[np.array(rows, np.int64)]

    def read(self, rows: Rows) -> Any:
        return self.whole.read(self._rows[rows])

    def ahead(self, rows: Rows) -> None:
        self.whole.ahead(self._rows[rows])

    def close(self) -> None:
        self.whole.close()

    def labels(self) -> Rows:
        labels: Rows = self.whole.labels()
        return labels[self._rows]

    def paths(self) -> list[str]:
        every = self.whole.paths()
        return [every[row] for row in self._rows.tolist()] if every else []

    def fingerprint(self) -> str:
        return sha256(f"{self.whole.fingerprint()} {self._identity}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return self.whole.where(int(self._rows[row]))
