"""Reads the label columns of files: the classes, and the labels of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from raytrain_ddp.data.formats.labels import (
    Kind,
    Labels,
    NoLabelsError,
    Targets,
    distinct_names,
    is_negative,
    name_of,
    names_of,
    numbers_in,
    were_numbers,
)
from raytrain_ddp.data.formats.shard import Columns, Shard, join_some
from raytrain_ddp.data.order.epoch_order import Feistel
from raytrain_ddp.errors import DataError, quoted

_READERS = 16
_TRIED = 32  # row groups searched for all classes before reading all of them


def labels_of(
    shards: Sequence[Shard], columns: Columns, classes: Sequence[str] | None
) -> tuple[list[str], dict[str, Labels | Targets]]:
    """The names of the classes or targets, and the mapping of each file's values by its URI.

    The names are the columns of targets; or else the given classes, those of the ClassLabel
    feature, or one per distinct label.

    Raises:
        NoLabelsError: no row has a label.
        DataError: files disagree about their classes or the kind of their targets, or have classes
            that are not in the given list, or classes are given for columns.
    """
    kind, files = shards[0].kind, join_some([shard.name for shard in shards], 2)
    made: dict[Kind, Labels | Targets]
    if columns.targets and len({shard.kind for shard in shards}) > 1:
        column = quoted(columns.targets[0])
        raise DataError(f"{files}: {column} is a column of lists in some files only.")
    if columns.targets and kind != "list":
        if classes is not None and tuple(classes) != columns.targets:
            raise DataError(
                f"data.classes = {quoted(tuple(classes))}: the names of targets are those of their "
                "columns: remove it."
            )
        names = list(columns.targets)
        made = {kind: Targets(columns.targets, names, kind, columns.binary)}
    else:
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
            names = known or names_of(occur)
            made = {kind: Targets(columns.targets, names, kind, columns.binary, own)}
        else:
            if known and all(_is_unlabeled(shard, columns.label, {*known}) for shard in shards):
                raise _without_labels(files)
            dense = known or _dense_labels(shards, columns.label)
            names = dense or _labels_that_occur(shards, columns.label, files)
            made = {each.kind: Labels(names, own) for each in shards}
    return names, {shard.at.uri: made[shard.kind] for shard in shards}


def with_names(shard: Shard, names: Sequence[str], where: str = "README.md") -> Shard:
    """Returns the file with these class names, which come from `where`.

    Raises:
        DataError: it has different ones.
    """
    own, names = shard.class_names, distinct_names(names, where)
    if own and own != names:
        raise DataError(
            f"{shard.name}: its class names ({join_some(own)}) differ from those in {where} "
            f"({join_some(names)})."
        )
    return replace(shard, class_names=names)


def _without_labels(files: str) -> NoLabelsError:
    return NoLabelsError(f"{files}: no row has a label: all are null, empty or negative.")


def all_values(shards: Sequence[Shard], columns: Sequence[str]) -> Iterator[list[Any]]:
    """The values of small columns of each file, see `rows_in`; reads several files in parallel."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="labels") as pool:
        yield from pool.map(lambda shard: shard.values(*columns), shards)


def _is_unlabeled(shard: Shard, column: str, known: set[str]) -> bool:
    """Whether no row of a file has a label; reads up to the first that has one, if the file's
    statistics do not tell.

    Args:
        known: the names of classes.
    """
    for group, info in enumerate(shard.groups):
        if info.labels is not None and not any(map(is_negative, known)):
            nulls, _, most = info.labels
            if nulls < info.rows and most >= 0:
                return False
        elif info.rows:
            values = shard.read(group, [column]).column(0).to_pylist()
            if any(_is_labeled(value, known) for value in {*values}):
                return False
    return True


def _is_labeled(value: Any, known: Collection[str] = ()) -> bool:
    """Whether a row with this value has a label, even one that is no class, such as 0.5."""
    name = name_of(value)
    if name is None:  # not NaN
        return isinstance(value, float) and value == value  # noqa: PLR0124
    return name in known or not is_negative(name)


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


def _labels_that_occur(shards: Sequence[Shard], column: str, files: str) -> list[str]:
    kinds = {"number" if shard.kind == "integer" else shard.kind for shard in shards}
    if len(kinds) > 1:
        listed = join_some(sorted(f"{shard.kind} in {shard.name}" for shard in shards), 4)
        raise DataError(f"column {quoted(column)} has labels of several types: {listed}.")
    rows = [*all_values(shards, [column])]
    found = [{*values} for values in rows]
    if not any(_is_labeled(value) for values in found for value in values):
        raise _without_labels(files)
    names = names_of(value for values in found for value in values)
    labels = Labels(names)
    for shard, values, distinct in zip(shards, rows, found, strict=True):
        wrong = [values.index(value) for value in distinct if labels.number(value) is None]
        if wrong:
            what = labels.what_is_wrong(values[min(wrong)])
            raise DataError(f"{shard.where(min(wrong))}: {column} {what}.")
    return names
