"""Images in Parquet files, as Hugging Face `datasets` writes them. Row groups are the blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from raytrain_ddp.data.disk_cache import DiskCache
from raytrain_ddp.data.draws import Rows
from raytrain_ddp.data.groups import Groups
from raytrain_ddp.data.shard import Shard, open_shard, patiently
from raytrain_ddp.data.source import BadRecord
from raytrain_ddp.errors import DataError
from raytrain_ddp.inputs import DataConfig
from raytrain_ddp.uri import attempt, reason_of

Image = bytes | BadRecord

_MIB = 2**20
_BLOCKS_FROM_BYTES = 512 * _MIB  # of images: with more, a shuffle of all rows is no good idea
_OPENERS = 16
_ERRORS_SHOWN = 20
_READERS = 2  # of local files: little more than copying, beside threads that decode
_REMOTE_READERS = 8  # of object stores: mostly waiting


class ParquetImages:
    """Rows of (encoded image, label) from Parquet files.

    A row group is read once and kept until all its rows have been read; `ahead` has it read before.
    An image that is null or whose file is missing is a `BadRecord`.

    Args:
        paths: of files, or URIs; rows are numbered through them in this order.
        config: `image_column` is struct<bytes, path> or binary, `label_column` integers from 0.

    Raises:
        DataError: files are missing or damaged, columns are missing or of the wrong type, or labels
            are null or no class; naming the files.
    """

    def __init__(self, paths: Sequence[str], config: DataConfig) -> None:
        self._columns = config.image_column, config.label_column
        self._shards = _open_all(paths, *self._columns)
        self._blocks = [  # (shard, row group)
            (shard, group)
            for shard in self._shards
            for group, told in enumerate(shard.groups)
            if told.rows
        ]
        told_of_all = [shard.groups[group] for shard, group in self._blocks]
        if not told_of_all:
            raise DataError(f"{_some([shard.name for shard in self._shards])}: 0 rows.")
        self.blocks: Rows = np.array([told.rows for told in told_of_all], np.int64)
        self.block_bytes: Rows = np.array([told.size_bytes for told in told_of_all], np.int64)
        self._starts = np.cumsum(self.blocks) - self.blocks
        self.prefers_blocks = sum(told.image_bytes for told in told_of_all) > _BLOCKS_FROM_BYTES
        self.class_names = self._find_class_names()
        self._check_statistics()
        self._remote = any(not shard.is_local for shard in self._shards)
        self._cache: DiskCache | None = None
        if config.cache and self._remote:
            keys = {self._key(shard) for shard in self._shards}
            self._cache = DiskCache(config.cache, int(config.cache_gib * 2**30), keys)
        self._groups = Groups(
            self._load,
            self.blocks,
            self.block_bytes,
            config.memory_mib * _MIB,
            _REMOTE_READERS if self._remote else _READERS,
        )

    def read(self, rows: Rows) -> list[tuple[Image, int]]:
        blocks = self._blocks_of(rows)
        places = rows - self._starts[blocks]
        wanted = list(dict.fromkeys(blocks.tolist()))
        if self._remote:  # all at the same time, the first of them by this thread
            self._groups.ahead(wanted[1:])
        records: list[Any] = [None] * len(rows)
        for block in wanted:
            chosen = np.flatnonzero(blocks == block)
            group = self._groups.get(block, places[chosen])
            for index, place in zip(chosen.tolist(), places[chosen].tolist(), strict=True):
                records[index] = self._image(block, group, place), group.labels[place]
        return records

    def ahead(self, rows: Rows) -> None:
        """Has the row groups of these rows read, which nobody has read yet. Returns at once."""
        self._groups.ahead(self._blocks_of(rows).tolist())

    def close(self) -> None:
        """Ends the threads that read ahead; the source remains of use."""
        self._groups.close()

    @property
    def reads(self) -> tuple[int, int]:
        """Row groups read so far, and how many of them again because memory did not suffice."""
        return self._groups.loads, self._groups.reloads

    def fingerprint(self) -> str:
        """Of the files' names, sizes and footers, wherever the files lie."""
        digest = sha256()
        for shard in self._shards:
            name = PurePosixPath(shard.path).name
            digest.update(f"{name} {shard.size_bytes} {shard.digest}\n".encode())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """File, row group and row in it, for messages."""
        block = int(self._blocks_of(np.array([row]))[0])
        shard, group = self._blocks[block]
        return f"{shard.name}, row group {group}, row {row - int(self._starts[block])}"

    def _blocks_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _load(self, block: int) -> _Group:
        shard, group = self._blocks[block]
        columns = shard.groups[group].columns
        if self._cache is None or shard.is_local:
            table = shard.read(group, columns)
        else:
            name = f"{self._key(shard)}-{group}"
            table = self._cache.table(name, lambda: shard.read(group, columns))
        kept: dict[str, Any] = {}
        for name in columns[:-1]:
            column = table.column(name)
            is_path = name.endswith(".path") and name != self._columns[0]
            kept["paths" if is_path else "images"] = (
                column.chunk(0) if column.num_chunks == 1 else column
            )
        return _Group(labels=self._labels(block, table), nbytes=table.nbytes, **kept)

    def _labels(self, block: int, table: Any) -> list[int]:
        # In Python: a worker's first read is not to import pyarrow.compute, or pandas for to_numpy.
        labels: list[int] = table.column(self._columns[1]).to_pylist()
        classes = len(self.class_names)
        for place, label in enumerate(labels):
            if label is None or not 0 <= label < classes:
                raise self._bad_label(self.where(int(self._starts[block]) + place), label)
        return labels

    def _image(self, block: int, group: _Group, place: int) -> Image:
        if group.images is not None:
            image = group.images[place].as_py()
            if image is not None:
                return bytes(image)
        path = None if group.paths is None else group.paths[place].as_py()
        if not path:
            return BadRecord("the image is null")
        return _image_at(self._blocks[block][0], path)

    def _key(self, shard: Shard) -> str:
        told = f"{shard.name} {shard.size_bytes} {shard.digest} {self._columns}"
        return sha256(told.encode()).hexdigest()[:32]

    def _find_class_names(self) -> list[str]:
        """From the ClassLabel feature, else one name per label up to the largest."""
        named = [shard for shard in self._shards if shard.class_names]
        for shard in named:
            if shard.class_names != named[0].class_names:
                raise DataError(
                    f"{shard.name}: its class names ({_some(shard.class_names or [])}) are not "
                    f"those of {named[0].name} ({_some(named[0].class_names or [])})."
                )
        if named:
            return list(named[0].class_names or [])
        with ThreadPoolExecutor(_OPENERS, thread_name_prefix="labels") as pool:
            largest = max(pool.map(self._largest_label, self._blocks))
        return [str(label) for label in range(largest + 1)]

    def _largest_label(self, block: tuple[Shard, int]) -> int:
        shard, group = block
        told = shard.groups[group].labels
        if told is not None:
            return told[2]
        labels = shard.read(group, self._columns[1:]).column(0)
        return max((label for label in labels.to_pylist() if label is not None), default=0)

    def _check_statistics(self) -> None:
        """Labels that are no class are found now, where the files have statistics."""
        for block, (shard, group) in enumerate(self._blocks):
            told = shard.groups[group].labels
            if told is not None and (told[0] or told[1] < 0 or told[2] >= len(self.class_names)):
                self._labels(block, shard.read(group, self._columns[1:]))  # names the row
                where = f"{shard.name}, row group {group}"
                raise self._bad_label(where, None if told[0] else told[1 + (told[1] >= 0)])

    def _bad_label(self, where: str, label: int | None) -> DataError:
        column, last = self._columns[1], len(self.class_names) - 1
        wrong = "is null" if label is None else f"{label} is not in 0 to {last}"
        return DataError(f"{where}: {column} {wrong}.")


@dataclass(frozen=True)
class _Group:
    """A row group in memory: Arrow arrays, out of which a row is copied when it is read."""

    labels: list[int]
    nbytes: int
    images: Any = None
    paths: Any = None


def _open_all(paths: Sequence[str], image_column: str, label_column: str) -> list[Shard]:
    """All files, or one error that tells of each that cannot be used."""
    ask = partial(open_shard, image_column=image_column, label_column=label_column)
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="footers") as pool:
        opened = list(pool.map(lambda path: attempt(lambda: ask(path)), paths))
    errors = [result for result in opened if isinstance(result, Exception)]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, DataError):
            raise error
    if errors:
        told = _some([str(error).rstrip(".") for error in errors], _ERRORS_SHOWN, "; ")
        raise DataError(f"{len(errors)} of {len(paths)} files cannot be used: {told}.")
    return [result for result in opened if isinstance(result, Shard)]


def _image_at(shard: Shard, path: str) -> Image:
    """The image in a file: of this machine, or below the folder of the Parquet file."""
    parts = PurePosixPath(path).parts
    if not shard.is_local and (path.startswith("/") or "://" in path or ".." in parts):
        return BadRecord(f"{path} is not below the folder of its Parquet file")
    place = os.path.join(os.path.dirname(shard.path), path)

    def ask() -> bytes:
        with shard.fs.open_input_stream(place, compression=None) as stream:
            return bytes(stream.read())

    outcome = patiently(ask, shard.is_local)
    if isinstance(outcome, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return BadRecord(f"{path}: no such file")
    if isinstance(outcome, Exception):  # not the record's fault: it may well be there next time
        raise DataError(f"{path}: cannot be read: {reason_of(shard.uri, outcome)}.")
    return outcome


def _some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
