"""Class names, and the mapping from label column values to class numbers. Does not import torch."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from raytrain_ddp.errors import DataError

# text: a label of a file without types, in which all labels together decide what they are.
Kind = Literal["integer", "number", "boolean", "string", "text", "list", "none"]

_INTEGER = re.compile(r"0|[1-9][0-9]*")
_WHOLE, _DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})"), re.compile(r"-?[0-9]+\.[0-9]*")
_BOOLEANS = ({"true", "false"}, {"True", "False"}, {"TRUE", "FALSE"})
_EXACT = 2**53  # floats below have all their digits
_CLASSES_SHOWN = 5


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
            raise DataError(f"{where}: the class {known!r} exists {how}: merge them.")
        kept[known] = name
    return list(kept)


def kind_of(label: Any) -> Kind | None:
    """The kind of an Arrow type's values; None if they cannot be labels. A column without any value
    (null) counts as strings."""
    label = label.value_type if pa.types.is_dictionary(label) else label
    fits: dict[Kind, bool] = {
        "integer": pa.types.is_integer(label),
        "number": pa.types.is_floating(label),
        "boolean": pa.types.is_boolean(label),
        "string": is_string(label) or pa.types.is_null(label),
    }
    return next((kind for kind in fits if fits[kind]), None)


def is_string(kind: Any) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def hugging_face_names(schema: Any, column: str) -> list[str] | None:
    """The names of the Hugging Face ClassLabel feature, if the column is or has lists of one."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = features["info"]["features"][column]
        if isinstance(feature, list):  # an older notation of a list
            (feature,) = feature
        names = feature.get("feature", feature)["names"]
        if isinstance(names, dict):  # {"0": "cat", ...}
            names = [names[str(number)] for number in range(len(names))]
        return [str(name) for name in names]
    except (KeyError, TypeError, ValueError):
        return None


def is_label(value: Any) -> bool:
    """Whether a value is present: not null, NaN or an empty string."""
    return value is not None and value != "" and value == value  # noqa: PLR0124


def is_fraction(value: Any) -> bool:
    """Whether a value is a non-integer number."""
    return isinstance(value, float) and is_label(value) and not value.is_integer()


def is_class_value(value: Any, kind: Kind) -> bool:
    """Whether a value can represent a class: -1 means no label, and 0.5 is not a class number."""
    if kind in ("integer", "number"):
        is_whole = is_label(value) and value >= 0 and not is_fraction(value)
        return is_whole and not is_rounded(value)
    return is_label(value)


def is_rounded(value: Any) -> bool:
    """Whether a float may have lost digits of a whole number, and so equals different ones."""
    return isinstance(value, float) and abs(value) >= _EXACT


def typed_texts(texts: Collection[str]) -> tuple[Kind, dict[str, Any]]:
    """What the distinct label texts of a data set are: whole numbers in their shortest form,
    numbers with a decimal point, booleans in one spelling, or else strings; and their values."""
    present = [text for text in texts if text]
    if present and all(map(_WHOLE.fullmatch, present)):
        return "integer", {text: int(text) if text else None for text in texts}
    if present and all(_WHOLE.fullmatch(text) or _DECIMAL.fullmatch(text) for text in present):
        return "number", {text: float(text) if text else None for text in texts}
    if present and any(spelled.issuperset(present) for spelled in _BOOLEANS):
        return "boolean", {text: text.lower() == "true" if text else None for text in texts}
    return "string", {text: text for text in texts}


def names_of(values: Iterable[Any], kind: Kind) -> list[str]:
    """The classes of the given labels: numbers in ascending order, names sorted."""
    if kind == "string":
        return sorted({normalized(value) for value in values})
    if kind == "boolean":
        return sorted({str(value) for value in values})
    return [str(number) for number in sorted({int(value) for value in values})]


class Labels:
    """Maps the values of one file's label column to class numbers.

    Strings, booleans and numbers refer to the class with that name. Integers are indices into
    `named`, the file's own list of names, if it has one; or into `classes`, if none of those is a
    number.

    Args:
        classes: all names, in their order.
    """

    def __init__(
        self, classes: Sequence[str], kind: Kind, named: Sequence[str] | None = None
    ) -> None:
        self._classes, self._kind = classes, kind
        numbers = {name: number for number, name in enumerate(classes)}
        self._last: int | None = None  # values are indices, up to this one
        self._numbers: dict[Any, int]
        if kind == "boolean":
            self._numbers = {
                value: numbers[s] for value in (False, True) if (s := str(value)) in numbers
            }
        elif kind in ("string", "text"):
            self._numbers = numbers
        elif named is None and any(name.isdecimal() for name in classes):
            decimal = [name for name in numbers if name.isdecimal()]
            alike = Counter(map(int, decimal))
            self._numbers = {  # 1 is the class 1, not 01; it is 01 if that is the only one
                int(name): numbers[name]
                for name in decimal
                if alike[int(name)] == 1 or name == str(int(name))
            }
            if [*self._numbers] == [*range(len(classes))]:
                self._last = len(classes) - 1
        else:
            places = named if named is not None else classes
            self._numbers = {place: numbers[name] for place, name in enumerate(places)}
            self._last = len(places) - 1

    def number(self, value: Any) -> int | None:
        """None: not a label, or not a known class."""
        number = self._numbers.get(value)
        if number is None and self._kind in ("string", "text") and is_label(value):
            number = self._numbers.get(normalized(value))
        if number is None and self._kind == "text" and value:
            kind, typed = typed_texts([value])
            if kind != "string":
                number = Labels(self._classes, kind).number(typed[value])
                if number is not None:  # many rows have it
                    self._numbers[value] = number
        return number

    def what_is_wrong(self, value: Any) -> str:
        """Describes a value without a class number, such as ``is null``."""
        if not is_label(value):
            return "is an empty string" if value == "" else "is null"
        if self._kind == "text":
            kind, typed = typed_texts([value])
            if kind != "string":
                return Labels(self._classes, kind).what_is_wrong(typed[value])
        if is_fraction(value):
            return f"{value:g} is not a whole number (for regression, see data.target_columns)"
        if is_rounded(value):
            return f"{value:.0f} is too large to be exact: write the labels as text"
        if self._last is not None:
            why = ": negative numbers mark rows without a label" if value < 0 else ""
            return f"{value} is not in the range 0 to {self._last}{why}"
        return f"{value!r} is not one of the {some_names(self._classes)}"


def how_mapped(names: Sequence[str]) -> str:
    """Describes the mapping of numeric labels that differ from their class numbers; else ""."""
    are_numbers = all(map(_INTEGER.fullmatch, names))
    if not are_numbers or names == [str(number) for number in range(len(names))]:
        return ""
    return f"{names[0]} to {names[-1]}, mapped to classes 0 to {len(names) - 1}"


def some_names(names: Sequence[str]) -> str:
    """``10 classes: 0, 1, 2, 3, 4, ...``"""
    shown = ", ".join(names[:_CLASSES_SHOWN]) + ", ..." * (len(names) > _CLASSES_SHOWN)
    return f"{len(names)} class{'es' * (len(names) != 1)}: {shown}"


def numbers_in(classes: Sequence[str], own: Sequence[str], where: str) -> list[int]:
    """The indices in `classes` of a split's own class names.

    Raises:
        UnknownClassError: a class is not among them.
    """
    numbers: Mapping[str, int] = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in own if name not in numbers]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_CLASSES_SHOWN]))
        raise UnknownClassError(
            f"{where}: {shown}{', ...' * (len(unknown) > _CLASSES_SHOWN)} is not a class of the "
            f"run, which has {some_names(classes)}. This split has {some_names(own)}."
        )
    return [numbers[name] for name in own]
