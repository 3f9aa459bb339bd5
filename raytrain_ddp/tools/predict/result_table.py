"""Outputs as Arrow tables, with a row for each row of the input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from raytrain_ddp.errors import TaskError
from raytrain_ddp.tools.inference.batch_outputs import EMBEDDING, Outputs
from raytrain_ddp.tools.inference.inputs import TARGET

ERROR = "error"
_ONE_OF = {"probabilities": "probability", "values": "value"}

Named = tuple[str, Any, Sequence[str]]  # a column: its name, values, and names of the numbers in it


def is_flat(name: str) -> bool:
    """Whether a file of this name has no lists: each of their numbers is a column, as
    ``probability:cat``."""
    return name.lower().endswith(".csv")


@dataclass(frozen=True)
class Columns:
    """Which columns are made.

    Args:
        class_names: in the order of the outputs.
        top: classes for each row, the most probable first; 0: the outputs are no classes.
        probabilities: adds those of all classes.
        flat: see `is_flat`.
    """

    class_names: Sequence[str]
    top: int
    probabilities: bool
    flat: bool

    def table(self, chunk: Outputs, places: Mapping[str, list[Any]], bad: Mapping[int, str]) -> Any:
        """The rows of a chunk: `places`, what the model says of them, and the errors of bad ones.

        Raises:
            TaskError: a value of the task cannot be a column.
        """
        where = {row: place for place, row in enumerate(chunk.kept)}
        chosen = pa.array([where.get(row) for row in chunk.rows], pa.int32())
        columns: list[Named] = [
            (name, pa.array([*map(_storable, column)]), self.class_names if name == TARGET else ())
            for name, column in places.items()
        ]
        for name, value, names in self._said(dict(chunk.values)):
            columns.append((name, _array(name, value).take(chosen), names))
        columns.append((ERROR, pa.array([bad.get(row) for row in chunk.rows], pa.string()), ()))
        if self.flat:
            columns = [part for column in columns for part in _flattened(*column)]
        fields = [
            pa.field(name, array.type, metadata={"names": json.dumps(names)} if names else None)
            for name, array, names in columns
        ]
        return pa.table([array for _, array, _ in columns], schema=pa.schema(fields))

    def _said(self, values: dict[str, Any]) -> Iterator[Named]:
        """What the model says. Classes are ordered as the metrics top1 and top5 count them."""
        probability, embedding = values.pop("probability", None), values.pop(EMBEDDING, None)
        scores = values.pop("logit", probability)
        if probability is not None and self.top:
            one = self.top == 1
            ranked = scores.argmax(1, keepdim=True) if one else scores.topk(self.top).indices
            for place, column in enumerate(ranked.T):
                end = f"_{place + 1}" * (place > 0)
                yield f"class{end}", [self.class_names[c] for c in column.tolist()], ()
                yield f"probability{end}", probability.gather(1, column[:, None])[:, 0], ()
        if probability is not None and (self.probabilities or not self.top):
            yield "probabilities", probability, self.class_names
        if "value" in values and self.class_names:
            yield "values", values.pop("value"), self.class_names
        yield from ((name, value, ()) for name, value in values.items())
        if embedding is not None:
            yield EMBEDDING, embedding, ()


def _storable(value: Any) -> Any:
    """A path whose bytes are no UTF-8 with `?` instead of these."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _array(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = value.numpy()
        if numbers.ndim == 1:
            return pa.array(numbers)
        rows = numbers.reshape(len(numbers), -1)
        ends = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
        return pa.ListArray.from_arrays(ends, pa.array(np.ascontiguousarray(rows).reshape(-1)))
    try:
        return pa.array(value)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the value of {name!r} cannot be a column: {error}.") from None


def _flattened(name: str, array: Any, names: Sequence[str]) -> Iterator[Named]:
    """The numbers of a list as columns; those that a shorter list lacks are null.

    Raises:
        TaskError: there are lists in lists, or structures.
    """
    lists = pa.types.is_list(array.type)
    if pa.types.is_nested(array.type.value_type if lists else array.type):
        raise TaskError(
            f"the values of {name!r} are {array.type}, so they cannot be CSV columns. Use an --out "
            "file that ends in .parquet or .jsonl."
        )
    if not lists:
        yield name, array, ()
        return
    width = pc.max(pc.list_value_length(array)).as_py() or 0
    if width:
        array = pc.list_slice(array, 0, width, return_fixed_size_list=True)
    for place, number in enumerate(names or range(width)):
        yield f"{_ONE_OF.get(name, name)}:{number}", pc.list_element(array, place), ()


def joined(tables: Sequence[Any]) -> Any:
    """One table with the columns of all, in the order of the widest, and of types that hold all
    values; what a table lacks is null, such as all that a model says where all rows are bad.

    Raises:
        TaskError: a column has values of types that have none in common.
    """
    widest = max(tables, key=lambda table: len(table.schema))
    try:
        made = pa.concat_tables([widest[:0], *tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the outputs cannot be stored as columns: {error}.") from None
    return made.combine_chunks()
