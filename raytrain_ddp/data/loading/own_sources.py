"""Sources over what users have: map-style data sets, iterable ones, and arrays in memory."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np

from raytrain_ddp.data.loading.sources import Source
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Draws, Rows, global_state
from raytrain_ddp.errors import DataError, TaskError, first_line

_MOST_ITERATORS = 4096  # one for each lane is in use


def require_count(name: str, value: Any) -> int:
    """The value of an argument; raises DataError unless it is a whole number of at least 1."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise DataError(f"{name}={value!r}: give a whole number of at least 1.")
    return count


class MapSource(Source):
    """Any map-style data set (`__len__`, `__getitem__`); the records are a list of its items.

    Each loader worker is a process with its own copy of the data set, as in a DataLoader. Before
    each `__getitem__`, the global generators of torch, NumPy and Python are seeded by (seed, epoch,
    row, repeat), so random transforms that use them give the same items on any number of workers
    and after any restart; generators stored in the data set do not. If the data set has a
    `set_epoch(epoch)` method, it is called before items of that epoch are read. Epochs count from
    0.

    Args:
        shared: several threads may read the data set at the same time, so the workers are threads,
            which use less memory. The data set must not share file positions or unsafe caches
            between calls, and random numbers must come only from the `Draws` of `collate`, because
            threads share the global generators with each other and with dropout.
    """

    def __init__(self, dataset: Any, rows_per_block: int = 256, *, shared: bool = False) -> None:
        kinds = {each.__name__ for each in type(dataset).__mro__}  # torch need not be imported
        methods = ("__len__", "__getitem__")
        if "IterableDataset" in kinds or not all(hasattr(dataset, name) for name in methods):
            raise DataError(
                f"MapSource({type(dataset).__name__}): it cannot be indexed. Use IterableSource "
                "for data that can only be iterated, and the data set of a DataLoader."
            )
        if shared and hasattr(dataset, "set_epoch"):
            raise DataError(
                f"MapSource({type(dataset).__name__}, shared=True): threads may read items of two "
                "epochs at the same time, but the data set has set_epoch(): remove shared=True."
            )
        self.dataset, self.shared = dataset, shared
        self.blocks = runs_of(len(dataset), require_count("rows_per_block", rows_per_block))

    def read(self, rows: Rows) -> Sequence[Any]:
        return [self.dataset[row] for row in rows.tolist()]

    def read_seeded(self, draws: Draws) -> Sequence[Any]:
        """The items of `draws.rows`; the global generators are seeded before each."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(draws.epoch)
        records = []
        for place, row in enumerate(draws.rows.tolist()):
            draws.seed_globals(place)
            records.append(self.dataset[row])
        return records

    def fingerprint(self) -> str:
        return f"{type(self.dataset).__name__} of {len(self.dataset)} rows"


class ArraySource(Source):
    """Arrays in memory with a common first dimension; a record is a dict of their rows.

    Args:
        arrays: name -> array, list, tensor or column of a table, shape (rows, ...).
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], rows_per_block: int = 1024):
        length = require_count("rows_per_block", rows_per_block)
        if not hasattr(arrays, "items"):
            kind = type(arrays).__name__
            raise DataError(
                f"ArraySource({kind}): give arrays by name, such as {{'x': x, 'y': y}}."
            )
        self._arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"arrays of unequal or no length: {lengths}.")
        self.blocks = runs_of(next(iter(lengths.values())), length)

    def read(self, rows: Rows) -> dict[str, np.ndarray[Any, Any]]:
        return {name: array[rows] for name, array in self._arrays.items()}

    def fingerprint(self) -> str:
        digest = sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            _digest_content(digest.update, name, array)
        return digest.hexdigest()


def _as_array(name: str, array: Any) -> Any:
    try:
        found = array.detach().numpy() if hasattr(array, "detach") else np.asanyarray(array)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be converted to a NumPy array: {error}") from error
    if not found.ndim:
        kind = type(array).__name__
        raise DataError(f"{name} ({kind}) has no rows: give an array of shape (rows, ...).")
    return found


class _Content(pickle.Pickler):
    """Pickles what is the same in every process."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, set | frozenset) or hasattr(value, "detach"):
            raise TypeError("neither sets nor tensors can be compared between processes")


def _digest_content(
    update: Callable[[bytes], None], name: str, array: np.ndarray[Any, Any]
) -> None:
    """Arrays of objects hold addresses, so these are pickled by value.

    Raises:
        DataError: an object has no content that is the same in every process.
    """
    if not array.dtype.hasobject:
        update(np.ascontiguousarray(array).tobytes())
        return
    pickler = _Content(SimpleNamespace(write=update), 5)
    pickler.fast = True  # regardless of which objects are one and the same
    try:
        for value in array.reshape(-1).tolist():
            pickler.dump(value)
    except Exception as error:
        raise DataError(
            f"ArraySource: {name!r} is an array of objects that cannot be fingerprinted: "
            f"{first_line(error)}. Give numbers, strings or lists, or use MapSource."
        ) from error


class IterableSource(Source):
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
