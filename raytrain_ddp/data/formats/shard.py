"""A file of images and labels, of any format: a table that is read in groups of rows."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.formats.labels import STRINGS, check_targets, is_label
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

RETRY_S = (1.0, 5.0)  # waits before a store is asked again, after the client's own retries
NO_FILE = "a named pipe, socket or device, not a file"
_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())
_DISK = pafs.LocalFileSystem()
_STAT_THREADS = 16
_READ_BYTES = 2**16
_OF_THE_FILE = (
    *(errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO),
)


def label_columns(config: DataConfig) -> tuple[str, ...]:
    """The columns with the labels or targets; none if no labels are read."""
    return config.target_columns or ((config.label_column,) if config.label_column else ())


class RowGroup(NamedTuple):
    """Rows that are read together.

    Args:
        size_bytes: the size of the columns that are read, uncompressed.
        image_bytes: the size of the images, as stored.
        images: the columns of `Shard.images` to read; not the paths if all images have bytes.
    """

    rows: int
    size_bytes: int
    image_bytes: int
    images: tuple[str, ...]


class Opened(NamedTuple):
    """Where a file is.

    Args:
        name: the name for messages, without secrets.
        image_fs, image_root: the place that the paths of images are relative to.
    """

    uri: str
    name: str
    fs: Any
    path: str
    image_fs: Any
    image_root: str

    @staticmethod
    def at(uri: str, name: str) -> Opened:
        fs, path = open_uri(uri)
        return Opened(uri, name, fs, path, fs, os.path.dirname(path))

    def below(self, root: str | None) -> Opened:
        """This place, with the images of a list in the folder `root`; None: in that of the list."""
        if root is None:
            return self
        fs, folder = open_uri(root)
        return self._replace(image_fs=fs, image_root=os.path.expanduser(folder))

    def require_local(self, kind: str) -> None:
        if not isinstance(self.fs, pafs.LocalFileSystem):
            raise DataError(
                f"{self.name}: {kind} files are read from local disks only: download it, or "
                "convert it to Parquet where it is."
            )


Load = Callable[[Sequence[int], Sequence[str]], Any]
"""Returns columns of row groups as an Arrow table, structs flattened."""


@dataclass(frozen=True)
class Shard:
    """A file of images and labels; keeps no file open.

    Args:
        digest: changes if the rows, sizes or offsets of anything in the file change.
        images: the columns of the images: their bytes, their paths, or both.
        class_names: from the ClassLabel feature, if the file has one.
        path_column: the column with the paths of images, or their names in an archive; "": none.
        where_in: names a row for messages, from its group and its place there.
        left_out: the names of members of an archive that belong to no sample.
    """

    at: Opened
    size_bytes: int
    digest: str
    groups: tuple[RowGroup, ...]
    images: tuple[str, ...]
    path_column: str
    load: Load
    where_in: Callable[[int, int], str]
    class_names: list[str] | None = None
    left_out: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.at.name

    @property
    def is_local(self) -> bool:
        """Whether the file, and the images that it names, are on this machine."""
        return all(isinstance(fs, pafs.LocalFileSystem) for fs in (self.at.fs, self.at.image_fs))

    @property
    def has_files(self) -> bool:
        """Whether all images are in files of their own."""
        return self.images == (self.path_column,)

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        """Columns of row groups as an Arrow table, verified as far as the format allows.

        Raises:
            DataError: the file is missing, damaged or cannot be read.
        """
        where = f", row group {groups[0]}" if len(groups) == 1 else ""
        what = f"{self.name}{where}: cannot be read"
        outcome = with_retries(lambda: self.load(groups, columns), self.is_local)
        return unless_failed(outcome, self.at.uri, what)

    def values(self, *columns: str) -> list[Any]:
        """Small columns of all row groups as Python values, see `rows_in`.

        Raises:
            DataError: like `read`.
        """
        groups = [group for group, row_group in enumerate(self.groups) if row_group.rows]
        return rows_in(self.read(groups, columns), columns) if groups else []

    def place_of(self, path: str) -> str | BadRecord:
        """The place of an image: on this machine, or below the folder of the images."""
        shown = in_one_line(path)
        if path.startswith("data:") or "\0" in path or (self.is_local and "://" in path):
            return BadRecord(f"{shown}: not the path of a file")
        if not self.is_local and leads_out(path):
            return BadRecord(f"{shown} is not in the folder of its images or below it")
        return os.path.join(self.at.image_root, path)

    def image_at(self, path: str) -> bytes | BadRecord:
        """Reads an image that has its own file."""
        place, shown = self.place_of(path), in_one_line(path)
        if isinstance(place, BadRecord):
            return place
        image = image_in(self.at.image_fs, place, self.at.uri, shown)
        return BadRecord(f"{shown}: {image}") if isinstance(image, BadRecord) else image


def shard_of(at: Opened, table: Any, groups: Sequence[RowGroup], **facts: Any) -> Shard:
    """Makes a shard of a table that is in memory, or mapped into it."""
    starts = [0, *accumulate(group.rows for group in groups)]

    def load(chosen: Sequence[int], columns: Sequence[str]) -> Any:
        used = table.select([*columns])
        parts = [used.slice(starts[group], groups[group].rows) for group in chosen]
        for part in parts:
            part.validate(full=True)  # a damaged offset would lead anywhere in memory
        return pa.concat_tables(parts)

    def where_in(group: int, place: int) -> str:
        return f"{at.name}, row {starts[group] + place}"

    return Shard(at, groups=tuple(groups), load=load, where_in=where_in, **facts)


def rows_in(table: Any, columns: Sequence[str]) -> list[Any]:
    """The Python value of each row, shape (rows,); of several columns, a tuple."""
    # In pure Python: a worker's first read must not import pyarrow.compute, or pandas for to_numpy.
    values = [table.column(name).to_pylist() for name in columns]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def columns_of_images(
    name: str, schema: Any, config: DataConfig, binary: bool
) -> tuple[tuple[str, ...], str]:
    """The columns of the images (bytes, paths of files, or both), and that of the paths.

    Raises:
        DataError: a column is missing, there are two of that name, or it has the wrong type.
    """
    flag = "--data.target-columns" if config.target_columns else "--data.label-column"
    flags = f"--data.image-column or {flag}" if label_columns(config) else "--image-column"
    for column in (config.image_column, *label_columns(config)):
        if schema.names.count(column) > 1:
            raise DataError(f"{name}: has several columns named {quoted(column)}.")
        if column not in schema.names:
            raise DataError(
                f"{name}: no column {quoted(column)} among {first_names(schema.names)}."
                f"{did_you_mean(column, schema.names)} Set {flags}."
            )
    types = {column: schema.field(column).type for column in label_columns(config)}
    if config.target_columns:
        check_targets(name, types, binary)
    elif config.label_column and not is_label(types[config.label_column]):
        raise DataError(
            f"{name}: column {quoted(config.label_column)} is {types[config.label_column]}; "
            f"expected one integer, string or boolean per row. Set {flag}; or, for several labels "
            "or numbers, --data.target-columns."
        )
    image = schema.field(config.image_column).type
    if image in (*_BINARIES, *STRINGS):
        return (config.image_column,), config.image_column if image in STRINGS else ""
    fields = {field.name: field.type for field in image} if pa.types.is_struct(image) else {}
    fits = {"bytes": _BINARIES, "path": STRINGS}
    usable = {of: f"{config.image_column}.{of}" for of in fits if fields.get(of) in fits[of]}
    if not usable:
        raise DataError(
            f"{name}: column {quoted(config.image_column)} is {image}; encoded images "
            "(struct<bytes, path> or binary) or paths of files are expected. Set "
            "--data.image-column."
        )
    return tuple(usable.values()), usable.get("path", "")


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


def leads_out(path: str) -> bool:
    """Whether it is not below the folder that it starts from."""
    return path.startswith("/") or "://" in path or ".." in PurePosixPath(path).parts


# ------------------------------------------------------------------ reading


def read_file(fs: Any, path: str) -> bytes:
    """The bytes as they are, whatever the name ends with; of a disk, in fewer system calls than
    `open` needs.

    Raises:
        OSError: it cannot be read; ENXIO if it might never end.
    """
    if not isinstance(fs, pafs.LocalFileSystem):
        with fs.open_input_stream(path, compression=None) as stream:
            return bytes(stream.read())
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's writer
    try:
        seen = os.fstat(file)
        if not S_ISREG(seen.st_mode) and not S_ISDIR(seen.st_mode):
            raise OSError(errno.ENXIO, NO_FILE)
        pieces = [os.read(file, seen.st_size + 1)]
        while more := os.read(file, _READ_BYTES):  # of more than 2 GiB, or still growing
            pieces.append(more)
        return b"".join(pieces)
    finally:
        os.close(file)


def reason_of_file(error: Exception) -> str:
    """Why a file itself cannot be read; "" if it may be readable later."""
    if isinstance(error, FileNotFoundError):  # of a store, too
        return "no such file"
    if isinstance(error, OSError) and error.errno in _OF_THE_FILE:
        return str(error.strerror)
    return ""


def image_in(fs: Any, path: str, uri: str, shown: str) -> bytes | BadRecord:
    """The bytes of a file; a `BadRecord` if it cannot be read for a reason of its own.

    Raises:
        DataError: it cannot be read for another reason, so it may be readable later.
    """
    outcome = with_retries(lambda: read_file(fs, path), isinstance(fs, pafs.LocalFileSystem))
    if isinstance(outcome, Exception) and (reason := reason_of_file(outcome)):
        return BadRecord(reason)
    return unless_failed(outcome, uri, f"{shown}: cannot be read")


def content_of(path: str) -> bytes | BadRecord:
    """The bytes of a file on this machine, as `image_in`."""
    return image_in(_DISK, path, path, path)


def sizes_of(paths: Sequence[str]) -> list[int]:
    """The sizes of files in bytes; -1 where there is no such file, as for a broken link."""

    def size(path: str) -> int:
        try:
            return os.path.getsize(path)
        except (OSError, ValueError):  # or it has a null character
            return -1

    with ThreadPoolExecutor(_STAT_THREADS) as threads:  # for NFS
        return list(threads.map(size, paths))


def with_retries(ask: Callable[[], T], is_local: bool) -> T | Exception:
    """Like `attempt`, but retries errors of an object store a little later."""
    outcome = attempt(ask)
    for wait_s in () if is_local else RETRY_S:
        if not isinstance(outcome, Exception) or not is_passing(outcome):
            break
        time.sleep(wait_s)
        outcome = attempt(ask)
    return outcome


def unless_failed(outcome: T | Exception, uri: str, what: str) -> T:
    """Returns an outcome; raises DataError (``what: why``, without secrets) if it is an error."""
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, Exception):
        raise DataError(f"{what}: {reason_of_file(outcome) or reason_of(uri, outcome)}.")
    return outcome
