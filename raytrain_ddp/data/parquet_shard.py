"""One Parquet file of images: its footer, verified when opened, and its row groups."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from raytrain_ddp.data.labels import Kind, distinct_names, hugging_face_names, kind_of
from raytrain_ddp.data.sources import BadRecord
from raytrain_ddp.errors import DataError, RaytrainError, did_you_mean
from raytrain_ddp.uri import attempt, open_uri, reason_of, without_secrets

T = TypeVar("T")

RETRY_S = (1.0, 5.0)  # waits before a store is asked again, after the client's own retries

_TAIL_BYTES = 64 * 2**10  # contains the whole footer of most files
_MAGIC = b"PAR1"
_BUFFER_BYTES = 256 * 2**10
_OPENERS = 16
_ERRORS_SHOWN = 20
_BATCH_BYTES = 2**30  # an Arrow binary array holds at most 2 GiB


class RowGroup(NamedTuple):
    """The footer's metadata of a row group.

    Args:
        columns: to read: the images' bytes, their paths if any bytes are missing, the labels.
        size_bytes: of these columns, uncompressed.
        image_bytes: of the images' bytes, as stored.
        labels: (nulls, min, max) of integer labels; None if the file has no statistics for them.
    """

    rows: int
    columns: tuple[str, ...]
    size_bytes: int
    image_bytes: int
    labels: tuple[int, int, int] | None


@dataclass(frozen=True)
class Shard:
    """A Parquet file; keeps no file open.

    Args:
        name: of the file, without secrets, for messages.
        digest: of the footer, which contains the rows, sizes and offsets of everything in the file.
        kind: of the labels.
        class_names: from the ClassLabel feature, if the file has one.
    """

    uri: str
    name: str
    fs: Any
    path: str
    size_bytes: int
    digest: str
    groups: tuple[RowGroup, ...]
    kind: Kind
    class_names: list[str] | None
    _footer: bytes  # a tenth of the size of its parsed form

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, pafs.LocalFileSystem)

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Columns of a row group as an Arrow table, page checksums verified.

        Raises:
            DataError: the file is missing, damaged or cannot be read.
        """
        return self._answered([group], columns, f", row group {group}")

    def values(self, column: str) -> list[Any]:
        """A small column of all row groups as Python values, shape (rows,).

        Raises:
            DataError: like `read`.
        """
        groups = [group for group, row_group in enumerate(self.groups) if row_group.rows]
        values: list[Any] = self._answered(groups, [column], "").column(0).to_pylist()
        return values

    def where(self, row: int) -> str:
        """File, row group and row in it, for messages."""
        ends = list(accumulate(row_group.rows for row_group in self.groups))
        group = bisect_right(ends, row)
        return f"{self.name}, row group {group}, row {row - ends[group] + self.groups[group].rows}"

    def _answered(self, groups: Sequence[int], columns: Sequence[str], where: str) -> Any:
        outcome = with_retries(lambda: self._read(groups, columns), self.is_local)
        if isinstance(outcome, Exception):
            reason = reason_of(self.uri, outcome)
            raise DataError(f"{self.name}{where}: cannot be read: {reason}.")
        return outcome

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        with self.fs.open_input_file(self.path) as source:
            size = source.size()
            if size != self.size_bytes:
                raise ValueError(f"it has {size} bytes now and had {self.size_bytes} when opened")
            file = pq.ParquetFile(
                source,
                metadata=_parsed(self._footer).metadata,
                # One page at a time: the column is not in memory twice.
                buffer_size=_BUFFER_BYTES if self.is_local else 0,
                # All columns in one request; fsspec files do not support concurrent reads.
                pre_buffer=not self.is_local and not isinstance(self.fs, pafs.PyFileSystem),
                page_checksum_verification=True,
            )
            most = min(self._batch_rows(group) for group in groups)
            batches = file.iter_batches(most, list(groups), list(columns), use_threads=False)
            return pa.Table.from_batches(batches).flatten()

    def _batch_rows(self, group: int) -> int:
        row_group = self.groups[group]
        return max(1, row_group.rows * _BATCH_BYTES // max(_BATCH_BYTES, row_group.size_bytes))


def open_shard(uri: str, image_column: str, label_column: str) -> Shard:
    """Reads and checks the footer of the file at a URI or path.

    Raises:
        DataError: it is missing or damaged, or a column is missing or of the wrong type.
    """
    name = without_secrets(uri)
    is_local = "://" not in uri
    outcome = with_retries(lambda: _open(uri, name, image_column, label_column), is_local)
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, FileNotFoundError):
        raise DataError(f"{name}: no such file.")
    if isinstance(outcome, Exception):
        raise DataError(f"{name}: not a readable Parquet file: {reason_of(uri, outcome)}.")
    return outcome


def with_retries(ask: Callable[[], T], is_local: bool) -> T | Exception:
    """Like `attempt`, but retries errors of an object store a little later."""
    outcome = attempt(ask)
    for wait_s in () if is_local else RETRY_S:
        if not isinstance(outcome, Exception) or isinstance(
            outcome, (FileNotFoundError, RaytrainError)
        ):
            break
        time.sleep(wait_s)
        outcome = attempt(ask)
    return outcome


def _open(uri: str, name: str, image_column: str, label_column: str) -> Shard:
    fs, path = open_uri(uri)
    with fs.open_input_file(path) as source:
        size = source.size()
        footer = _read_footer(source, size)
    file = _parsed(footer)
    leaves, kind = _check_columns(name, file.schema_arrow, image_column, label_column)
    places = {file.metadata.schema.column(i).path: i for i in range(file.metadata.num_columns)}
    groups = tuple(
        _row_group(file.metadata.row_group(i), places, leaves, label_column, kind)
        for i in range(file.metadata.num_row_groups)
    )
    names = hugging_face_names(file.schema_arrow, label_column)
    class_names = distinct_names(names, name) if names else None
    digest = sha256(footer).hexdigest()
    return Shard(uri, name, fs, path, size, digest, groups, kind, class_names, footer)


def _read_footer(source: Any, size: int) -> bytes:
    """The end of a file, from which it can be opened: metadata, their length, magic bytes."""
    tail = source.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if len(tail) < 3 * len(_MAGIC) or tail[-4:] != _MAGIC:
        raise ValueError(f"its {size} bytes do not end with Parquet's magic bytes: truncated?")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size:
        raise ValueError("its footer is damaged")
    if length > len(tail):
        tail = source.read_at(length, size - length)
    return bytes(tail[-length:])


@lru_cache(maxsize=64)
def _parsed(footer: bytes) -> Any:
    return pq.ParquetFile(pa.BufferReader(footer))


def _check_columns(
    name: str, schema: Any, image_column: str, label_column: str
) -> tuple[tuple[str, ...], Kind]:
    """The column paths of the images (bytes, file paths or both), and the kind of the labels."""
    for column in (image_column, label_column):
        if column not in schema.names:
            raise DataError(
                f"{name}: no column {column!r} among {', '.join(schema.names)}."
                f"{did_you_mean(column, schema.names)} Set --data.image-column or "
                "--data.label-column."
            )
    image, label = schema.field(image_column).type, schema.field(label_column).type
    kind = kind_of(label)
    if kind is None:
        raise DataError(
            f"{name}: column {label_column!r} is {label}; expected one integer, string or "
            "boolean per row. Set --data.label-column."
        )
    leaves: tuple[str, ...] = ()
    if _is_binary(image):
        leaves = (image_column,)
    elif pa.types.is_struct(image):
        fits = {"bytes": _is_binary, "path": _is_string}
        fields = {field.name: field.type for field in image}
        leaves = tuple(
            f"{image_column}.{leaf}" for leaf in fits if leaf in fields and fits[leaf](fields[leaf])
        )
    if not leaves:
        raise DataError(
            f"{name}: column {image_column!r} is {image}; encoded images are expected "
            "(struct<bytes, path> or binary)."
        )
    return leaves, kind


def _is_binary(kind: Any) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks)


def _is_string(kind: Any) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _row_group(
    group: Any, places: dict[str, int], leaves: tuple[str, ...], label_column: str, kind: Kind
) -> RowGroup:
    first = group.column(places[leaves[0]])
    known = first.statistics
    if known is not None and known.has_null_count and known.null_count == 0:
        leaves = leaves[:1]
    columns = (*leaves, label_column)
    label = group.column(places[label_column]).statistics if kind == "integer" else None
    labels = None
    if label is not None and label.has_null_count and (label.has_min_max or label.null_count):
        least, largest = (label.min, label.max) if label.has_min_max else (0, 0)
        labels = (int(label.null_count), int(least), int(largest))
    size = sum(group.column(places[column]).total_uncompressed_size for column in columns)
    return RowGroup(group.num_rows, columns, size, first.total_compressed_size, labels)


def open_shards(paths: Sequence[str], image_column: str, label_column: str) -> list[Shard]:
    """Opens all files, or raises one error that lists each unusable file."""
    ask = partial(open_shard, image_column=image_column, label_column=label_column)
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="footers") as pool:
        opened = list(pool.map(lambda path: attempt(lambda: ask(path)), paths))
    errors = [result for result in opened if isinstance(result, Exception)]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, DataError):
            raise error
    if errors:
        listed = join_some([str(error).rstrip(".") for error in errors], _ERRORS_SHOWN, "; ")
        raise DataError(f"{len(errors)} of {len(paths)} files cannot be used: {listed}.")
    return [result for result in opened if isinstance(result, Shard)]


def image_at(shard: Shard, path: str) -> bytes | BadRecord:
    """The image in a separate file: on this machine, or below the folder of the Parquet file."""
    parts = PurePosixPath(path).parts
    if not shard.is_local and (path.startswith("/") or "://" in path or ".." in parts):
        return BadRecord(f"{path} is not in the folder of its Parquet file or below it")
    place = os.path.join(os.path.dirname(shard.path), path)

    def ask() -> bytes:
        with shard.fs.open_input_stream(place, compression=None) as stream:
            return bytes(stream.read())

    outcome = with_retries(ask, shard.is_local)
    if isinstance(outcome, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return BadRecord(f"{path}: no such file")
    if isinstance(outcome, Exception):  # not a bad record: the file may be readable later
        raise DataError(f"{path}: cannot be read: {reason_of(shard.uri, outcome)}.")
    return outcome


def join_some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
