"""Images in files of many rows, of any of the `FORMATS`. Row groups are the blocks.

They are in memory, read in advance, exactly once, within a limit: the order of an epoch visits each
row once, so a block is finished when all its rows have been read, and is dropped at once. (If all
blocks fit, they stay.)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import PurePosixPath
from threading import Lock
from typing import Any

import numpy as np

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.formats.file_formats import open_shards
from raytrain_ddp.data.formats.labels import (
    Labels,
    NoLabelsError,
    Targets,
    distinct_names,
    how_mapped,
    is_labeled,
    names_of,
    numbers_in,
    were_numbers,
)
from raytrain_ddp.data.formats.shard import Shard, label_columns, rows_in, sizes_of
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order import RowMask, Rows
from raytrain_ddp.errors import DataError, first_names, in_one_line, quoted
from raytrain_ddp.uri import uri_beside

_MIB = 2**20
_BLOCKS_FROM_BYTES = 512 * _MIB  # of images: with more, shuffling all rows is too slow
_READERS = 2  # of local files: mostly copying, concurrent with decoding threads
_LABEL_READERS = 16
_TRIED = 16  # images of a list
_README = "README.md"
_REMOTE_READERS = 8  # of object stores: mostly waiting for the network

Image = bytes | BadRecord


class ShardImages(ImageSource):
    """Rows of (encoded image, label) from files of any of the `FORMATS`.

    A row group is read once and kept until all its rows have been read; `ahead` prefetches it.
    An image that is null or whose file is missing is a `BadRecord`.

    Args:
        paths: paths or URIs of files; rows are numbered consecutively in this order.
        config: `image_column` is struct<bytes, path>, binary, or paths; `label_column` integers,
            strings or booleans; "": no labels are read, and each is 0. With `target_columns`,
            labels are float32 (targets,).
        classes: class names. Default: those of the ClassLabel feature, or else the distinct labels,
            sorted, which requires reading the label columns.
        binary: the targets are labels, which a row has or does not have.
        named: the names of integer labels; files with their own names must have the same ones.

    Raises:
        NoLabelsError: no row has a label.
        DataError: files are missing or damaged, columns are missing or have the wrong type, or
            labels are null or not classes; names the files.
    """

    def __init__(
        self,
        paths: Sequence[str],
        config: DataConfig,
        classes: Sequence[str] | None = None,
        binary: bool = False,
        named: Sequence[str] | None = None,
    ) -> None:
        self._config, self._binary = config, binary
        self._columns = label_columns(config)
        self._shards = open_shards(paths, config, binary)
        self.uses_root = any(shard.has_files for shard in self._shards)
        self.left_out = [name for shard in self._shards for name in shard.left_out]
        self._blocks = [  # (shard, row group)
            (shard, group)
            for shard in self._shards
            for group, group_info in enumerate(shard.groups)
            if group_info.rows
        ]
        groups = [shard.groups[group] for shard, group in self._blocks]
        if not groups:
            names, left = first_names([shard.name for shard in self._shards], 5), self.left_out
            unused = f" Not used: {first_names(left)}." if left else ""
            raise DataError(f"{names}: 0 rows.{unused}")
        self.blocks: Rows = np.array([group.rows for group in groups], np.int64)
        self.block_bytes: Rows = np.array([group.size_bytes for group in groups], np.int64)
        self._starts = np.cumsum(self.blocks) - self.blocks
        self.prefers_blocks = sum(group.image_bytes for group in groups) > _BLOCKS_FROM_BYTES
        self.class_names: list[str] = []
        if self._columns:
            self._labels_of = self._mapping(classes, named)
            self.class_names = [*self._labels_of.names]
        self._remote = any(not shard.is_local for shard in self._shards)
        self._groups = self._new_groups()
        self._require_images()

    def part(self, used: Callable[[int, int], RowMask]) -> ShardImages:
        twin = copy.copy(self)
        ends = self._starts + self.blocks
        twin._groups = twin._new_groups(lambda b: used(int(self._starts[b]), int(ends[b])))
        return twin

    def read(self, rows: Rows) -> list[tuple[Image, Any]]:
        blocks = self._blocks_of(rows)
        places = rows - self._starts[blocks]
        wanted = list(dict.fromkeys(blocks.tolist()))
        if self._remote:  # all concurrently, the first one by this thread
            self._groups.ahead(wanted[1:])
        records: list[Any] = [None] * len(rows)
        apart: list[tuple[int, Shard, str]] = []  # (index, shard, path of the image)
        for block in wanted:
            chosen = np.flatnonzero(blocks == block)
            group = self._groups.get(block, places[chosen])
            for index, place in zip(chosen.tolist(), places[chosen].tolist(), strict=True):
                image = group.image(place)
                if isinstance(image, str):
                    apart.append((index, self._blocks[block][0], image))
                records[index] = image, group.labels[place]
        for (index, _, _), image in zip(apart, self._images_at(apart), strict=True):
            records[index] = image, records[index][1]
        return records

    def labels(self) -> Rows:
        """Reads only the label columns; see `ImageSource.labels`."""
        if not self._columns:
            return np.zeros(self.blocks.sum(), np.int64)
        kind, start, numbers = np.float32 if self._config.target_columns else np.int64, 0, []
        for of_shard in filter(None, self._values()):
            numbers.append(np.array(self._numbers(of_shard, start), kind))
            start += len(of_shard)
        return np.concatenate(numbers)

    def ahead(self, rows: Rows) -> None:
        """Starts reading their row groups, which must not have been read."""
        self._groups.ahead(self._blocks_of(rows).tolist())

    def close(self) -> None:
        """Ends the read-ahead threads; the source remains usable."""
        self._groups.close()

    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and footers (of a list: its content, and the sizes of
        its images), independent of where the files are.

        Raises:
            DataError: an image of a list does not exist, and bad records are an error.
        """
        digest = sha256()
        for shard in self._shards:
            name = PurePosixPath(shard.at.path).name
            digest.update(f"{name} {shard.size_bytes} {shard.digest}\n".encode())
        for row, size in enumerate(sizes_of([path for path, _ in self.files or ()])):
            if size < 0 and not self._config.may_skip:
                raise DataError(
                    f"{self.where(row)}: {in_one_line(self.paths()[row])}: no such file. Restore "
                    "it, remove the row, or set --data.bad-records skip."
                )
            digest.update(f"{size}\n".encode())
        return digest.hexdigest()

    @property
    def image_root(self) -> str:
        """The folder that the paths of images start from."""
        return str(self._shards[0].at.image_root)

    @cached_property
    def files(self) -> list[tuple[str, int]] | None:
        paths = () if self._remote else self.paths()
        return list(zip(paths, self.labels().tolist(), strict=True)) if paths else None

    def paths(self) -> list[str]:
        if not all(shard.has_files for shard in self._shards):
            return []
        found = []
        for shard in self._shards:
            paths = (
                os.path.join(shard.at.image_root, p or "") for p in shard.values(*shard.images)
            )
            found += [uri_beside(shard.name, p) if "://" in shard.name else p for p in paths]
        return found

    def place(self, row: int) -> tuple[str, int]:
        """The name of the file, and the row in it, from 0."""
        shard, _ = self._blocks[self._blocks_of(row)]
        first = next(n for n, (other, _) in enumerate(self._blocks) if other is shard)
        return shard.name, row - int(self._starts[first])

    def where(self, row: int) -> str:
        block = self._blocks_of(row)
        shard, group = self._blocks[block]
        return str(shard.where_in(group, row - int(self._starts[block])))

    def _blocks_of(self, rows: Any) -> Any:
        """The block of a row, or of each of several."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _load(self, block: int) -> ImageGroup:
        shard, group = self._blocks[block]
        images = shard.groups[group].images
        table = shard.read([group], (*images, *self._columns))
        labels: list[Any] = [0] * table.num_rows
        if self._columns:
            values = rows_in(table, self._columns)
            labels = self._numbers(values, int(self._starts[block]))
        kinds = {"paths" if name == shard.path_column else "images": name for name in images}
        columns = {kind: table.column(name) for kind, name in kinds.items()}
        return ImageGroup(labels=labels, nbytes=table.nbytes, **columns)

    def _numbers(self, values: Sequence[Any], start: int) -> list[Any]:
        """The class numbers or targets of rows start, start + 1, ..."""
        numbers: list[Any] = list(map(self._labels_of.number, values))
        place = next((n for n, number in enumerate(numbers) if isinstance(number, str)), None)
        if place is not None:
            column = "" if self._config.target_columns else f"{self._config.label_column} "
            raise DataError(f"{self.where(start + place)}: {column}{numbers[place]}.")
        return numbers

    def _images_at(self, apart: Sequence[tuple[int, Shard, str]]) -> Iterable[Image]:
        """Reads images stored in separate files; from an object store, in parallel."""
        if not self._remote or len(apart) < 2:
            return [shard.image_at(path) for _, shard, path in apart]
        with ThreadPoolExecutor(_REMOTE_READERS, thread_name_prefix="images") as pool:
            return list(pool.map(lambda each: each[1].image_at(each[2]), apart))

    def _new_groups(self, used: Callable[[int], RowMask] | None = None) -> RowGroupCache:
        threads = _REMOTE_READERS if self._remote else _READERS
        used = used or (lambda block: np.ones(self.blocks[block], bool))
        limit_bytes = self._config.memory_mib * _MIB
        return RowGroupCache(self._load, self.block_bytes, limit_bytes, threads, used)

    def _require_images(self) -> None:
        """Finds a wrong folder of images early: the first of a list must not all be missing."""
        for block, (shard, group) in enumerate(self._blocks):
            if group or not shard.is_local or not shard.has_files:
                continue
            first = shard.read([0], shard.images).column(0)[:_TRIED].to_pylist()
            tried = [shard.place_of(path) for path in first if path]
            if not tried or any(isinstance(at, str) and os.path.exists(at) for at in tried):
                continue
            where = self.where(int(self._starts[block]))
            if isinstance(tried[0], BadRecord):
                raise DataError(f"{where}: {tried[0]}.")
            remedy = "Set --data.root to" if self._columns else "Put the list into"
            raise DataError(
                f"{where}: {in_one_line(tried[0])}: no such file, and the next ones are missing, "
                f"too. {remedy} the folder that the paths are relative to."
            )

    # -------------------------------------------------------------- the labels

    def _mapping(
        self, classes: Sequence[str] | None, named: Sequence[str] | None
    ) -> Labels | Targets:
        """The names of the classes or targets, and the mapping of the files' values.

        The names are the columns of targets; or else the given classes, those of the ClassLabel
        feature, or one per distinct label.

        Raises:
            NoLabelsError: no row has a label.
            DataError: files disagree about their classes, or have classes that are not in the given
                list, or classes are given for columns.
        """
        targets, binary = self._config.target_columns, self._binary
        files = first_names([shard.name for shard in self._shards], 2)
        if targets and not (binary and len(targets) == 1):  # which has lists of labels
            if classes is not None and tuple(classes) != targets:
                raise DataError(
                    f"data.classes = {quoted(tuple(classes))}: the names of targets are those of "
                    "their columns: remove it."
                )
            return Targets(targets, targets, binary)
        stated = [(shard.name, shard.class_names) for shard in self._shards if shard.class_names]
        is_named = named is not None or len(stated) == len(self._shards)
        if named is not None:
            stated.insert(0, (_README, distinct_names(named, _README)))
        place, own = stated[0] if stated else ("", None)
        for name, names in stated:
            if own and names != own:
                raise DataError(
                    f"{name}: its class names ({first_names(names, 5)}) differ from those in "
                    f"{place} ({first_names(own, 5)})."
                )
        if classes is not None:
            own = None if were_numbers(classes, own or ()) else own
            numbers_in(classes, own or (), files)
        known = own if classes is None else list(classes)
        if targets:
            rows = () if known else self._values()
            occur = (label for values in rows for row in values for label in row or ())
            return Targets(targets, known or names_of(occur), binary, own)
        if known is None:
            known = self._labels_that_occur(files)
        else:
            groups = (shard.read([group], self._columns) for shard, group in self._blocks)
            values = ({*group.column(0).to_pylist()} for group in groups)  # until there is a label
            if not any(is_labeled(value, known) for group in values for value in group):
                raise _without_labels(files)
        if classes is None and not is_named:
            self.mapped = how_mapped(known)
        return Labels(known, own)

    def _labels_that_occur(self, files: str) -> list[str]:
        """Reads all labels.

        Raises:
            DataError: one is no label, or there are numbers next to text; names the row.
        """
        found = [{*values} for values in self._values()]
        if not any(is_labeled(value) for values in found for value in values):
            raise _without_labels(files)
        every = {value for values in found for value in values}
        kinds = {_KINDS[type(value)] for values in found for value in values if value is not None}
        if len(kinds) > 1:
            several, column = " and ".join(sorted(kinds)), quoted(self._config.label_column)
            raise DataError(f"{files}: column {column} has labels of several types: {several}.")
        self._labels_of = Labels(names_of(every))
        if any(isinstance(self._labels_of.number(value), str) for value in every):
            self.labels()  # names the row
        return [*self._labels_of.names]

    def _values(self) -> Iterator[list[Any]]:
        """The labels or targets in each file, see `rows_in`; reads several files in parallel."""
        with ThreadPoolExecutor(_LABEL_READERS, thread_name_prefix="labels") as pool:
            yield from pool.map(lambda shard: shard.values(*self._columns), self._shards)


_KINDS = {bool: "booleans", int: "numbers", float: "numbers", str: "text"}


def _without_labels(files: str) -> NoLabelsError:
    return NoLabelsError(f"{files}: no row has a label: all are null, empty or negative.")


# ------------------------------------------------------------------ in memory


@dataclass(frozen=True)
class ImageGroup:
    """A row group in memory: Arrow columns from which rows are copied when they are read."""

    labels: list[Any]
    nbytes: int
    images: Any = None
    paths: Any = None

    def image(self, place: int) -> Image | str:
        """The image, or the path of its file."""
        if self.images is not None:
            image = self.images[place].as_py()
            if image is not None:
                return bytes(image)
        path = None if self.paths is None else self.paths[place].as_py()
        return str(path) if path else BadRecord("the image is null")


@dataclass(eq=False)
class _Kept:
    size_bytes: int  # expected, then measured
    unread: RowMask  # (rows,): the rows still to be read in this pass over the data
    content: Future[ImageGroup] = field(default_factory=Future)


class RowGroupCache:
    """Blocks that are loaded on demand by the thread that needs them, or in advance by others.

    Thread-safe: threads wait for each other only for the same block.

    Args:
        load: block -> its content. Called by several threads concurrently, for different blocks.
        sizes: approximate bytes of each in memory, shape (blocks,).
        limit_bytes: maximum bytes of blocks kept and read in advance; may be exceeded by a block
            that is needed now and by blocks whose rows are being copied, if nothing can be dropped.
        threads: maximum number of blocks read in advance concurrently.
        used: block -> whether each of its rows is ever read, shape (rows in the block,).
    """

    def __init__(
        self,
        load: Callable[[int], ImageGroup],
        sizes: Rows,
        limit_bytes: int,
        threads: int,
        used: Callable[[int], RowMask],
    ) -> None:
        self._load, self._sizes, self._used = load, sizes, used
        self._limit, self._threads = limit_bytes, threads
        self._all_fit = int(sizes.sum()) <= limit_bytes
        self._lock = Lock()
        self._kept: dict[int, _Kept] = {}  # least recently used first
        self._wanted: dict[int, None] = {}  # to be read in advance, in this order
        self._reading = 0  # blocks that the pool is reading
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="row-groups")

    def get(self, block: int, places: Rows) -> ImageGroup:
        """A block of which the caller reads the rows at `places`, shape (n,)."""
        with self._lock:
            self._wanted.pop(block, None)
            if is_new := block not in self._kept:
                self._make_room(block)
                self._begin(block)
            kept = self._kept[block] = self._kept.pop(block)  # now the last one
            kept.unread[places] = False
            if done := not kept.unread.any():
                kept.unread = self._used(block)  # in the next pass over the data
        if is_new:
            self._fill(block, kept)
        content = kept.content.result()
        with self._lock:
            if done and not self._all_fit:
                self._drop(block, kept)
            self._read_ahead()
        return content

    def ahead(self, blocks: Iterable[int]) -> None:
        """Announces which blocks will be needed next, in this order. Returns at once.

        Not for rows that may have been read already: their blocks would be read again.
        """
        with self._lock:
            self._wanted |= dict.fromkeys(block for block in blocks if block not in self._kept)
            self._read_ahead()

    def close(self) -> None:
        """Ends the threads after their current reads. Cached blocks and `get` remain usable."""
        with self._lock:
            self._wanted.clear()
            pool = self._pool
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="row-groups")
        pool.shutdown()

    # The following methods require the lock, except `_fill` and `_fill_ahead`.

    def _begin(self, block: int) -> _Kept:
        kept = self._kept[block] = _Kept(int(self._sizes[block]), self._used(block))
        return kept

    def _fits(self, block: int) -> bool:
        kept_bytes = sum(each.size_bytes for each in self._kept.values())
        return kept_bytes + int(self._sizes[block]) <= self._limit

    def _make_room(self, block: int) -> None:
        """Drops blocks early to make room for one that is needed now."""
        for other, kept in [*self._kept.items()]:
            if self._fits(block):
                return
            if kept.content.done():
                self._drop(other, kept)

    def _drop(self, block: int, kept: _Kept) -> None:
        if self._kept.get(block) is kept:
            del self._kept[block]

    def _read_ahead(self) -> None:
        """Begins as many as may be read at a time, until the next one does not fit."""
        while self._reading < self._threads and self._wanted:
            if not self._fits(block := next(iter(self._wanted))):
                return  # until other blocks are finished
            del self._wanted[block]
            self._reading += 1
            self._pool.submit(self._fill_ahead, block, self._begin(block))

    def _fill_ahead(self, block: int, kept: _Kept) -> None:
        self._fill(block, kept)
        with self._lock:
            self._reading -= 1
            self._read_ahead()

    def _fill(self, block: int, kept: _Kept) -> None:
        """Loads a block. On an error, the waiting threads get it; later calls try again."""
        try:
            content = self._load(block)
        except BaseException as error:
            with self._lock:
                self._drop(block, kept)
            kept.content.set_exception(error)
            return
        with self._lock:
            kept.size_bytes = content.nbytes
        kept.content.set_result(content)
