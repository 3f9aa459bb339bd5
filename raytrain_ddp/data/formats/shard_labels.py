"""Reads the label columns of files: the names of the classes or targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raytrain_ddp.data.formats.labels import (
    Labels,
    NoLabelsError,
    Targets,
    distinct_names,
    is_labeled,
    names_of,
    numbers_in,
    were_numbers,
)
from raytrain_ddp.data.formats.shard import Columns, Shard
from raytrain_ddp.errors import DataError, first_names, quoted

_READERS = 16


def labels_of(
    shards: Sequence[Shard], columns: Columns, classes: Sequence[str] | None
) -> Labels | Targets:
    """The names of the classes or targets, and the mapping of the files' values.

    The names are the columns of targets; or else the given classes, those of the ClassLabel
    feature, or one per distinct label.

    Raises:
        NoLabelsError: no row has a label.
        DataError: files disagree about their classes, or have classes that are not in the given
            list, or classes are given for columns.
    """
    files = first_names([shard.name for shard in shards], 2)
    if columns.targets and not columns.has_lists:
        if classes is not None and tuple(classes) != columns.targets:
            raise DataError(
                f"data.classes = {quoted(tuple(classes))}: the names of targets are those of their "
                "columns: remove it."
            )
        return Targets(columns.targets, columns.targets, columns.binary)
    named = [shard for shard in shards if shard.class_names]
    own = named[0].class_names if named else None  # also of files without names
    for shard in named:
        with_names(shard, own or (), named[0].name)
    if classes is not None:
        own = None if were_numbers(classes, own or ()) else own
        numbers_in(classes, own or (), files)
    known = own if classes is None else list(classes)
    if columns.targets:
        rows = () if known else all_values(shards, columns.targets)
        occur = (label for values in rows for row in values for label in row or ())
        return Targets(columns.targets, known or names_of(occur), columns.binary, own)
    if known:
        values = _by_group(shards, columns.label)
        if not any(is_labeled(value, known) for group in values for value in {*group}):
            raise _without_labels(files)
        return Labels(known, own)
    return Labels(_labels_that_occur(shards, columns.label, files))


def with_names(shard: Shard, names: Sequence[str], where: str = "README.md") -> Shard:
    """Returns the file with these class names, which come from `where`.

    Raises:
        DataError: it has different ones.
    """
    own, names = shard.class_names, distinct_names(names, where)
    if own and own != names:
        raise DataError(
            f"{shard.name}: its class names ({first_names(own, 5)}) differ from those in {where} "
            f"({first_names(names, 5)})."
        )
    return replace(shard, class_names=names)


def all_values(shards: Sequence[Shard], columns: Sequence[str]) -> Iterator[list[Any]]:
    """The values of small columns of each file, see `rows_in`; reads several files in parallel."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="labels") as pool:
        yield from pool.map(lambda shard: shard.values(*columns), shards)


def _by_group(shards: Sequence[Shard], column: str) -> Iterator[list[Any]]:
    """The values of each row group in turn, for a reader who soon has enough."""
    for shard in shards:
        for group, info in enumerate(shard.groups):
            if info.rows:
                yield shard.read([group], [column]).column(0).to_pylist()


def _without_labels(files: str) -> NoLabelsError:
    return NoLabelsError(f"{files}: no row has a label: all are null, empty or negative.")


def _labels_that_occur(shards: Sequence[Shard], column: str, files: str) -> list[str]:
    """Reads all labels.

    Raises:
        DataError: one is no label, or there are numbers next to text; names the row.
    """
    found = [{*values} for values in all_values(shards, [column])]
    if not any(is_labeled(value) for values in found for value in values):
        raise _without_labels(files)
    kinds = {_KINDS[type(value)] for values in found for value in values if value is not None}
    if len(kinds) > 1:
        several = " and ".join(sorted(kinds))
        raise DataError(f"{files}: column {quoted(column)} has labels of several types: {several}.")
    names = names_of(value for values in found for value in values)
    labels = Labels(names)
    for shard, distinct in zip(shards, found, strict=True):
        if any(labels.number(value) is None for value in distinct):
            for row, value in enumerate(shard.values(column)):
                if labels.number(value) is None:
                    what = labels.what_is_wrong(value)
                    raise DataError(f"{shard.where(row)}: {column} {what}.")
    return names


_KINDS = {bool: "booleans", int: "numbers", float: "numbers", str: "text"}
