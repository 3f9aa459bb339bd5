"""Reads the label columns of files: the classes, and the labels of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from raytrain_ddp.data.formats.labels import (
    Labels,
    NoLabelsError,
    is_class_value,
    is_fraction,
    is_rounded,
    names_of,
    numbers_in,
    typed_texts,
)
from raytrain_ddp.data.formats.shard import Columns, Shard, join_some
from raytrain_ddp.data.formats.targets import Targets, names_in_lists
from raytrain_ddp.data.order.permutation import Feistel
from raytrain_ddp.errors import DataError

_READERS = 16
_TRIED = 32  # row groups searched for all classes before reading all of them


def labels_of(
    shards: Sequence[Shard], columns: Columns, classes: Sequence[str] | None
) -> tuple[list[str], dict[str, Labels | Targets]]:
    """The names of the classes or targets, and the mapping of each file's values by its URI.

    Raises:
        DataError: as `class_names_of` and `_target_names`.
    """
    if columns.targets:
        names = _target_names(shards, columns, classes)
        kind, binary = shards[0].kind, columns.binary
        return names, {
            shard.at.uri: Targets(columns.targets, names, kind, binary, shard.class_names)
            for shard in shards
        }
    names = class_names_of(shards, columns.label, classes)
    # Numbers in a file without names are those of the other files.
    own = next((shard.class_names for shard in shards if shard.class_names), None)
    return names, {shard.at.uri: Labels(names, shard.kind, own) for shard in shards}


def _target_names(
    shards: Sequence[Shard], columns: Columns, classes: Sequence[str] | None
) -> list[str]:
    """The columns of targets; or the given classes, or else the labels that occur in a column of
    lists.

    Raises:
        DataError: files disagree about the kind of the columns, or classes are given for columns.
    """
    if len({shard.kind for shard in shards}) > 1:
        files = join_some([shard.name for shard in shards], 2)
        raise DataError(f"{files}: {columns.targets[0]!r} is a column of lists in some files only.")
    own = [shard.class_names for shard in shards]
    if shards[0].kind == "list" and any(own):
        if not all(own):
            files = join_some([shard.name for shard in shards], 2)
            raise DataError(f"{files}: the labels have names in some files only.")
        if classes is None:
            return list(dict.fromkeys(name for names in own for name in names or ()))
        for shard in shards:
            numbers_in(classes, shard.class_names or [], shard.name)
        return list(classes)
    if shards[0].kind == "list":
        rows = [row for values in all_values(shards, columns.targets) for row in values]
        return names_in_lists(rows) if classes is None else list(classes)
    if classes is not None and tuple(classes) != columns.targets:
        raise DataError(
            f"data.classes = {tuple(classes)!r}: the names of targets are those of their columns: "
            "remove it."
        )
    return list(columns.targets)


def class_names_of(
    shards: Sequence[Shard], column: str, classes: Sequence[str] | None
) -> list[str]:
    """The given classes, or those of the ClassLabel feature, or else one per distinct label.

    Raises:
        NoLabelsError: no row has a label.
        DataError: files disagree about their classes, or have classes that are not in the given
            list.
    """
    files = join_some([shard.name for shard in shards], 2)
    if all(_has_none(shard) for shard in shards) or (classes and _are_unlabeled(shards, column)):
        raise NoLabelsError(f"{files}: no row has a label: all labels are null or negative.")
    named = [shard for shard in shards if shard.class_names]
    for shard in named:
        own, first = shard.class_names or [], named[0].class_names or []
        if own != first:
            raise DataError(
                f"{shard.name}: its class names ({join_some(own)}) differ from those in "
                f"{named[0].name} ({join_some(first)})."
            )
    own = list(named[0].class_names or []) if named else []
    if classes is not None:
        numbers_in(classes, own, files)
        return list(classes)
    return own or _dense_labels(shards, column) or _labels_that_occur(shards, column)


def all_values(shards: Sequence[Shard], columns: Sequence[str]) -> Iterator[list[Any]]:
    """The values of small columns of each file, see `rows_in`; reads several files in parallel."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="labels") as pool:
        yield from pool.map(lambda shard: shard.values(*columns), shards)


def _has_none(shard: Shard) -> bool:
    """Whether all labels are null or negative according to the file's statistics."""
    row_groups = [(group.rows, group.labels) for group in shard.groups if group.rows]
    return all(labels is not None and (labels[0] == n or labels[2] < 0) for n, labels in row_groups)


def _are_unlabeled(shards: Sequence[Shard], column: str) -> bool:
    """Whether no row has a label; reads up to the first that has one, if the files' statistics do
    not tell."""
    for shard in shards:
        for group, info in enumerate(shard.groups):
            if info.labels is not None and info.labels[0] < info.rows and info.labels[2] >= 0:
                return False
            if info.labels is None and info.rows:
                values = shard.read(group, [column]).column(0).to_pylist()
                if any(is_class_value(value, shard.kind) or is_fraction(value) for value in values):
                    return False
    return True


def _dense_labels(shards: Sequence[Shard], column: str) -> list[str] | None:
    """The classes 0, 1, ... if a few row groups contain all of them, which avoids reading all
    labels of most data sets; else None."""
    blocks = [(shard, g) for shard in shards for g, info in enumerate(shard.groups) if info.rows]
    known = [labels for shard, g in blocks if (labels := shard.groups[g].labels) is not None]
    if len(known) < len(blocks) or any(nulls or low < 0 for nulls, low, _ in known):
        return None
    count = max(high for _, _, high in known) + 1
    found: set[int] = set()
    tried = Feistel(len(blocks))(np.arange(min(len(blocks), _TRIED)))
    for shard, group in (blocks[block] for block in tried.tolist()):
        found.update(shard.read(group, [column]).column(0).to_pylist())
        if len(found) == count:
            return [str(label) for label in range(count)]
    return None


def _labels_that_occur(shards: Sequence[Shard], column: str) -> list[str]:
    kinds = {"number" if shard.kind == "integer" else shard.kind for shard in shards}
    if len(kinds) > 1:
        listed = join_some(sorted(f"{shard.kind} in {shard.name}" for shard in shards), 4)
        raise DataError(f"column {column!r} has labels of several types: {listed}.")
    kind, rows = shards[0].kind, [*all_values(shards, [column])]
    if kind == "text":
        kind, typed = typed_texts({value for values in rows for value in values})
        rows = [[typed[value] for value in values] for values in rows]
    good: set[Any] = set()
    bad: tuple[Shard, int, Any] | None = None  # the first: its file, row, value
    for shard, values in zip(shards, rows, strict=True):
        for value in set(values):
            if is_class_value(value, kind):
                good.add(value)
            elif bad is None:
                bad = shard, values.index(value), value
    if not good and (bad is None or not (is_fraction(bad[2]) or is_rounded(bad[2]))):
        raise NoLabelsError(
            f"{join_some([shard.name for shard in shards], 2)}: no row has a label."
        )
    names = names_of(good, kind)
    if bad is not None:
        shard, row, value = bad
        wrong = Labels(names, kind).what_is_wrong(value)
        raise DataError(f"{shard.where(row)}: {column} {wrong}.")
    return names
