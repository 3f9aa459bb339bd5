"""Data sources: rows in blocks, and batches made of them.

A `Source` knows the number of rows in each of its blocks and reads any rows by their ids. A `Data`
adds the function that makes a batch of its records. Here are the sources over what users have: map-
style data sets, iterable ones, and arrays in memory.
"""

from __future__ import annotations

import inspect
import operator
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from raytrain_ddp.data.order import Draws, RowMask, Rows, global_state, kept_globals, runs_of
from raytrain_ddp.errors import DataError, TaskError, first_line

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

_MOST_ITERATORS = 4096  # one for each lane is in use

Batch = Any
"""Any nest of tensors in mappings, lists, tuples, named tuples and dataclasses; strings, numbers
and arrays are passed through. The first dimension of every tensor is the number of samples."""


class Source(ABC):
    """Rows in blocks, read by several threads at once.

    With `shared = False`, each loader worker is a process with its own copy. `prefers_blocks` and
    `in_order` influence the shuffle, see `loader.shuffle_for`; `block_bytes`, shape (blocks,), is
    the memory that each block needs.
    """

    shared: bool = True
    in_order: bool = False
    prefers_blocks: bool = False
    block_bytes: Rows | None = None
    blocks: Rows
    """The number of rows of each block, shape (blocks,), at least 1; a block is cheap to read."""

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """The records of `rows`, shape (n,), in that order; what `Data.collate` understands.

        Raises:
            DataError: naming the file and the row.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes if the data change; compared when a run is resumed."""

    def read_seeded(self, draws: Draws) -> Any:
        """The records of `draws.rows` in a process of their own: seeds the global generators with
        `draws.seed_globals` for each row, if they are used."""
        return self.read(draws.rows)

    def ahead(self, rows: Rows) -> None:  # noqa: B027
        """Starts to read these rows, which are needed soon; returns at once."""

    def close(self) -> None:  # noqa: B027
        """Ends the work that `ahead` started."""


class ImageSource(Source):
    """Rows of (image, label), where the image is encoded bytes, a PIL image or a `BadRecord`.

    Attributes:
        left_out: the names of members of archives that belong to no sample.
        mapped: how labels that are numbers differ from the numbers of their classes.
        uses_root: whether `data.root` applies.
        split: the part of the data set, if opening it chose one.
    """

    class_names: list[str]
    left_out: Sequence[str] = ()
    mapped: str = ""
    uses_root: bool = False
    split: str = ""

    @abstractmethod
    def labels(self) -> Any:
        """The class number of each row, shape (rows,), or its targets, float32 (rows, targets).

        Raises:
            DataError: a label is null or not a class; names the row.
        """

    @abstractmethod
    def where(self, row: int) -> str:
        """The file and row, for messages."""

    def paths(self) -> list[str]:
        """The path of each row's image, if all files are lists; otherwise none."""
        return []

    def part(self, used: Callable[[int, int], RowMask]) -> ImageSource:
        """The same rows with memory of its own, for a reader that uses only some of them.

        Args:
            used: (start, stop) -> which of the rows start..stop-1 are read, shape (stop - start,).
        """
        return self


class BadRecord(Exception):
    """Takes the place of a record's image, and says why there is none."""


def default_collate(records: Any, draws: Draws) -> Batch:
    """Converts a dict of arrays to tensors; stacks a list of items as torch's `default_collate`
    does."""
    import torch  # imported here because `convert` does not need it
    from torch.utils.data import default_collate as stacked

    if isinstance(records, Mapping):
        return {name: torch.from_numpy(array) for name, array in records.items()}
    return stacked(records)


@dataclass(frozen=True)
class Data:
    """A source, and the function that makes a batch of its records.

    Args:
        collate: (records of n rows, their random numbers) -> a `Batch` of n samples or fewer;
            omitted rows have no weight. The `collate_fn` of a torch DataLoader, which takes only
            the records, works too: a second argument is passed if it is required or named draws.
            Runs on the host, in the loader's processes or threads. If
            `source.shared` is false, the generators of torch, NumPy and Python are seeded for each
            batch; otherwise, all randomness must come from the `Draws`.
        count: returns the number of samples in a batch whose tensors have no common first
            dimension.
    """

    source: Source
    collate: Callable[[Any, Draws], Batch] | Callable[[Any], Batch] = default_collate
    count: Callable[[Batch], int] | None = None

    @property
    def rows(self) -> int:
        return int(self.source.blocks.sum())

    @property
    def shared(self) -> bool:
        """Whether several threads may read from the source at the same time."""
        return self.source.shared

    def batch(self, draws: Draws) -> Batch:
        """The batch of `draws.rows` (at least one), made here; unless the source is shared, with
        one thread of torch, and temporarily with generators of its own."""
        if self.shared:
            return self._collated(self.source.read(draws.rows), draws)
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with kept_globals():
                draws.seed_globals(0)
                records = self.source.read_seeded(draws)
                draws.seed_globals(0, stream=1)
                return self._collated(records, draws)
        finally:
            torch.set_num_threads(threads)

    @cached_property
    def _takes_draws(self) -> bool:
        """Whether `collate` has a second argument that is required, or is named draws."""
        try:
            found = inspect.signature(self.collate, follow_wrapped=False).parameters
        except (TypeError, ValueError):  # a function of C, such as torch.stack
            return False
        parameters = [*found.values()]
        if any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return True
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        second = [each for each in parameters if each.kind in by_place][1:2]
        return any(each.default is each.empty or each.name == "draws" for each in second)

    def _collated(self, records: Any, draws: Draws) -> Batch:
        arguments = (records, draws) if self._takes_draws else (records,)
        return self.collate(*arguments)

    def samples_of(self, batch: Batch) -> int:
        """Raises TaskError if the number of samples is not clear; see `nested.samples_of`."""
        from raytrain_ddp.data.loading.nested import samples_of

        return samples_of(batch) if self.count is None else int(self.count(batch))

    def checked_samples(self, batch: Batch, records: int, may_skip: bool) -> int:
        """The number of samples in a batch of `records` records.

        Args:
            may_skip: whether bad records may be left out.

        Raises:
            DataError, TaskError: there are fewer or more samples than records.
        """
        samples = self.samples_of(batch)
        if samples == records or (samples < records and may_skip):
            return samples
        if self.count is not None:
            raise TaskError(
                f"Data.count returned {samples} for a batch of {records} records: it must return "
                "the number of records in the batch, however many rows or tokens each record has."
            )
        kind = DataError if samples < records else TaskError
        raise kind(
            f"collate returned {samples} samples for {records} records: return all of them (or set "
            "--data.bad-records skip), and put several views of a record into another dimension; "
            "or specify how to count samples: Data(source, collate, count=...)."
        )

    @cached_property
    def processes(self) -> LoaderProcesses:
        """The loader processes, with copies of the data made when this is first used.

        Raises:
            TaskError: the data cannot be copied.
        """
        from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

        return LoaderProcesses(self)

    def close(self) -> None:
        """Ends the processes, and the source's read-ahead."""
        if "processes" in self.__dict__:
            self.processes.close()
        self.source.close()


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
        """Raises DataError if an object has no content that is the same in every process."""
        digest = sha256()
        pickler = _Content(SimpleNamespace(write=digest.update), 5)
        pickler.fast = True  # regardless of which objects are one and the same
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            if not array.dtype.hasobject:
                digest.update(np.ascontiguousarray(array).tobytes())
                continue
            try:
                for value in array.reshape(-1).tolist():  # their own bytes would be addresses
                    pickler.dump(value)
            except Exception as error:
                raise DataError(
                    f"ArraySource: {name!r} is an array of objects that cannot be fingerprinted: "
                    f"{first_line(error)}. Give numbers, strings or lists, or use MapSource."
                ) from error
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
        # By seed, epoch, and offset of the next item.
        self._waiting: dict[tuple[int, int, int], Iterator[Any]] = {}
        # The order may differ between epochs.
        self._is_random = hasattr(dataset, "set_epoch") and not shared

    def read_seeded(self, draws: Draws) -> list[Any]:
        """The items of `draws.rows`; the global generators are seeded before each."""
        return self.read(draws.rows, draws)

    def read(self, rows: Rows, draws: Draws | None = None) -> list[Any]:
        """Raises DataError if the stream ends early; `rows` must be consecutive."""
        start, stop = int(rows[0]), int(rows[-1]) + 1
        waiting = self._waiting.pop((*self._order(draws), start), None)
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
        self._waiting[(*self._order(draws), stop)] = items
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
            now = draws.seed, draws.epoch
            self._waiting = {
                k: v for k, v in self._waiting.items() if k[0] != now[0] or k[:2] >= now
            }
        if not offset:
            return chain(first, items)
        for skipped in range(1, offset):
            if draws is not None:
                draws.seed_globals_of_row(skipped)
            next(items, None)
        return items

    def _order(self, draws: Draws | None) -> tuple[int, int]:
        """Part of the key of a waiting iterator. If all epochs have the same order, the next one
        may continue an iterator of this one."""
        return (draws.seed, draws.epoch) if draws is not None and self._is_random else (0, 0)

    def _copy(self) -> Any:
        """As the data set was when it was first read. `deepcopy` shares what functions refer to."""
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
