"""Formats of files with many rows: Parquet, Arrow, and lists of images (CSV, TSV, JSON lines)."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.formats.labels import hugging_face_names
from raytrain_ddp.data.formats.shard import (
    NO_FILE,
    Opened,
    RowGroup,
    Shard,
    column_of,
    columns_of_images,
    label_columns,
    rows_in,
    shard_of,
    unless_failed,
    with_retries,
)
from raytrain_ddp.data.formats.tar_shard import open_tar
from raytrain_ddp.errors import DataError, first_names, quoted
from raytrain_ddp.uri import attempt, without_secrets

_GROUP_ROWS = 4096
_FILE_MAGIC = b"ARROW1"


# ------------------------------------------------------------------ lists


def open_list(at: Opened, config: DataConfig, binary: bool) -> Shard:
    """A file of lines with the paths of images; its rows are counted from 0, without the header."""
    packed = "gzip" if at.name.lower().endswith(".gz") else None
    with at.fs.open_input_stream(at.path, compression=packed) as stream:
        content = stream.read()
    content.decode()  # raises ValueError
    end = at.name.lower().removesuffix(".gz")
    if end.endswith((".jsonl", ".ndjson")):
        table = _from_json(content, at.name, config)
    else:
        table = _from_csv(content, "\t" if end.endswith(".tsv") else ",", at.name, config)
    images, path_column = columns_of_images(at.name, table.schema, config, binary)
    table = table.select([*images, *label_columns(config)])
    parts = (table.slice(start, _GROUP_ROWS) for start in range(0, len(table), _GROUP_ROWS))
    return shard_of(
        at.below(config.root),
        table,
        [RowGroup(len(part), part.nbytes, 0, images) for part in parts],
        size_bytes=len(content),
        digest=sha256(content).hexdigest(),
        images=images,
        path_column=path_column,
    )


def _from_csv(content: bytes, mark: str, name: str, config: DataConfig) -> Any:
    import pyarrow.csv as arrow_csv  # few data sets need it

    if b'"' in content:
        _require_closed(content, mark, name)
    as_text = (config.image_column, *([] if config.target_columns else label_columns(config)))
    return arrow_csv.read_csv(
        pa.BufferReader(content),
        # One block, read by one thread: the row of an error is counted from the start.
        read_options=arrow_csv.ReadOptions(use_threads=False, block_size=max(1, len(content))),
        parse_options=arrow_csv.ParseOptions(delimiter=mark, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(as_text, pa.string())),
    )


def _require_closed(content: bytes, mark: str, name: str) -> None:
    """Raises DataError if an unclosed quotation mark would merge several rows into one value.
    Within a line, text may follow a quotation mark, as in ``"a" big``."""
    text = io.StringIO(content.decode("utf-8-sig") + "\n\n", newline="")
    reader, row = csv.reader(text, delimiter=mark, strict=True), -1  # the header
    while True:
        line = reader.line_num + 1
        try:
            row += bool(next(reader))
        except StopIteration:
            return
        except csv.Error as error:
            if reader.line_num > line:
                where = f"row {row}" if row >= 0 else "the header"
                raise DataError(
                    f"{name}, {where}: a quotation mark is not closed: close it ({error})."
                ) from None
            row += 1


def _from_json(content: bytes, name: str, config: DataConfig) -> Any:
    """Reads the columns that are used; others may hold anything."""
    used = {config.image_column, *label_columns(config)}
    rows: list[dict[str, Any]] = []
    found: dict[str, None] = {}
    for line in filter(bytes.strip, content.removeprefix(codecs.BOM_UTF8).splitlines()):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}, row {len(rows)}: not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise DataError(f"{name}, row {len(rows)}: {quoted(row)} is not a JSON object.")
        found |= dict.fromkeys(row)
        rows.append({column: row.get(column) for column in used})
    if not rows:
        raise DataError(f"{name}: 0 rows.")
    values = {column: [row[column] for row in rows] for column in used & found.keys()}
    table = {column: column_of(column, each, name) for column, each in values.items()}
    return pa.table({column: table.get(column, pa.nulls(len(rows))) for column in found})


# ------------------------------------------------------------------ Arrow


def open_arrow(at: Opened, config: DataConfig, binary: bool) -> Shard:
    """Opens an Arrow stream, as `datasets` writes it, or an Arrow file (Feather).

    The record batches are the row groups.
    """
    at.require_local("Arrow")
    with pa.memory_map(at.path) as file:
        size, is_file = file.size(), file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        file.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file) as found:
            table = found.read_all()
    schema = table.schema
    images, path_column = columns_of_images(at.name, schema, config, binary)
    batches = [len(batch) for batch in table.column(config.image_column).chunks]
    table = table.select([config.image_column, *label_columns(config)]).flatten()
    groups, digest, start = [], sha256(schema.to_string().encode()), 0
    for rows in batches:
        part = table.slice(start, rows)
        bytes_of = sum(part[image].nbytes for image in images)
        groups.append(RowGroup(rows, part.nbytes, bytes_of, images))
        digest.update(f"{rows} {part.nbytes} {rows_in(part, label_columns(config))}".encode())
        start += rows
    return shard_of(
        at,
        table,
        groups,
        size_bytes=size,
        digest=digest.hexdigest(),
        images=images,
        path_column=path_column,
        class_names=hugging_face_names(schema, label_columns(config), at.name),
    )


# ------------------------------------------------------------------ Parquet

_TAIL_BYTES = 64 * 2**10  # contains the whole footer of most files
_BUFFER_BYTES = 256 * 2**10
_MAGIC = b"PAR1"
_BATCH_BYTES = 2**30  # an Arrow binary array holds at most 2 GiB


def open_parquet(at: Opened, config: DataConfig, binary: bool) -> Shard:
    """Opens a Parquet file: reads and checks its footer, which is the digest."""
    with at.fs.open_input_file(at.path) as source:
        size = source.size()
        footer = _read_footer(source, size)
    file = _parsed(footer)
    images, path_column = columns_of_images(at.name, file.schema_arrow, config, binary)
    if images == (path_column,):
        at = at.below(config.root)
    groups = [
        _row_group(file.metadata.row_group(i), images, label_columns(config))
        for i in range(file.metadata.num_row_groups)
    ]
    is_local = isinstance(at.fs, pafs.LocalFileSystem)

    def load(groups_read: Sequence[int], names: Sequence[str]) -> Any:
        with at.fs.open_input_file(at.path) as source:
            if source.size() != size:
                raise ValueError(f"it has {source.size()} bytes now and had {size} when opened")
            file = pq.ParquetFile(
                source,
                metadata=_parsed(footer).metadata,
                # One page at a time: the column is not in memory twice.
                buffer_size=_BUFFER_BYTES if is_local else 0,
                # All columns in one request; fsspec files do not support concurrent reads.
                pre_buffer=not is_local and not isinstance(at.fs, pafs.PyFileSystem),
                page_checksum_verification=True,
            )
            chosen = [groups[group] for group in groups_read]
            most = min(g.rows * _BATCH_BYTES // max(_BATCH_BYTES, g.size_bytes) for g in chosen)
            batches = file.iter_batches(max(1, most), [*groups_read], [*names], use_threads=False)
            return pa.Table.from_batches(batches).flatten()

    return Shard(
        at,
        size,
        sha256(footer).hexdigest(),
        tuple(groups),
        images,
        path_column,
        load,
        lambda group, place: f"{at.name}, row group {group}, row {place}",
        hugging_face_names(file.schema_arrow, label_columns(config), at.name),
    )


def _read_footer(source: Any, size: int) -> bytes:
    """The end of a file, from which it can be opened: metadata, their length, magic bytes."""
    tail = source.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= size and tail.endswith(_MAGIC):  # else, pyarrow says what is wrong
        tail = source.read_at(length, size - length)
    return bytes(tail[-length:])


@lru_cache(maxsize=64)
def _parsed(footer: bytes) -> Any:
    """The file without its rows; the footer takes a tenth of the memory of its parsed form."""
    return pq.ParquetFile(pa.BufferReader(footer))


def _row_group(group: Any, images: tuple[str, ...], labels: tuple[str, ...]) -> RowGroup:
    columns = {each.path_in_schema: each for each in map(group.column, range(group.num_columns))}
    first = columns[images[0]]
    used = images[:1] if first.statistics and first.statistics.null_count == 0 else images
    read = tuple(f"{name}." for name in (*used, *labels))  # a list's path has more parts
    sizes = (c.total_uncompressed_size for n, c in columns.items() if f"{n}.".startswith(read))
    return RowGroup(group.num_rows, sum(sizes), first.total_compressed_size, used)


# ------------------------------------------------------------------ any of them

_OPENERS = 16
_ERRORS_SHOWN = 20


class Format(NamedTuple):
    """A format of files: the ends of their names, in lower case, and how to open one.

    `open` reads and checks the description of a file's rows. It raises DataError if the file cannot
    be used, or another error if it is missing or damaged.
    """

    title: str
    ends: tuple[str, ...]
    open: Callable[[Opened, DataConfig, bool], Shard]


_PACKED = ("", ".gz")
_LISTS = tuple(end + more for end in (".csv", ".tsv", ".jsonl", ".ndjson") for more in _PACKED)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
FORMATS = (
    Format("Parquet", (".parquet",), open_parquet),
    Format("Arrow", (".arrow",), open_arrow),
    Format("tar", _TARS, open_tar),
    Format("CSV, TSV or JSON lines", _LISTS, open_list),
)


def format_of(name: str) -> Format | None:
    """The format of a file of this name."""
    return next((form for form in FORMATS if name.lower().endswith(form.ends)), None)


def open_shard(uri: str, config: DataConfig, binary: bool) -> Shard:
    """Reads and checks the description of the rows of a file at a URI or path.

    Raises:
        DataError: it is missing or damaged, or a column is missing or of the wrong type.
    """
    name = without_secrets(uri)
    form = format_of(name) or FORMATS[0]
    if not os.path.isfile(uri) and not os.path.isdir(uri) and os.path.exists(uri):
        raise DataError(f"{name}: {NO_FILE}: remove it.")
    is_local = "://" not in uri
    outcome = with_retries(lambda: form.open(Opened.at(uri, name), config, binary), is_local)
    if isinstance(outcome, FileNotFoundError):
        raise DataError(f"{name}: no such file.")
    return unless_failed(outcome, uri, f"{name}: not a readable {form.title} file")


def open_shards(paths: Sequence[str], config: DataConfig, binary: bool) -> list[Shard]:
    """Opens all files, or raises one error that lists each unusable file."""
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="footers") as pool:
        asked = [pool.submit(open_shard, path, config, binary) for path in paths]
    opened = [attempt(each.result) for each in asked]
    errors = [result for result in opened if isinstance(result, Exception)]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, DataError):
            raise error
    if errors:
        texts = [str(error).rstrip(".") for error in errors]
        listed = first_names(texts, _ERRORS_SHOWN, "; and ", "; ")
        raise DataError(f"{len(errors)} of {len(paths)} files cannot be used: {listed}.")
    return [result for result in opened if isinstance(result, Shard)]
