"""A file of images and labels, of any format: its rows in groups, and what all formats share."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from raytrain_ddp.data.formats.image_folder import read_on_disk
from raytrain_ddp.data.formats.labels import Kind, is_string, kind_of, kind_of_targets
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.errors import (
    DataError,
    RaytrainError,
    did_you_mean,
    first_line,
    first_names,
    in_one_line,
    is_passing,
    quoted,
)
from raytrain_ddp.uri import attempt, open_uri, reason_of

T = TypeVar("T")

_OF_THE_FILE = (errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG)
RETRY_S = (1.0, 5.0)  # waits before a store is asked again, after the client's own retries


class Columns(NamedTuple):
    """What is read from each file, see `DataConfig`.

    Args:
        label: "": no labels are read.
        root: folder of the images that a list names; None: that of the list.
        targets: instead of `label`; see targets.py.
        binary: the targets are labels, which a row has or does not have.
    """

    image: str
    label: str
    root: str | None = None
    targets: tuple[str, ...] = ()
    binary: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns with the labels or targets."""
        return self.targets or ((self.label,) if self.label else ())


class RowGroup(NamedTuple):
    """Rows that are read together.

    Args:
        columns: to read: the images' bytes, their paths if any bytes are missing, those of the
            labels.
        size_bytes: of these columns, uncompressed.
        image_bytes: of the images' bytes, as stored.
        labels: (nulls, min, max) of integer labels; None if the file has no statistics for them,
            which only Parquet has.
        without_image: rows with neither bytes nor a path, as far as the file's statistics tell.
    """

    rows: int
    columns: tuple[str, ...]
    size_bytes: int
    image_bytes: int
    labels: tuple[int, int, int] | None = None
    without_image: int = 0


@dataclass(frozen=True)
class Opened:
    """Where a file is.

    Args:
        name: without secrets, for messages.
        image_fs, image_root: where the images are whose paths are given.
    """

    uri: str
    name: str
    fs: Any
    path: str
    image_fs: Any
    image_root: str

    def below(self, root: str | None) -> Opened:
        """With the images of a list in the folder `root`; None: in that of the list."""
        if root is None:
            return self
        fs, folder = open_uri(root)
        return replace(self, image_fs=fs, image_root=os.path.expanduser(folder))


def opened_at(uri: str, name: str) -> Opened:
    fs, path = open_uri(uri)
    return Opened(uri, name, fs, path, fs, os.path.dirname(path))


@dataclass(frozen=True)
class Shard(ABC):
    """A file of images and labels; keeps no file open.

    Args:
        digest: changes if the rows, sizes or offsets of anything in the file change.
        kind: of the labels.
        class_names: from the ClassLabel feature, if the file has one.
        path_column: has the paths of images in files of their own; "": there is none.
        reads_labels: whether all labels are in memory or are read together.
    """

    reads_labels: ClassVar[bool] = True

    at: Opened
    size_bytes: int
    digest: str
    groups: tuple[RowGroup, ...]
    kind: Kind
    class_names: list[str] | None
    path_column: str

    @property
    def name(self) -> str:
        return self.at.name

    @property
    def is_local(self) -> bool:
        """Whether the file, and the images that it names, are on this machine."""
        return all(isinstance(fs, pafs.LocalFileSystem) for fs in (self.at.fs, self.at.image_fs))

    @property
    def left_out(self) -> list[str]:
        """The names of members of an archive that belong to no sample."""
        return []

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Columns of a row group as an Arrow table, verified as far as the format allows.

        Raises:
            DataError: the file is missing, damaged or cannot be read.
        """
        return self._answered([group], columns, f", row group {group}")

    def values(self, *columns: str) -> list[Any]:
        """Small columns of all row groups as Python values, see `rows_in`.

        Raises:
            DataError: like `read`.
        """
        groups = [group for group, row_group in enumerate(self.groups) if row_group.rows]
        return rows_in(self._answered(groups, columns, ""), columns) if groups else []

    def starts(self) -> list[int]:
        """The first row of each row group, and the end of the last one."""
        return [0, *accumulate(row_group.rows for row_group in self.groups)]

    def where(self, row: int) -> str:
        """The file and the row in it, for messages."""
        starts = self.starts()
        group = bisect_right(starts, row) - 1
        return self.where_in(group, row - starts[group])

    def where_in(self, group: int, place: int) -> str:
        """The file, and the row at a place of a group, for messages."""
        return f"{self.name}, row group {group}, row {place}"

    def _answered(self, groups: Sequence[int], columns: Sequence[str], where: str) -> Any:
        outcome = with_retries(lambda: self._read(groups, columns), self.is_local)
        if isinstance(outcome, RaytrainError):
            raise outcome
        if isinstance(outcome, Exception):
            reason = reason_of(self.at.uri, outcome)
            raise DataError(f"{self.name}{where}: cannot be read: {reason}.")
        return outcome

    @abstractmethod
    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        """Columns of row groups as a table, structs flattened."""


def rows_in(table: Any, columns: Sequence[str]) -> list[Any]:
    """The Python value of each row, shape (rows,); of several columns, a tuple."""
    # In pure Python: a worker's first read must not import pyarrow.compute, or pandas for to_numpy.
    values = [table.column(name).to_pylist() for name in columns]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def read_file(fs: Any, path: str) -> bytes:
    """The bytes as they are, whatever the name ends with."""
    if isinstance(fs, pafs.LocalFileSystem):
        return read_on_disk(path)
    with fs.open_input_stream(path, compression=None) as stream:
        return bytes(stream.read())


def with_retries(ask: Callable[[], T], is_local: bool) -> T | Exception:
    """Like `attempt`, but retries errors of an object store a little later."""
    outcome = attempt(ask)
    for wait_s in () if is_local else RETRY_S:
        if not isinstance(outcome, Exception) or not is_passing(outcome):
            break
        time.sleep(wait_s)
        outcome = attempt(ask)
    return outcome


def check_columns(name: str, schema: Any, columns: Columns) -> tuple[tuple[str, ...], str, Kind]:
    """The columns of the images (bytes, file paths or both), that of the paths, and the kind of the
    labels.

    Raises:
        DataError: a column is missing, there are two of that name, or it has the wrong type.
    """
    for column in (columns.image, *columns.labels):
        if schema.names.count(column) > 1:
            raise DataError(f"{name}: has several columns named {quoted(column)}.")
        if column not in schema.names:
            raise DataError(
                f"{name}: no column {quoted(column)} among {first_names(schema.names)}."
                f"{did_you_mean(column, schema.names)} {_flags_of(columns)}"
            )
    image = schema.field(columns.image).type
    label = schema.field(columns.labels[0]).type if columns.labels else None
    kind = "none" if label is None else kind_of(label)
    if columns.targets:
        types = {column: schema.field(column).type for column in columns.targets}
        kind = kind_of_targets(name, types, columns.binary)
    elif kind is None:
        raise DataError(
            f"{name}: column {quoted(columns.label)} is {label}; expected one integer, string or "
            "boolean per row. Set --data.label-column; or, for several labels or numbers, "
            "--data.target-columns."
        )
    leaves: tuple[str, ...] = ()
    path_column = ""
    if is_binary(image):
        leaves = (columns.image,)
    elif is_string(image):
        leaves, path_column = (columns.image,), columns.image
    elif pa.types.is_struct(image):
        fits = {"bytes": is_binary, "path": is_string}
        usable = [
            field.name for field in image if field.name in fits and fits[field.name](field.type)
        ]
        leaves = tuple(f"{columns.image}.{name}" for name in sorted(usable))
        path_column = next((leaf for leaf in leaves if leaf.endswith(".path")), "")
    if not leaves:
        raise DataError(
            f"{name}: column {quoted(columns.image)} is {image}; encoded images (struct<bytes, "
            "path> or binary) or paths of files are expected. Set --data.image-column."
        )
    return leaves, path_column, kind


def _flags_of(columns: Columns) -> str:
    if not columns.labels:
        return "Set --image-column."
    labels = "target-columns" if columns.targets else "label-column"
    return f"Set --data.image-column or --data.{labels}."


def column_of(name: str, values: Sequence[Any], where: str) -> Any:
    """Converts values of a file without types to an Arrow array of their common type.

    Args:
        where: the file, for messages.

    Raises:
        DataError: they have no common type, such as numbers and text, or more than 64 bits.
    """
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(
            f"{where}: column {quoted(name)}: {first_line(error)}: write all values as text, or "
            "all as numbers."
        ) from None


def is_binary(kind: Any) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks)


def leads_out(path: str) -> bool:
    """Whether it is not below the folder that it starts from."""
    return path.startswith("/") or "://" in path or ".." in PurePosixPath(path).parts


def place_of(shard: Shard, path: str) -> str | BadRecord:
    """Returns the place of an image: on this machine, or below the folder of the images."""
    shown = in_one_line(path)
    if path.startswith("data:") or "\0" in path or (shard.is_local and "://" in path):
        return BadRecord(f"{shown}: not the path of a file")
    if not shard.is_local and leads_out(path):
        return BadRecord(f"{shown} is not in the folder of its images or below it")
    return os.path.join(shard.at.image_root, path)


def image_at(shard: Shard, path: str) -> bytes | BadRecord:
    """Reads an image that has its own file."""
    shown, place = in_one_line(path), place_of(shard, path)
    if isinstance(place, BadRecord):
        return place
    outcome = with_retries(lambda: read_file(shard.at.image_fs, place), shard.is_local)
    if isinstance(outcome, FileNotFoundError | NotADirectoryError):
        return BadRecord(f"{shown}: no such file")
    if isinstance(outcome, OSError) and outcome.errno in _OF_THE_FILE:
        return BadRecord(f"{shown}: {outcome.strerror}")
    if isinstance(outcome, Exception):  # not a bad record: the file may be readable later
        raise DataError(f"{shown}: cannot be read: {reason_of(shard.at.uri, outcome)}.")
    return outcome


def join_some(names: Sequence[str], most: int = 5) -> str:
    return first_names(names, most, ", and ")
