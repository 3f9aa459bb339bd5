"""A source for iterable data sets, which can only be read from the beginning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import cloudpickle

from raytrain_ddp.data.loading.sources import require_count, require_dataset
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Draws, Rows, global_state
from raytrain_ddp.errors import DataError, TaskError

_log = logging.getLogger(__name__)
_MOST_ITERATORS = 4096  # one for each lane is in use


class IterableSource:
    """An `IterableDataset`, or any iterable that yields the same items whenever the global
    generators have the same seed.

    Sharded by offset: each slot reads its own range of the stream with its own iterator, which
    first skips the items before it. So every item is used once per epoch on any number of workers,
    and a run resumes at the correct item. However, only the data set itself can shuffle, one
    process does all reading, and seeking takes as long as reading up to that offset, unless the
    data set has a method `skip_to(offset)` that returns an iterator starting there. The order of
    such a data set must be the same in all epochs, unless it has `set_epoch(epoch)`.

    Each iterator has its own copy of the data set. If the data set has `set_epoch(epoch)`, it is
    called first. Before the iterator begins, the global generators of torch, NumPy and Python are
    seeded by (seed, epoch), and before each later item by (seed, epoch, offset), as are those that
    are skipped. So a data set that shuffles with them, also by a buffer,
    has the same order in all iterators.

    Args:
        rows: how many items the stream has; default: its `len`.
        shared: its iterators do not affect each other, even in several threads: no copies are made,
            and one thread does all reading. It must not draw from the global generators.
    """

    in_order = True

    def __init__(
        self, dataset: Iterable[Any], rows: int | None = None, *, shared: bool = False
    ) -> None:
        require_dataset(dataset)
        if rows is None and not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} has no length: give the number of its items as rows=."
            )
        if type(dataset).__module__ in ("builtins", "itertools") and iter(dataset) is dataset:
            raise DataError(
                f"a {type(dataset).__name__} can be iterated only once: pass an object whose "
                "__iter__ starts at the first item each time."
            )
        self.dataset, self.shared = dataset, shared
        self._may_be_longer = rows is None
        count = len(dataset) if rows is None else require_count("rows", rows)  # type: ignore[arg-type]
        self.blocks = runs_of(count, 256)
        self._pickled: bytes | None = None
        self._waiting: dict[tuple[int, int], Iterator[Any]] = {}  # epoch, offset of the next item
        # The order may differ between epochs.
        self._is_random = hasattr(dataset, "set_epoch") and not shared

    def read(self, rows: Rows) -> list[Any]:
        """Raises DataError if the stream ends early; `rows` must be consecutive."""
        return self._read(rows, None)

    def read_seeded(self, draws: Draws) -> list[Any]:
        """The items of `draws.rows`; the global generators are seeded before each."""
        return self._read(draws.rows, draws)

    def _read(self, rows: Rows, draws: Draws | None) -> list[Any]:
        start, stop = int(rows[0]), int(rows[-1]) + 1
        waiting = self._waiting.pop((self._epoch(draws), start), None)
        items = self._from(start, draws) if waiting is None else waiting
        records: list[Any] = []
        for place in range(stop - start):
            if draws is not None and start + place:  # the first item comes with the shuffle
                draws.seed_globals(place)
            records += islice(items, 1)
        if len(records) < stop - start:
            raise DataError(
                f"{type(self.dataset).__name__} ended after {start + len(records)} items, "
                f"{int(self.blocks.sum())} were expected. It must yield all items on each worker, "
                "because IterableSource divides them."
            )
        if self._may_be_longer and stop == self.blocks.sum():
            self._may_be_longer = False  # once
            with suppress(Exception):  # it may have good reasons
                if [*islice(items, 1)]:
                    _log.warning(
                        "%s yields more items than its length (%d); the rest are ignored "
                        "(rows=%d says that this is intended)",
                        *(type(self.dataset).__name__, stop, stop),
                    )
            return records
        self._waiting[self._epoch(draws), stop] = items
        while len(self._waiting) > _MOST_ITERATORS:
            self._waiting.pop(next(iter(self._waiting)))
        return records

    def fingerprint(self) -> str:
        return f"{type(self.dataset).__name__} of {int(self.blocks.sum())} items"

    def _from(self, offset: int, draws: Draws | None) -> Iterator[Any]:
        dataset = self.dataset if self.shared else self._copy()
        if draws is not None:
            draws.seed_globals_of_epoch()
            if hasattr(dataset, "set_epoch") and not self.shared:
                dataset.set_epoch(draws.epoch)
        if hasattr(dataset, "skip_to"):
            return iter(dataset.skip_to(offset))
        before = global_state()
        items = iter(dataset)
        first = [*islice(items, 1)]
        self._is_random |= draws is not None and global_state() != before
        if draws is not None and self._is_random:  # nothing continues those of past epochs
            self._waiting = {k: v for k, v in self._waiting.items() if k[0] >= draws.epoch}
        if not offset:
            return chain(first, items)
        for skipped in range(1, offset):
            if draws is not None:
                draws.seed_globals_of_row(skipped)
            next(items, None)
        return items

    def _epoch(self, draws: Draws | None) -> int:
        """Part of the key of a waiting iterator. If all epochs have the same order, it is 0: the
        next epoch may continue an iterator of this one."""
        return draws.epoch if draws is not None and self._is_random else 0

    def _copy(self) -> Any:
        try:
            if self._pickled is None:
                self._pickled = cloudpickle.dumps(self.dataset)
            return cloudpickle.loads(self._pickled)
        except Exception as error:
            raise TaskError(
                f"{type(self.dataset).__name__} cannot be copied by pickle "
                f"({type(error).__name__}: {error}), but several iterators need a copy each: "
                "open files in __iter__, or, if iterators do not affect each other and draw "
                "no random numbers, IterableSource(dataset, shared=True)."
            ) from error
