"""A Parquet file of images: its footer, verified when opened, and its row groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from raytrain_ddp.data.formats.labels import Kind, hugging_face_names
from raytrain_ddp.data.formats.shard import Columns, Opened, RowGroup, Shard, check_columns

_TAIL_BYTES = 64 * 2**10  # contains the whole footer of most files
_MAGIC = b"PAR1"
_BUFFER_BYTES = 256 * 2**10
_BATCH_BYTES = 2**30  # an Arrow binary array holds at most 2 GiB


@dataclass(frozen=True)
class ParquetShard(Shard):
    """A Parquet file. The digest is that of the footer."""

    reads_labels = False
    _footer: bytes  # a tenth of the size of its parsed form

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        with self.at.fs.open_input_file(self.at.path) as source:
            size = source.size()
            if size != self.size_bytes:
                raise ValueError(f"it has {size} bytes now and had {self.size_bytes} when opened")
            file = pq.ParquetFile(
                source,
                metadata=_parsed(self._footer).metadata,
                # One page at a time: the column is not in memory twice.
                buffer_size=_BUFFER_BYTES if self.is_local else 0,
                # All columns in one request; fsspec files do not support concurrent reads.
                pre_buffer=not self.is_local and not isinstance(self.at.fs, pafs.PyFileSystem),
                page_checksum_verification=True,
            )
            most = min(self._batch_rows(group) for group in groups)
            batches = file.iter_batches(most, list(groups), list(columns), use_threads=False)
            return pa.Table.from_batches(batches).flatten()

    def _batch_rows(self, group: int) -> int:
        row_group = self.groups[group]
        return max(1, row_group.rows * _BATCH_BYTES // max(_BATCH_BYTES, row_group.size_bytes))


def open_parquet(at: Opened, columns: Columns) -> ParquetShard:
    """Reads and checks the footer."""
    with at.fs.open_input_file(at.path) as source:
        size = source.size()
        footer = _read_footer(source, size)
    file = _parsed(footer)
    leaves, path_column, kind = check_columns(at.name, file.schema_arrow, columns)
    if path_column == columns.image:
        at = at.below(columns.root)
    places: dict[str, int] = {}
    for i in range(file.metadata.num_columns):
        path = file.metadata.schema.column(i).path
        places[path] = i
        places.setdefault(path.partition(".")[0], i)  # of a column of lists
    groups = tuple(
        _row_group(file.metadata.row_group(i), places, leaves, columns.labels, kind)
        for i in range(file.metadata.num_row_groups)
    )
    class_names = hugging_face_names(file.schema_arrow, columns.labels, at.name)
    digest = sha256(footer).hexdigest()
    return ParquetShard(at, size, digest, groups, kind, class_names, path_column, footer)


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


def _row_group(
    group: Any,
    places: dict[str, int],
    leaves: tuple[str, ...],
    of_labels: tuple[str, ...],
    kind: Kind,
) -> RowGroup:
    first = group.column(places[leaves[0]])
    known = [group.column(places[leaf]).statistics for leaf in leaves]
    nulls = [each.null_count if each and each.has_null_count else None for each in known]
    counted = sum(each or 0 for each in nulls)
    without_image = max(0, counted - (len(leaves) - 1) * group.num_rows)
    if nulls[0] == 0:
        leaves = leaves[:1]
    columns = (*leaves, *of_labels)
    label = group.column(places[of_labels[0]]).statistics if kind == "integer" else None
    labels = None
    if label is not None and label.has_null_count and (label.has_min_max or label.null_count):
        least, largest = (label.min, label.max) if label.has_min_max else (0, 0)
        labels = (int(label.null_count), int(least), int(largest))
    size = sum(group.column(places[column]).total_uncompressed_size for column in columns)
    stored = first.total_compressed_size
    return RowGroup(group.num_rows, columns, size, stored, labels, without_image)
