"""An iterable data set, which can be read from its beginning only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from raytrain_ddp.data.draws import Rows
from raytrain_ddp.data.plan import runs_of
from raytrain_ddp.errors import DataError

_MOST_ITERATORS = 4096  # one for each lane is in use


class IterableSource:
    """An `IterableDataset`, or anything that gives the same items each time it is iterated over.

    Sharded by offset: each slot reads its own run of the stream with an iterator of its own, which
    first passes over what comes before. So every item is used once an epoch on any number of
    workers, and a run goes on at the right item. But nothing is shuffled, all epochs have the same
    order, one thread does all reading, and reaching a place takes the time of reading up to it,
    unless the data set has a method `skip_to(offset)` that gives an iterator from there.

    Args:
        rows: how many items the stream has; default: its `len`.
    """

    in_order = True

    def __init__(self, dataset: Iterable[Any], rows: int | None = None) -> None:
        if rows is None and not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} has no length: give the number of its items as rows=."
            )
        self.dataset = dataset
        self.blocks = runs_of(len(dataset) if rows is None else rows, 256)  # type: ignore[arg-type]
        self._waiting: dict[int, Iterator[Any]] = {}  # by the offset that each gives next

    def read(self, rows: Rows) -> list[Any]:
        """Raises DataError if the stream ends early; `rows` must follow each other."""
        start, stop = int(rows[0]), int(rows[-1]) + 1
        items = self._waiting.pop(start, None) or self._from(start)
        records = list(islice(items, stop - start))
        if len(records) < stop - start:
            raise DataError(
                f"{type(self.dataset).__name__} ended after {start + len(records)} items, "
                f"{int(self.blocks.sum())} were announced."
            )
        self._waiting[stop] = items
        while len(self._waiting) > _MOST_ITERATORS:
            self._waiting.pop(next(iter(self._waiting)))
        return records

    def fingerprint(self) -> str:
        return f"{type(self.dataset).__name__} of {int(self.blocks.sum())} items"

    def _from(self, offset: int) -> Iterator[Any]:
        if hasattr(self.dataset, "skip_to"):
            return iter(self.dataset.skip_to(offset))
        return islice(iter(self.dataset), offset, None)
