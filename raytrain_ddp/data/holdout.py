"""``--data.holdout``: keeps a part of the training rows for evaluation. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class HoldoutRows:
    """Which rows of a source are held out, and which remain.

    Args:
        rows: the rows held out, ascending.
        parameters: that determine the rows, for the fingerprint.
    """

    rows: Rows
    parameters: str

    def of(self, part_rows: Rows, train: bool) -> Rows:
        """Maps rows of a part to rows of the source."""
        if not train:
            return self.rows[part_rows]
        before = np.searchsorted(self.rows - np.arange(len(self.rows)), part_rows, side="right")
        return part_rows + before

    def used(self, start: int, stop: int, train: bool) -> RowMask:
        """Which of the source's rows start..stop-1 belong to a part, shape (stop - start,)."""
        first, last = np.searchsorted(self.rows, [start, stop])
        flags = np.full(stop - start, train)
        flags[self.rows[first:last] - start] = not train
        return flags


class HoldoutPart(ImageSource):
    """One part of an image source: the rows held out, or the remaining rows.

    Its blocks are those of the source without the rows of the other part.
    """

    def __init__(self, source: ImageSource, held: HoldoutRows, train: bool) -> None:
        self._held, self._train = held, train
        ends = np.cumsum(source.blocks)
        before = np.searchsorted(held.rows, ends)  # rows held out up to the end of each block
        counts = np.diff(before, prepend=0)
        counts = source.blocks - counts if train else counts
        self.blocks: Rows = counts[counts > 0]
        sizes = source.block_bytes
        self.block_bytes = None if sizes is None else sizes[counts > 0]
        # It keeps a row group until all rows of this part have been read.
        self.whole = source.part(lambda start, stop: held.used(start, stop, train))
        self.class_names = source.class_names
        self.prefers_blocks = source.prefers_blocks

    def rows_of_whole(self, rows: Sequence[int]) -> Rows:
        """The rows of `whole` that these rows of this part are."""
        return self._held.of(np.array(rows, np.int64), self._train)

    def read(self, rows: Rows) -> Any:
        return self.whole.read(self._held.of(rows, self._train))

    def ahead(self, rows: Rows) -> None:
        self.whole.ahead(self._held.of(rows, self._train))

    def close(self) -> None:
        self.whole.close()

    def labels(self) -> Rows:
        labels: Rows = self.whole.labels()
        return labels[self._held.of(np.arange(self.blocks.sum()), self._train)]

    def paths(self) -> list[str]:
        every: Sequence[str] = self.whole.paths()
        chosen = np.arange(self.blocks.sum()) if every else np.empty(0, np.int64)
        return [every[row] for row in self._held.of(chosen, self._train)]

    def fingerprint(self) -> str:
        which = "without" if self._train else "only"
        return sha256(
            f"{self.whole.fingerprint()} {which} {self._held.parameters}".encode()
        ).hexdigest()

    def where(self, row: int) -> str:
        return self.whole.where(int(self.rows_of_whole([row])[0]))
