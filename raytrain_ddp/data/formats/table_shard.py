"""Tables in memory or mapped into it: lists of images (CSV, TSV, JSON lines), Arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from raytrain_ddp.data.formats.labels import distinct_names, hugging_face_names, is_string
from raytrain_ddp.data.formats.shard import (
    Columns,
    Opened,
    RowGroup,
    Shard,
    check_columns,
    label_range,
    rows_in,
)
from raytrain_ddp.errors import DataError

_GROUP_ROWS = 4096
_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class TableShard(Shard):
    """A table in memory, or mapped into it."""

    _table: Any

    def where_in(self, group: int, place: int) -> str:
        return f"{self.name}, row {self._starts()[group] + place}"

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        table, starts = self._table.select(list(columns)), self._starts()
        parts = [table.slice(starts[group], self.groups[group].rows) for group in groups]
        for part in parts:
            part.validate(full=True)  # a damaged offset would lead anywhere in memory
        return pa.concat_tables(parts)

    def _starts(self) -> list[int]:
        return [0, *accumulate(group.rows for group in self.groups)]


def open_list(at: Opened, columns: Columns) -> TableShard:
    """A file of lines with the paths of images; its rows are counted from 0, without the header."""
    packed = "gzip" if at.name.lower().endswith(".gz") else None
    with at.fs.open_input_stream(at.path, compression=packed) as stream:
        content = stream.read()
    is_json = _has(at.name, ".jsonl", ".ndjson")
    table = _from_json(content) if is_json else _from_csv(content, at.name, columns)
    leaves, path_column, kind = check_columns(at.name, table.schema, columns)
    if not is_json and columns.label and not columns.targets:
        kind = "text"
    if not is_string(table.schema.field(columns.image).type):
        raise DataError(
            f"{at.name}: column {columns.image!r} is {table.schema.field(columns.image).type}; "
            "paths of files are expected. Set --data.image-column."
        )
    kept = (*leaves, *columns.labels)
    table = table.select(kept)
    groups = []
    for start in range(0, table.num_rows, _GROUP_ROWS):
        part = table.slice(start, _GROUP_ROWS)
        labels = label_range(rows_in(part, columns.labels), kind)
        missing = sum(not path for path in part[columns.image].to_pylist())
        groups.append(RowGroup(part.num_rows, kept, part.nbytes, 0, labels, missing))
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
    names = hugging_face_names(schema, columns.labels[0]) if columns.labels else None
    table = pa.Table.from_batches(batches, schema)
    table = table.select([columns.image, *columns.labels]).flatten()
    groups, digest, start = [], sha256(schema.to_string().encode()), 0
    for rows in map(len, batches):
        part = table.slice(start, rows)
        images = [part[leaf] for leaf in leaves]
        used = leaves if images[0].null_count else leaves[:1]
        bytes_of = sum(image.nbytes for image in images)
        values = rows_in(part, columns.labels)
        kept, labels = (*used, *columns.labels), label_range(values, kind)
        missing = sum(image.null_count for image in images) - (len(images) - 1) * rows
        groups.append(RowGroup(rows, kept, part.nbytes, bytes_of, labels, max(0, missing)))
        digest.update(f"{rows} {part.nbytes} {values}".encode())
        start += rows
    class_names = distinct_names(names, at.name) if names else None
    identity = digest.hexdigest()
    return TableShard(at, size, identity, tuple(groups), kind, class_names, path_column, table)


def _has(name: str, *suffixes: str) -> bool:
    """Whether the file, maybe compressed, has one of these suffixes."""
    return name.lower().removesuffix(".gz").endswith(suffixes)


def _from_csv(content: bytes, name: str, columns: Columns) -> Any:
    from pyarrow import csv  # few data sets need it, as below

    texts = (columns.image,) if columns.targets else (columns.image, columns.label)
    table = csv.read_csv(
        pa.BufferReader(content),
        # One block, read by one thread: the row of an error is counted from the start.
        read_options=csv.ReadOptions(use_threads=False, block_size=max(1, len(content))),
        parse_options=csv.ParseOptions(
            delimiter="\t" if _has(name, ".tsv") else ",", newlines_in_values=True
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )
    other = next((mark for mark in ";|\t," if mark in "".join(table.column_names[:1])), None)
    if table.num_columns == 1 and other:
        expected = "tabs" if _has(name, ".tsv") else "commas (in .tsv: tabs)"
        raise DataError(f"{name}: its columns are separated by {other!r}; expected: {expected}.")
    if content.count(b'"') % 2:
        _require_closed(table, name)
    return table


def _require_closed(table: Any, name: str) -> None:
    """Raises DataError if an unclosed quotation mark has merged several rows into one value."""
    for column in table.columns:
        for row, value in enumerate(column.to_pylist() if is_string(column.type) else ()):
            if value and "\n" in value:
                raise DataError(f"{name}, row {row}: a quotation mark is not closed: close it.")


def _from_json(content: bytes) -> Any:
    from pyarrow import json

    options = json.ReadOptions(use_threads=False, block_size=max(1, len(content)))
    return json.read_json(pa.BufferReader(content), read_options=options)
