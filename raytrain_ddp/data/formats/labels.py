"""Class names and targets, and the mapping from column values to numbers. Does not import torch."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import filterfalse
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_ddp.errors import DataError, first_names, in_one_line, quoted

_WHOLE = re.compile("0|-?[1-9][0-9]*")  # in its shortest form
_DIGITS = re.compile("[0-9]+")
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_EXACT = 2**53  # floats below have all their digits
_CLASSES_SHOWN = 5
STRINGS = (pa.string(), pa.large_string(), pa.string_view())

Target = npt.NDArray[np.float32]  # (targets,)


class UnknownClassError(DataError):
    """A split has a class that the run does not have."""


class NoLabelsError(DataError):
    """A split without any labels, such as the test splits of competitions."""


def normalized(name: str) -> str:
    """The name in Unicode's composed form (NFC), because file systems and archives change the
    form."""
    return unicodedata.normalize("NFC", name)


def distinct_names(names: Iterable[str], where: str) -> list[str]:
    """The normalized names.

    Raises:
        DataError: two of them are the same name.
    """
    kept: dict[str, str] = {}
    for name in names:
        known = normalized(name)
        if known in kept:
            how = "twice" if kept[known] == name else "in two Unicode forms (NFC and NFD)"
            raise DataError(f"{where}: the class {quoted(known)} exists {how}: merge them.")
        kept[known] = name
    return list(kept)


def is_label(kind: Any) -> bool:
    """Whether values of an Arrow type can be labels; a column without any value (null), too."""
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    return of in STRINGS or of in (pa.bool_(), pa.null()) or _is_number(of)


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def hugging_face_names(schema: Any, columns: Sequence[str], where: str) -> list[str] | None:
    """Returns the names of the Hugging Face ClassLabel feature, if the first column is one or has
    lists of one.

    Raises:
        DataError: two of the names are equal.
    """
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = names_in(features["info"]["features"][columns[0]])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return distinct_names(names, where) if names else None


def names_in(feature: Any) -> list[str] | None:
    """Returns the names in a feature of Hugging Face (JSON), if it is or has a ClassLabel."""
    if isinstance(feature, list):  # an older notation of a list
        feature = feature[0] if feature else None
    if not isinstance(feature, Mapping):
        return None
    names = feature.get("names")
    if names is None:
        return names_in(feature.get("feature"))
    return [*map(str, names)] if isinstance(names, list) and None not in names else None


def name_of(label: Any) -> str | None:
    """Returns the class name of a label in any file: text is its own name, 7 and 7.0 are "7", and
    true is "True".

    None: it is not a label (null, NaN, or blank text), or not a class (0.5, or a number too large
    for a float to represent exactly).
    """
    if isinstance(label, str):
        return normalized(label) if label and not label.isspace() else None
    if isinstance(label, float):
        return str(int(label)) if label.is_integer() and abs(label) < _EXACT else None
    return None if label is None else str(label)


def is_labeled(label: Any, known: Collection[str] = ()) -> bool:
    """Whether a row with this value has a label, even one that is no class, such as 0.5.

    Args:
        known: names of classes, which may be negative numbers.
    """
    name = name_of(label)
    if name is None:  # not NaN
        return isinstance(label, float) and label == label  # noqa: PLR0124
    return name in known or not is_negative(name)


def is_negative(name: str) -> bool:
    """Whether a name is a negative whole number, which marks a row without a label unless it is
    given as a class."""
    return name.startswith("-") and _WHOLE.fullmatch(name) is not None


def is_range(names: Sequence[str]) -> bool:
    """Whether the names are 0, 1, ..."""
    return [*names] == [str(number) for number in range(len(names))]


def were_numbers(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether the classes 0, 1, ... have names now, such as from a README.md."""
    has_names = not all(map(_NUMBER.fullmatch, now))
    return has_names and is_range(before) and len(before) == len(now)


def names_of(labels: Iterable[Any]) -> list[str]:
    """Returns the classes of a data set's labels: ordered by value, without negative ones, if all
    are whole numbers in their shortest form; otherwise sorted as text."""
    names = {name for label in {*labels} if (name := name_of(label)) is not None}
    if not all(map(_WHOLE.fullmatch, names)):
        return sorted(names)
    return sorted(filterfalse(is_negative, names), key=lambda name: (len(name), name))


class Labels:
    """Maps the labels of a data set to class numbers, by the same rules for all formats.

    A text or boolean is the class with that name. An integer is an index into `named`, the data's
    own list of names, if there is one. Otherwise, it is the class with that name; or, if no class
    is a number, an index into `names`, even if it is written as text.

    Args:
        names: the names of all classes, in order.
    """

    def __init__(self, names: Sequence[str], named: Sequence[str] | None = None) -> None:
        self.names, self._are_indices = names, named is not None
        self._places = {name: number for number, name in enumerate(names)}
        indexed = () if any(map(_DIGITS.fullmatch, names)) else names
        indexed = indexed if named is None else named
        self._indexed = {str(index): self._places[name] for index, name in enumerate(indexed)}
        self._known: dict[Any, int | str] = {}  # the keys have types, because True == 1

    def number(self, label: Any) -> int | str:
        """The class number of a label; or what is wrong with the value, such as ``is null``."""
        key = (label.__class__, label)
        if key not in self._known:
            name = name_of(label) or ""
            number = self._indexed.get(name)
            if isinstance(label, str | bool) or not self._are_indices:
                number = self._places.get(name, number)
            self._known[key] = self._what_is_wrong(label) if number is None else number
        return self._known[key]

    def _what_is_wrong(self, label: Any) -> str:
        name = name_of(label)
        if name is None and not is_labeled(label):
            return "is an empty string" if isinstance(label, str) else "is null"
        if name is None:
            limits = "a whole number below 2^53 (for regression, see data.target_columns)"
            return f"{label:g} is not {limits}"
        shown = quoted(label) if isinstance(label, str) else name
        wrong = f"{shown} is not one of the {some_names(self.names)}"
        if is_negative(name):
            wrong += (
                ": negative numbers mark rows without a label, unless all classes are named, such "
                "as with --data.classes -1 1"
            )
        return wrong


def how_mapped(names: Sequence[str]) -> str:
    """Describes numeric labels that differ from their class numbers, such as 0.5; else ""."""
    if not all(map(_WHOLE.fullmatch, names)):
        are_numbers = bool(names) and all(map(_NUMBER.fullmatch, names))
        hint = "numbers, each of them a class: to predict numbers, set data.target_columns"
        return hint * are_numbers
    if is_range(names):
        return ""
    first, last = in_one_line(names[0]), in_one_line(names[-1])
    return f"{first} to {last}, mapped to classes 0 to {len(names) - 1}"


def some_names(names: Sequence[str]) -> str:
    """``10 classes: 0, 1, 2, 3, 4, ...``"""
    more = ", ..." * (len(names) > _CLASSES_SHOWN)
    shown = first_names(names[:_CLASSES_SHOWN])
    return f"{len(names)} class{'es' * (len(names) != 1)}: {shown}{more}"


def numbers_in(classes: Sequence[str], own: Sequence[str], where: str) -> list[int]:
    """The indices in `classes` of a split's own class names.

    Raises:
        UnknownClassError: a class is not among them.
    """
    numbers: Mapping[str, int] = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in own if name not in numbers]
    if unknown:
        shown = first_names([*map(repr, unknown)], _CLASSES_SHOWN)
        raise UnknownClassError(
            f"{where}: {shown} is not a class of the run, which has {some_names(classes)}. This "
            f"split has {some_names(own)}."
        )
    return [numbers[name] for name in own]


def check_targets(name: str, types: Mapping[str, Any], binary: bool) -> None:
    """Checks the types of the columns of targets: numbers; or, if `binary`, booleans and integers,
    or one column of lists of labels.

    Args:
        name: the name of the file, for messages.
        types: the Arrow type of each column.
        binary: whether the targets are labels, which a row has or does not have.

    Raises:
        DataError: a column has another type, or there is one label only.
    """
    expected = "numbers are expected with --loss.name mse, l1 or huber. For labels: --loss.name bce"
    if binary:
        expected = (
            "several columns of booleans, 0 and 1, or one column of lists of labels are expected "
            "with --loss.name bce. For numbers: --loss.name mse; for one label of each row: "
            "--data.label-column"
        )
    for column, kind in types.items():
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        fits = _is_number(kind) or (binary and kind == pa.bool_())
        if binary and len(types) == 1:
            fits = is_list and is_label(kind.value_type)
        if not fits:
            raise DataError(f"{name}: column {quoted(column)} is {kind}; {expected}.")


class Targets:
    """Maps the values of a row's target columns to numbers.

    Args:
        columns: their names.
        names: the names of the targets: the columns, or the labels in a column of lists.
        binary: see `check_targets`.
        named: the names of the integers in a column of lists; None: they are names themselves.
    """

    def __init__(
        self,
        columns: Sequence[str],
        names: Sequence[str],
        binary: bool,
        named: Sequence[str] | None = None,
    ) -> None:
        self.names, self._columns, self._binary = names, columns, binary
        self._labels = Labels(names, named) if binary and len(columns) == 1 else None

    def number(self, values: Any) -> Target | str:
        """float32 (targets,); or what is wrong, such as ``age is null``.

        Args:
            values: that of the column, or a tuple of those of several.
        """
        if self._labels is not None:
            if values is None:
                return f"{self._columns[0]} is null; a row without labels has an empty list"
            row = np.zeros(len(self.names), np.float32)
            for place in map(self._labels.number, values):
                if isinstance(place, str):
                    return f"{self._columns[0]}: a label {place}"
                row[place] = 1
            return row
        values = values if isinstance(values, tuple) else (values,)
        for column, value in zip(self._columns, values, strict=True):
            if value is None or value != value:  # noqa: PLR0124  # NaN
                return f"{column} is {'null' if value is None else 'not a number'}"
            if self._binary and value not in (0, 1):
                return f"{column} is {quoted(value)}; 0 and 1 are expected with --loss.name bce"
        with np.errstate(over="ignore"):
            row = np.array(values, np.float64).astype(np.float32)
        many = " or ".join(self._columns)
        return row if np.isfinite(row).all() else f"{many} is too large for float32"
