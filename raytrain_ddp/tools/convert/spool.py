"""Copies sources without cheap random access into files that have it.

A shuffled shard has rows from everywhere. Reading each from Parquet would cost its whole row group;
so the images are first written consecutively to plain files, `.bin`, each with an index, `.json`.
Every row group is read once, by one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.formats.image_folder import LOST_LINK, NO_FILE, stats_of
from raytrain_ddp.data.formats.shard_formats import open_shard, open_shards
from raytrain_ddp.data.formats.shard_images import ShardImages, columns_of
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.data.pixels.decoding import reason_for
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import read_json, replace_with, write_json
from raytrain_ddp.tools.convert.pixels import encode_png
from raytrain_ddp.tools.convert.shard_writer import Record, Tell

CHUNK_ROWS = 2048  # and at least one row group
_PNG_ROWS = 64  # encoded at a time

Item = tuple[bytes | BadRecord, int, str | None]  # image, label, path


@dataclass(frozen=True)
class SpoolListing:
    """Where the image of each row of a split is; each array has shape (rows,).

    Args:
        file_of: indices into `files`.
        sizes: bytes; -1 for a row in `bad`.
        bad: rows without an image, and why.
    """

    files: list[str]
    file_of: Rows
    offsets: Rows
    sizes: Rows
    labels: Rows
    paths: list[str | None]
    bad: dict[int, str]

    def record(self, row: int) -> Record:
        file, offset, size, label = (
            int(column[row]) for column in (self.file_of, self.offsets, self.sizes, self.labels)
        )
        return Record(row, self.files[file], offset, size, label, self.paths[row])


@dataclass(frozen=True)
class Chunk:
    """Row groups first..stop-1 of a Parquet file, to be spooled as `name`."""

    name: str
    stage: str
    path: str
    first: int
    stop: int
    classes: tuple[str, ...]
    named: Sequence[str] | None
    config: DataConfig


def parquet_chunks(
    split: str, stage: Path, paths: Sequence[str], source: ShardImages, config: DataConfig
) -> list[Chunk]:
    """The files' row groups in order, in runs of `CHUNK_ROWS` rows or one row group."""
    spans: list[tuple[str, int, int]] = []
    for path, shard in zip(paths, open_shards(paths, columns_of(config)), strict=True):
        first = rows = 0
        for group, row_group in enumerate(shard.groups):
            if rows and rows + row_group.rows > CHUNK_ROWS:
                spans.append((path, first, group))
                first, rows = group, 0
            rows += row_group.rows
        if rows:
            spans.append((path, first, len(shard.groups)))
    names = tuple(source.class_names), source.named
    return [
        Chunk(f"{split}-{number:06d}", str(stage), path, first, stop, *names, config)
        for number, (path, first, stop) in enumerate(spans)
    ]


def spool_chunk(chunk: Chunk, tell: Tell) -> str:
    """Spools a chunk, unless that is done already, and returns its name.

    Raises:
        DataError: the file is damaged, or a label is not in `classes`.
    """
    spool = Path(chunk.stage) / "state" / "spool"
    if not (spool / f"{chunk.name}.json").exists():
        write_spool(spool, chunk.name, _parquet_items(chunk), tell)
    return chunk.name


def spool_images(source: Any, split: str, stage: Path, tell: Tell) -> Iterator[str]:
    """Spools a source of PIL images as PNG, in this process."""
    spool = stage / "state" / "spool"
    rows = int(source.blocks.sum())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for number, start in enumerate(range(0, rows, CHUNK_ROWS)):
            name = f"{split}-{number:06d}"
            if not (spool / f"{name}.json").exists():
                items = _pil_items(source, range(start, min(start + CHUNK_ROWS, rows)), threads)
                write_spool(spool, name, items, tell)
            yield name


def write_spool(spool: Path, name: str, items: Iterable[Item], tell: Tell) -> None:
    index: dict[str, Any] = {"sizes": [], "labels": [], "paths": [], "bad": {}}
    state = spool.parent
    with replace_with(spool / f"{name}.bin", state) as temp, temp.open("wb") as file:
        for row, (image, label, path) in enumerate(items):
            size = -1
            if isinstance(image, BadRecord):
                index["bad"][row] = str(image)
            else:
                size = file.write(image)
            index["sizes"].append(size)
            index["labels"].append(label)
            index["paths"].append(path)
            tell(1, max(size, 0))
    write_json(spool / f"{name}.json", index, state)


def listing_of_spool(spool: Path, names: Iterable[str]) -> SpoolListing:
    """The listing of all rows of a split whose chunks have these names, in order."""
    files: list[str] = []
    columns: list[Rows] = []  # of each chunk: file, offset, size, label; (4, rows)
    paths: list[str | None] = []
    bad: dict[int, str] = {}
    for number, name in enumerate(names):
        index = read_json(spool / f"{name}.json")
        assert index is not None, f"{name} was not written"
        bad.update({len(paths) + int(row): why for row, why in index["bad"].items()})
        files.append(str(spool / f"{name}.bin"))
        paths += index["paths"]
        sizes = np.array(index["sizes"], np.int64)
        lengths = np.maximum(sizes, 0)
        offsets = np.cumsum(lengths) - lengths
        columns.append(np.stack([np.full_like(sizes, number), offsets, sizes, index["labels"]]))
    file_of, offsets, sizes, labels = np.concatenate(columns, axis=1)
    return SpoolListing(files, file_of, offsets, sizes, labels, paths, bad)


def listing_of_files(files: list[tuple[str, int]], root: str) -> SpoolListing:
    """The listing of images in files of their own."""
    paths = [path for path, _ in files]
    sizes = np.full(len(files), -1, np.int64)
    bad: dict[int, str] = {}
    for row, (path, seen) in enumerate(zip(paths, stats_of(paths), strict=True)):
        if isinstance(seen, OSError):
            bad[row] = _why_lost(path, seen)
        elif S_ISDIR(seen.st_mode):  # the folder of the images, if a list names none
            bad[row] = "the image is null" if path.endswith("/") else "is a folder"
        elif not S_ISREG(seen.st_mode):
            bad[row] = NO_FILE
        else:
            sizes[row] = seen.st_size
    return SpoolListing(
        paths,
        np.arange(len(files)),
        np.zeros_like(sizes),
        sizes,
        np.array([label for _, label in files], np.int64),
        [path.removeprefix(f"{root.rstrip('/')}/") for path in paths],
        bad,
    )


def _parquet_items(chunk: Chunk) -> Iterator[Item]:
    config = chunk.config
    shard = open_shard(chunk.path, columns_of(config))
    start = sum(row_group.rows for row_group in shard.groups[: chunk.first])
    with closing(ShardImages([chunk.path], config, chunk.classes, named=chunk.named)) as source:
        for group in range(chunk.first, chunk.stop):
            rows = start + np.arange(shard.groups[group].rows, dtype=np.int64)
            start += len(rows)
            if not len(rows):
                continue
            paths = [None] * len(rows)
            if shard.path_column:
                paths = shard.read(group, [shard.path_column]).column(0).to_pylist()
            for (image, label), path in zip(source.read(rows), paths, strict=True):
                yield image, label, path


def _pil_items(source: Any, rows: range, threads: ThreadPoolExecutor) -> Iterator[Item]:
    def encoded(record: tuple[Any, int]) -> bytes | BadRecord:
        try:
            return record[0] if isinstance(record[0], bytes | BadRecord) else encode_png(record[0])
        except Exception as error:  # PIL decodes lazily, and decoders raise any type
            return BadRecord(reason_for(error))

    for start in range(rows.start, rows.stop, _PNG_ROWS):
        some = range(start, min(start + _PNG_ROWS, rows.stop))
        records = [_read_one(source, row) for row in some]
        for row, image, (_, label) in zip(
            some, threads.map(encoded, records), records, strict=True
        ):
            yield image, int(label), f"{row}.png"


def _read_one(source: Any, row: int) -> tuple[Any, int]:
    try:
        image, label = source.read(np.array([row], np.int64))[0]
    except DataError:
        raise
    except Exception as error:  # any exception of the data set
        raise DataError(f"{source.where(row)}: cannot be read: {error}.") from error
    return image, label


def _why_lost(path: str, error: OSError) -> str:
    if os.path.islink(path):
        return LOST_LINK
    if isinstance(error, FileNotFoundError | NotADirectoryError):  # named by a list
        return "no such file"
    raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
