"""Data sources: rows in blocks, and batches made of them.

A `Source` knows the number of rows in each of its blocks and reads any rows by their ids. A `Data`
adds the function that makes a batch of its records.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raytrain_ddp.data.order.sample_rng import Draws, RowMask, Rows
from raytrain_ddp.errors import DataError, TaskError

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.loader_processes import LoaderProcesses

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
        return self.source.shared

    def batch(self, draws: Draws) -> Batch:
        """The batch of `draws.rows` (at least one). Leaves the global generators in any state."""
        if self.shared:
            return self._collated(self.source.read(draws.rows), draws)
        draws.seed_globals(0)
        records = self.source.read_seeded(draws)
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

        Args:
            may_skip: whether bad records may be left out.

        Raises:
            DataError, TaskError: there are fewer or more samples than records.
        """
        from raytrain_ddp.data.loading.nested import COUNTED

        samples = self.samples_of(batch)
        if samples == records or (samples < records and may_skip):
            return samples
        if self.count is not None:
            raise TaskError(
                f"Data.count returned {samples} for a batch of {records} records: it must return "
                "the number of records in the batch, however many rows or tokens each record has."
            )
        if samples < records:
            raise DataError(
                f"collate returned {samples} samples for {records} records, but data.bad_records "
                "is error: return all of them; or, if the first dimension does not count samples, "
                f"{COUNTED}"
            )
        raise TaskError(
            f"collate returned {samples} samples for {records} records: the first "
            "dimension must be the number of records. Put several views of a record into "
            f"another dimension, or {COUNTED}"
        )

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
        self.source.close()
