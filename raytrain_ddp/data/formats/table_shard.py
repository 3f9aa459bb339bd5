"""Tables in memory or mapped into it: lists of images (CSV, TSV, JSON lines), Arrow files."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from raytrain_ddp.data.formats.labels import hugging_face_names, is_string
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
    _require_text(content, at.name)
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


def _require_text(content: bytes, name: str) -> None:
    """Raises DataError for encodings other than UTF-8, and for a null character, which no path
    has."""
    try:
        content.decode()
        place = content.find(b"\0")
    except UnicodeDecodeError as error:
        place = error.start
    if place >= 0:
        line = len(content[: place + 1].splitlines())
        raise DataError(
            f"{name}, line {line}: byte {content[place]:#04x} is not UTF-8 text: save the file as "
            "UTF-8."
        )


def _from_csv(content: bytes, name: str, columns: Columns) -> Any:
    from pyarrow import csv  # few data sets need it, as below

    mark = "\t" if _has(name, ".tsv") else ","
    if b'"' in content:
        _require_closed(content, mark, name)
    texts = (columns.image,) if columns.targets else (columns.image, columns.label)
    table = csv.read_csv(
        pa.BufferReader(content),
        # One block, read by one thread: the row of an error is counted from the start.
        read_options=csv.ReadOptions(use_threads=False, block_size=max(1, len(content))),
        parse_options=csv.ParseOptions(delimiter=mark, newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )
    other = next((other for other in ";|\t," if other in "".join(table.column_names[:1])), None)
    if table.num_columns == 1 and other:
        expected = "tabs" if mark == "\t" else "commas (in .tsv: tabs)"
        raise DataError(
            f"{name}: its columns are separated by {quoted(other)}; expected: {expected}."
        )
    return table


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
        return column_of(of, [row.get(of) for row in rows], lambda row: f"{name}, row {row}")

    return pa.table({of: column(of) for of in found})
