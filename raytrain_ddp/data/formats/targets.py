"""Columns of targets, instead of one of classes: several labels of a row, or numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_ddp.data.formats.labels import (
    Kind,
    Labels,
    kind_of,
)
from raytrain_ddp.errors import DataError, quoted

Target = npt.NDArray[np.float32]  # (targets,)


def kind_of_targets(name: str, types: Mapping[str, Any], binary: bool) -> Kind:
    """The kind of the columns of targets: "list", or "number" for one target a column.

    Args:
        name: of the file, for messages.
        types: the Arrow type of each column.
        binary: they are labels, which a row has or does not have.

    Raises:
        DataError: a column has another type, or there is one label only.
    """
    for column, kind in types.items():
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        of_labels = is_list and kind_of(kind.value_type) in ("string", "integer")
        if binary and of_labels and len(types) == 1:
            return "list"
        wanted = ("integer", "number", "boolean")[: 3 if binary else 2]
        if kind_of(kind) not in wanted:
            expected = (
                "booleans, 0 and 1, or one column of lists of labels are expected with "
                "--loss.name bce. For numbers: --loss.name mse"
                if binary
                else "numbers are expected with --loss.name mse, l1 or huber. For labels: "
                "--loss.name bce"
            )
            raise DataError(f"{name}: column {quoted(column)} is {kind}; {expected}.")
    if binary and len(types) == 1:
        raise DataError(
            f"{name}: column {quoted(next(iter(types)))} is one label only: name several columns, "
            "or set --data.label-column instead of --data.target-columns."
        )
    return "number"


class Targets:
    """Maps the values of a row's target columns to numbers.

    Args:
        columns: their names.
        names: of the targets: the columns, or the labels in a column of lists.
        binary: see `kind_of_targets`.
        named: the names of the integers in a column of lists; None: they are names themselves.
    """

    def __init__(
        self,
        columns: Sequence[str],
        names: Sequence[str],
        kind: Kind,
        binary: bool,
        named: Sequence[str] | None = None,
    ) -> None:
        self._columns, self._names, self._binary = columns, names, binary
        self._labels = Labels(names, named) if kind == "list" else None

    def number(self, values: Any) -> Target | None:
        """float32 (targets,); None: a value is missing or not a target.

        Args:
            values: that of the column, or a tuple of those of several.
        """
        if self._labels is not None:
            places = [self._labels.number(label) for label in values or ()]
            if values is None or None in places:
                return None
            row = np.zeros(len(self._names), np.float32)
            row[[place for place in places if place is not None]] = 1
            return row
        values = values if isinstance(values, tuple) else (values,)
        if None in values or (self._binary and any(value not in (0, 1) for value in values)):
            return None
        with np.errstate(over="ignore"):
            row = np.array(values, np.float64).astype(np.float32)
        return row if np.isfinite(row).all() else None

    def what_is_wrong(self, values: Any) -> str:
        """Describes a row without targets, such as ``age is null``."""
        if self._labels is not None:
            (column,) = self._columns
            if values is None:
                return f"{column} is null; a row without labels has an empty list"
            wrong = next(label for label in values if self._labels.number(label) is None)
            return f"{column}: a label {self._labels.what_is_wrong(wrong)}"
        each = values if isinstance(values, tuple) else (values,)
        for column, value in zip(self._columns, each, strict=True):
            if value is None or value != value:  # noqa: PLR0124  # NaN
                return f"{column} is {'null' if value is None else 'not a number'}"
            if self._binary and value not in (0, 1):
                return f"{column} is {quoted(value)}; 0 and 1 are expected with --loss.name bce"
        return f"{' or '.join(self._columns)} is too large for float32"
