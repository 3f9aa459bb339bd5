"""Images in files of many rows, of any of the `FORMATS`. Row groups are the blocks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.formats.image_folder import NO_FILE, sizes_of
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
from raytrain_ddp.data.formats.row_group_cache import Image, ImageGroup, RowGroupCache
from raytrain_ddp.data.formats.shard import (
    Columns,
    Opened,
    Shard,
    rows_in,
    unless_failed,
    with_retries,
)
from raytrain_ddp.data.formats.table_shard import open_arrow, open_list, open_parquet
from raytrain_ddp.data.formats.tar_shard import open_tar
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order.sample_rng import RowMask, Rows
from raytrain_ddp.errors import DataError, first_names, quoted
from raytrain_ddp.uri import attempt, uri_beside, without_secrets

_MIB = 2**20
_BLOCKS_FROM_BYTES = 512 * _MIB  # of images: with more, shuffling all rows is too slow
_READERS = 2  # of local files: mostly copying, concurrent with decoding threads
_TRIED = 16  # images of a list
_LABEL_READERS = 16
_README = "README.md"
_REMOTE_READERS = 8  # of object stores: mostly waiting for the network


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
        self._columns = columns_of(config, binary)
        self._shards = open_shards(paths, self._columns)
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
        if self._columns.labels:
            self._labels_of = self._mapping(classes, named)
            self.class_names = [*self._labels_of.names]
        self._require_images()
        self._remote = any(not shard.is_local for shard in self._shards)
        self._memory_bytes = config.memory_mib * _MIB
        self._groups = self._new_groups()
        self._may_skip = config.may_skip

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
        if not self._columns.labels:
            return np.zeros(self.blocks.sum(), np.int64)
        kind, start, numbers = np.float32 if self._columns.targets else np.int64, 0, []
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
            if size < 0 and not self._may_skip:
                raise DataError(
                    f"{self.where(row)}: {self.paths()[row]}: no such file. Restore it, remove the "
                    "row, or set --data.bad-records skip."
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
        shard = self._blocks[self._blocks_of(np.array([row]))[0]][0]
        first = next(n for n, (other, _) in enumerate(self._blocks) if other is shard)
        return shard.name, row - int(self._starts[first])

    def where(self, row: int) -> str:
        block = int(self._blocks_of(np.array([row]))[0])
        shard, group = self._blocks[block]
        return shard.where_in(group, row - int(self._starts[block]))

    def _blocks_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _load(self, block: int) -> ImageGroup:
        shard, group = self._blocks[block]
        images = shard.groups[group].images
        table = shard.read([group], (*images, *self._columns.labels))
        labels: list[Any] = [0] * table.num_rows
        if self._columns.labels:
            values = rows_in(table, self._columns.labels)
            labels = self._numbers(values, int(self._starts[block]))
        kept = {"paths" if name == shard.path_column else "images": name for name in images}
        columns = {kind: table.column(name) for kind, name in kept.items()}
        whole = {k: c.chunk(0) if c.num_chunks == 1 else c for k, c in columns.items()}
        return ImageGroup(labels=labels, nbytes=table.nbytes, **whole)

    def _numbers(self, values: Sequence[Any], start: int) -> list[Any]:
        """The class numbers or targets of rows start, start + 1, ..."""
        numbers: list[Any] = list(map(self._labels_of.number, values))
        place = next((n for n, number in enumerate(numbers) if isinstance(number, str)), None)
        if place is not None:
            column = "" if self._columns.targets else f"{self._columns.label} "
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
        return RowGroupCache(self._load, self.block_bytes, self._memory_bytes, threads, used)

    def _require_images(self) -> None:
        """Finds a wrong folder of images early: the first of a list must not all be missing."""
        for block, (shard, group) in enumerate(self._blocks):
            if group or not shard.is_local or not shard.has_files:
                continue
            first = shard.read([0], shard.images).column(0)[:_TRIED].to_pylist()
            paths = [path for path in first if path]
            missing = [*takewhile(_is_bad, map(shard.image_at, paths))]
            if paths and len(missing) == len(paths):
                remedy = "set --data.root to" if self._columns.labels else "put the list into"
                raise DataError(
                    f"{self.where(int(self._starts[block]))}: {missing[0]}, and the next ones in "
                    f"{shard.at.image_root}: {remedy} the folder that the paths are relative to."
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
        columns, files = self._columns, first_names([shard.name for shard in self._shards], 2)
        if columns.targets and not columns.has_lists:
            if classes is not None and tuple(classes) != columns.targets:
                raise DataError(
                    f"data.classes = {quoted(tuple(classes))}: the names of targets are those of "
                    "their columns: remove it."
                )
            return Targets(columns.targets, columns.targets, columns.binary)
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
        if columns.targets:
            rows = () if known else self._values()
            occur = (label for values in rows for row in values for label in row or ())
            return Targets(columns.targets, known or names_of(occur), columns.binary, own)
        if known is None:
            known = self._labels_that_occur(files)
        else:
            groups = (shard.read([group], columns.labels) for shard, group in self._blocks)
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
            several, column = " and ".join(sorted(kinds)), quoted(self._columns.label)
            raise DataError(f"{files}: column {column} has labels of several types: {several}.")
        self._labels_of = Labels(names_of(every))
        if any(isinstance(self._labels_of.number(value), str) for value in every):
            self.labels()  # names the row
        return [*self._labels_of.names]

    def _values(self) -> Iterator[list[Any]]:
        """The labels or targets in each file, see `rows_in`; reads several files in parallel."""
        with ThreadPoolExecutor(_LABEL_READERS, thread_name_prefix="labels") as pool:
            yield from pool.map(lambda shard: shard.values(*self._columns.labels), self._shards)


_KINDS = {bool: "booleans", int: "numbers", float: "numbers", str: "text"}


def _is_bad(image: Any) -> bool:
    return isinstance(image, BadRecord)


def _without_labels(files: str) -> NoLabelsError:
    return NoLabelsError(f"{files}: no row has a label: all are null, empty or negative.")


def columns_of(config: DataConfig, binary: bool = False) -> Columns:
    targets = config.target_columns
    return Columns(config.image_column, config.label_column, config.root, targets, binary)


# ------------------------------------------------------------------ files

_OPENERS = 16
_ERRORS_SHOWN = 20


class Format(NamedTuple):
    """A format of files: the ends of their names, in lower case, and how to open one.

    `open` reads and checks the description of a file's rows. It raises DataError if the file cannot
    be used, or another error if it is missing or damaged.
    """

    title: str
    ends: tuple[str, ...]
    open: Callable[[Opened, Columns], Shard]


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


def open_shard(uri: str, columns: Columns) -> Shard:
    """Reads and checks the description of the rows of a file at a URI or path.

    Raises:
        DataError: it is missing or damaged, or a column is missing or of the wrong type.
    """
    name = without_secrets(uri)
    form = format_of(name) or FORMATS[0]
    if not os.path.isfile(uri) and not os.path.isdir(uri) and os.path.exists(uri):
        raise DataError(f"{name}: {NO_FILE}: remove it.")
    outcome = with_retries(lambda: form.open(Opened.at(uri, name), columns), "://" not in uri)
    return unless_failed(outcome, uri, f"{name}: not a readable {form.title} file")


def open_shards(paths: Sequence[str], columns: Columns) -> list[Shard]:
    """Opens all files, or raises one error that lists each unusable file."""
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="footers") as pool:
        opened = list(pool.map(lambda path: attempt(lambda: open_shard(path, columns)), paths))
    errors = [result for result in opened if isinstance(result, Exception)]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, DataError):
            raise error
    if errors:
        texts = [str(error).rstrip(".") for error in errors]
        listed = first_names(texts, _ERRORS_SHOWN, "; and ", "; ")
        raise DataError(f"{len(errors)} of {len(paths)} files cannot be used: {listed}.")
    return [result for result in opened if isinstance(result, Shard)]
