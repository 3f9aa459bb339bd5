"""Tables: Parquet files, Arrow files, and lists of images (CSV, TSV, JSON lines)."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from raytrain_ddp.data.formats.labels import Kind, hugging_face_names, is_string
from raytrain_ddp.data.formats.shard import (
    Columns,
    Opened,
    RowGroup,
    Shard,
    check_columns,
    column_of,
    rows_in,
)
from raytrain_ddp.errors import DataError, quoted

_GROUP_ROWS = 4096
_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class TableShard(Shard):
    """A table in memory, or mapped into it."""

    _table: Any

    def where_in(self, group: int, place: int) -> str:
        return f"{self.name}, row {self.starts()[group] + place}"

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        table, starts = self._table.select(list(columns)), self.starts()
        parts = [table.slice(starts[group], self.groups[group].rows) for group in groups]
        for part in parts:
            part.validate(full=True)  # a damaged offset would lead anywhere in memory
        return pa.concat_tables(parts)


def open_list(at: Opened, columns: Columns) -> TableShard:
    """A file of lines with the paths of images; its rows are counted from 0, without the header."""
    packed = "gzip" if at.name.lower().endswith(".gz") else None
    with at.fs.open_input_stream(at.path, compression=packed) as stream:
        content = stream.read()
    content.decode()  # raises ValueError
    is_json = _has(at.name, ".jsonl", ".ndjson")
    table = (_from_json if is_json else _from_csv)(content, at.name, columns)
    leaves, path_column, kind = check_columns(at.name, table.schema, columns)
    if not is_string(table.schema.field(columns.image).type):
        raise DataError(
            f"{at.name}: column {quoted(columns.image)} is "
            f"{table.schema.field(columns.image).type}; paths of files are expected. Set "
            "--data.image-column."
        )
    kept = (*leaves, *columns.labels)
    table = table.select(kept)
    groups = []
    for start in range(0, table.num_rows, _GROUP_ROWS):
        part = table.slice(start, _GROUP_ROWS)
        missing = sum(not path for path in part[columns.image].to_pylist())
        groups.append(RowGroup(part.num_rows, kept, part.nbytes, 0, without_image=missing))
    digest = sha256(content).hexdigest()
    at = at.below(columns.root)
    return TableShard(at, len(content), digest, tuple(groups), kind, None, path_column, table)


def open_arrow(at: Opened, columns: Columns) -> TableShard:
    """An Arrow stream, as `datasets` writes it, or an Arrow file (Feather). Its record batches are
    the row groups."""
    if not isinstance(at.fs, pafs.LocalFileSystem):
        raise DataError(
            f"{at.name}: Arrow files are read from local disks only: download it, or convert it to "
            "Parquet where it is."
        )
    with pa.memory_map(at.path) as file:
        size, is_file = file.size(), file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        file.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file) as found:
            count = found.num_record_batches if is_file else 0
            schema = found.schema
            batches = [*map(found.get_batch, range(count))] if is_file else list(found)
    leaves, path_column, kind = check_columns(at.name, schema, columns)
    class_names = hugging_face_names(schema, columns.labels, at.name)
    table = pa.Table.from_batches(batches, schema)
    table = table.select([columns.image, *columns.labels]).flatten()
    groups, digest, start = [], sha256(schema.to_string().encode()), 0
    for rows in map(len, batches):
        part = table.slice(start, rows)
        images = [part[leaf] for leaf in leaves]
        used = leaves if images[0].null_count else leaves[:1]
        bytes_of = sum(image.nbytes for image in images)
        missing = max(0, sum(image.null_count for image in images) - (len(images) - 1) * rows)
        kept = (*used, *columns.labels)
        groups.append(RowGroup(rows, kept, part.nbytes, bytes_of, without_image=missing))
        digest.update(f"{rows} {part.nbytes} {rows_in(part, columns.labels)}".encode())
        start += rows
    identity = digest.hexdigest()
    return TableShard(at, size, identity, tuple(groups), kind, class_names, path_column, table)


def _has(name: str, *suffixes: str) -> bool:
    """Whether the file, maybe compressed, has one of these suffixes."""
    return name.lower().removesuffix(".gz").endswith(suffixes)


def _from_csv(content: bytes, name: str, columns: Columns) -> Any:
    from pyarrow import csv  # few data sets need it, as below

    mark = "\t" if _has(name, ".tsv") else ","
    if b'"' in content:
        _require_closed(content, mark, name)
    texts = (columns.image,) if columns.targets else (columns.image, columns.label)
    return csv.read_csv(
        pa.BufferReader(content),
        # One block, read by one thread: the row of an error is counted from the start.
        read_options=csv.ReadOptions(use_threads=False, block_size=max(1, len(content))),
        parse_options=csv.ParseOptions(delimiter=mark, newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )


def _require_closed(content: bytes, mark: str, name: str) -> None:
    """Raises DataError if an unclosed quotation mark would merge several rows into one value.
    Within a line, text may follow a quotation mark, as in ``"a" big``."""
    import csv

    text = io.StringIO(content.decode("utf-8-sig"), newline="")
    reader, row = csv.reader(text, delimiter=mark, strict=True), -1  # the header
    values: list[str] | None = [""]
    while values is not None:
        line, values = reader.line_num + 1, [""]
        try:
            values = next(reader, None)
        except csv.Error as error:
            if reader.line_num > line or "end of data" in str(error):
                where = f"row {row}" if row >= 0 else "the header"
                raise DataError(
                    f"{name}, {where}: a quotation mark is not closed: close it ({error})."
                ) from None
        row += bool(values)


def _from_json(content: bytes, name: str, columns: Columns) -> Any:
    """Reads the columns that are used; others may hold anything."""
    used = {columns.image, *columns.labels}
    rows: list[dict[str, Any]] = []
    found: dict[str, None] = {}
    for line in content.removeprefix(codecs.BOM_UTF8).splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}, row {len(rows)}: not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise DataError(f"{name}, row {len(rows)}: {quoted(row)} is not a JSON object.")
        found |= dict.fromkeys(row)
        rows.append({column: row[column] for column in used & row.keys()})
    if not rows:
        raise DataError(f"{name}: 0 rows.")

    def column(of: str) -> Any:
        if of not in used:
            return pa.nulls(len(rows))
        return column_of(of, [row.get(of) for row in rows], name)

    return pa.table({of: column(of) for of in found})


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
