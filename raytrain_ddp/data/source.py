"""Where samples come from: rows in blocks.

A `Source` says how many rows each of its blocks has and reads any rows by their ids. It is used
from several threads at once. A `Data` adds the function that makes a batch of its records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raytrain_ddp.data.draws import Draws, Rows
from raytrain_ddp.data.plan import runs_of
from raytrain_ddp.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, "Tensor"]


class Source(Protocol):
    """Rows in blocks.

    A source may have more: `ahead(rows)` is told which rows will be read soon, and returns at once;
    `close()` ends what that began; `prefers_blocks` and `in_order` have a say in the shuffle, see
    `loader.shuffle_for`; `block_bytes`, shape (blocks,), says what a block takes in memory.
    """

    @property
    def blocks(self) -> Rows:
        """Rows of each block, shape (blocks,), 1 or more; it is cheap to read a block at once."""

    def read(self, rows: Rows) -> Any:
        """The records of `rows`, shape (n,), in that order; what `Data.collate` understands.

        Raises:
            DataError: naming the file and the row.
        """

    def fingerprint(self) -> str:
        """Changes when the data change: compared when a run is resumed."""


class BadRecord(Exception):
    """Stands where a record's image should be, and says why there is none."""


@dataclass(frozen=True)
class Data:
    """A source, and how its records become a batch.

    Args:
        collate: (records of n rows, their random numbers) -> batch of tensors whose first dimension
            is n, or less: rows that are left out count for nothing. Runs in loader threads, on the
            host; all randomness must come from the `Draws`.
    """

    source: Source
    collate: Callable[[Any, Draws], Batch]

    @property
    def rows(self) -> int:
        return int(self.source.blocks.sum())


class ArraySource:
    """Arrays in memory with a common first dimension; a record is a dict of their rows.

    Args:
        arrays: name -> array, shape (rows, ...).
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], rows_per_block: int = 1024):
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"arrays of unequal or no length: {lengths}.")
        self._arrays = dict(arrays)
        self.blocks = runs_of(next(iter(lengths.values())), rows_per_block)

    def read(self, rows: Rows) -> dict[str, np.ndarray[Any, Any]]:
        return {name: array[rows] for name, array in self._arrays.items()}

    def fingerprint(self) -> str:
        digest = sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class MapSource:
    """Any map-style data set (`__len__`, `__getitem__`); a record list holds its items.

    Randomness inside the data set's own `__getitem__` is not tied to the sample: promises about
    augmentation hold for what `collate` draws only. It must not come from torch's global generator
    (as that of torchvision's v2 transforms does), which dropout on a CPU shares.
    """

    def __init__(self, dataset: Any, rows_per_block: int = 256) -> None:
        self.dataset = dataset
        self.blocks = runs_of(len(dataset), rows_per_block)

    def read(self, rows: Rows) -> Sequence[Any]:
        return [self.dataset[int(row)] for row in rows]

    def fingerprint(self) -> str:
        return f"{type(self.dataset).__name__} of {len(self.dataset)} rows"
