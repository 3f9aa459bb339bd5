"""Data sources: rows in blocks, and batches made of them.

A `Source` knows the number of rows in each of its blocks and reads any rows by their ids. A `Data`
adds the function that makes a batch of its records.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Draws, Rows
from raytrain_ddp.errors import DataError

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

Batch = Any
"""Any nest of tensors in mappings, lists, tuples, named tuples and dataclasses; strings, numbers
and arrays are passed through. The first dimension of every tensor is the number of samples."""


class Source(Protocol):
    """Rows in blocks, read by several threads at once.

    Optional members: `shared = False` makes each loader worker a process with its own copy, which
    reads with `read_seeded(draws)` if defined: the records of `draws.rows`, after seeding the
    global generators with `draws.seed_globals` for each row. `ahead(rows)` receives the rows that
    will be read soon and returns immediately; `close()` ends the work it started. `prefers_blocks`
    and `in_order` influence the shuffle, see `loader.shuffle_for`; `block_bytes`, shape (blocks,),
    is the memory that each block needs.
    """

    @property
    def blocks(self) -> Rows:
        """The number of rows of each block, shape (blocks,), at least 1; a block is cheap to
        read."""

    def read(self, rows: Rows) -> Any:
        """The records of `rows`, shape (n,), in that order; what `Data.collate` understands.

        Raises:
            DataError: naming the file and the row.
        """

    def fingerprint(self) -> str:
        """Changes if the data change; compared when a run is resumed."""


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
    started: list[LoaderProcesses] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """None, or the one of `processes`."""

    @property
    def rows(self) -> int:
        return int(self.source.blocks.sum())

    @property
    def shared(self) -> bool:
        """Whether several threads may read from the source at the same time."""
        return bool(getattr(self.source, "shared", True))

    def batch(self, draws: Draws) -> Batch:
        """The batch of `draws.rows` (at least one). Leaves the global generators in any state."""
        if self.shared:
            return self._collated(self.source.read(draws.rows), draws)
        read = getattr(self.source, "read_seeded", None)
        draws.seed_globals(0)
        records = self.source.read(draws.rows) if read is None else read(draws)
        draws.seed_globals(0, stream=1)
        return self._collated(records, draws)

    @cached_property
    def _takes_draws(self) -> bool:
        """Whether `collate` has a second argument that is required, or is named draws."""
        try:
            signature = inspect.signature(self.collate, follow_wrapped=False)
        except (TypeError, ValueError):  # a function of C, such as torch.stack
            return False
        parameters = [*signature.parameters.values()]
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

        Raises the errors of `require_samples`.
        """
        from raytrain_ddp.data.loading.nested import require_samples

        samples = self.samples_of(batch)
        require_samples(samples, records, may_skip, self.count is not None)
        return samples

    def processes(self) -> LoaderProcesses:
        """The loader processes, with copies of the data made by the first call.

        Raises:
            TaskError: the data cannot be copied.
        """
        from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

        if not self.started:
            self.started.append(LoaderProcesses(self))
        return self.started[0]

    def close(self) -> None:
        """Ends the processes, and the source's read-ahead."""
        for each in self.started:
            each.close()
        self.rest()

    def rest(self) -> None:
        """Ends the source's read-ahead."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()


def require_count(name: str, value: Any) -> int:
    """The value of an argument; raises DataError unless it is a whole number of at least 1."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise DataError(f"{name}={value!r}: give a whole number of at least 1.")
    return count


def require_dataset(dataset: Any) -> set[str]:
    """The names of its classes; raises DataError for what contains data sets or makes batches of
    them."""
    name, kinds = type(dataset).__name__, {each.__name__ for each in type(dataset).__mro__}
    if "DataLoader" in kinds:
        raise DataError(f"{name} makes batches: pass its data set (loader.dataset).")
    if "DatasetDict" in kinds:
        raise DataError(f"{name} has several splits: choose one, such as datasets['train'].")
    if "DataFrame" in kinds:
        raise DataError(f"{name}: use ArraySource(frame), whose arrays are the columns.")
    return kinds


class MapSource:
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
        kinds = require_dataset(dataset)  # by name: torch need not be imported
        if "IterableDataset" in kinds or not hasattr(dataset, "__len__"):
            raise DataError(
                f"MapSource({type(dataset).__name__}): it cannot be indexed. Use IterableSource "
                "for data that can only be iterated."
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
