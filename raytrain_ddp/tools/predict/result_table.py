"""Outputs as Arrow tables, with a row for each row of the input, and those as CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from raytrain_ddp.errors import TaskError
from raytrain_ddp.records import json_of
from raytrain_ddp.tools.inference.batch_outputs import EMBEDDING, Outputs
from raytrain_ddp.tools.inference.inputs import TARGET

ERROR = "error"
_NAMES = b"names"  # of the numbers in a column of lists
_GROUP_ROWS, _GROUP_BYTES = 65536, 64 * 2**20  # of a row group


@dataclass(frozen=True)
class Columns:
    """Which columns are made.

    Args:
        class_names: in the order of the outputs.
        top: classes for each row, the most probable first; 0: the outputs are no classes.
        probabilities: adds those of all classes.
    """

    class_names: Sequence[str]
    top: int
    probabilities: bool

    def table(self, chunk: Outputs, places: Mapping[str, list[Any]], bad: Mapping[int, str]) -> Any:
        """The rows of a chunk: `places`, what the model says of them, and the errors of bad ones.

        Raises:
            TaskError: a value of the task cannot be a column.
        """
        made: dict[str, tuple[Any, Sequence[str] | None]] = {}
        values = dict(chunk.values)
        logits = values.pop("logit", None)
        if self.top and "probability" in values:
            made |= self._classes(values["probability"], logits)
        if "probability" in values:
            of_each = values.pop("probability")
            if self.probabilities or not self.top:
                made["probabilities"] = of_each, self.class_names
        if "value" in values and self.class_names:
            made["values"] = values.pop("value"), self.class_names
        last = {EMBEDDING: values.pop(EMBEDDING)} if EMBEDDING in values else {}
        made |= {name: (value, None) for name, value in {**values, **last}.items()}
        where = {row: place for place, row in enumerate(chunk.kept)}
        chosen = pa.array([where.get(row) for row in chunk.rows], pa.int32())
        arrays, fields = [], []
        for name, column in places.items():
            arrays.append(pa.array([*map(_storable, column)]))
            fields.append(_field(name, arrays[-1], self.class_names if name == TARGET else None))
        for name, (value, names) in made.items():
            arrays.append(_array(name, value).take(chosen))
            fields.append(_field(name, arrays[-1], names))
        arrays.append(pa.array([bad.get(row) for row in chunk.rows], pa.string()))
        fields.append(pa.field(ERROR, pa.string()))
        return pa.table(arrays, schema=pa.schema(fields))

    def _classes(self, probability: Tensor, logits: Tensor | None) -> dict[str, tuple[Any, None]]:
        """As the metrics top1 and top5 count them."""
        scores = probability if logits is None else logits
        ranked = scores.argmax(1, keepdim=True) if self.top == 1 else scores.topk(self.top).indices
        found: dict[str, tuple[Any, None]] = {}
        for place in range(self.top):
            end = f"_{place + 1}" * (place > 0)
            column = ranked[:, place]
            found[f"class{end}"] = [self.class_names[c] for c in column.tolist()], None
            found[f"probability{end}"] = probability.gather(1, column[:, None])[:, 0], None
        return found


def _storable(value: Any) -> Any:
    """A path whose bytes are no UTF-8 with `?` instead of these."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _field(name: str, array: Any, names: Sequence[str] | None) -> Any:
    metadata = {_NAMES: json.dumps([*names])} if names else None
    return pa.field(name, array.type, metadata=metadata)


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


def joined(tables: Sequence[Any]) -> Any:
    """One table; a table whose rows are all bad may lack columns."""
    return aligned(whole([table.schema for table in tables]), *tables)


def whole(schemas: Sequence[Any]) -> Any:
    """The schema with all columns, in the order of the widest, and of types that hold all values.

    Raises:
        TaskError: a column has values of types that have none in common.
    """
    widest_first = sorted(schemas, key=len, reverse=True)
    try:
        return pa.unify_schemas(widest_first, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the outputs cannot be stored as columns: {error}.") from None


def aligned(schema: Any, *tables: Any) -> Any:
    """The tables as one with the columns of the schema; those that one lacks are null there."""
    first = schema.empty_table()
    return pa.concat_tables([first, *tables], promote_options="permissive").combine_chunks()


# ------------------------------------------------------------------ files


def writer_of(name: str) -> Callable[[Path, Any, Iterator[Any], Mapping[str, str]], None] | None:
    """The function that writes (path, schema, tables, about) as a file of this name; None if its
    format is unknown."""
    writers = {".parquet": _parquet, ".csv": _csv, ".jsonl": _json_lines, ".ndjson": _json_lines}
    return writers.get(Path(name).suffix.lower())


def _parquet(path: Path, schema: Any, tables: Iterator[Any], about: Mapping[str, str]) -> None:
    schema = schema.with_metadata({**(schema.metadata or {}), **about})
    waiting: list[Any] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def write() -> None:
            group = pa.concat_tables(waiting)
            writer.write_table(group.cast(schema), row_group_size=len(group))
            waiting.clear()

        for table in tables:
            waiting.append(table)
            rows, size = sum(map(len, waiting)), sum(each.nbytes for each in waiting)
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                write()
        if waiting:
            write()


def _csv(path: Path, schema: Any, tables: Iterator[Any], about: Mapping[str, str]) -> None:
    from pyarrow import csv

    widths: dict[str, list[str]] = {}
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    waiting: list[Any] = []  # until each column of lists has a row, as the header names its numbers
    is_begun = False
    with path.open("wb") as file:
        for table in chain(tables, [None]):
            if table is not None:
                waiting.append(table)
                _add_widths(table, widths)
            if table is None or all(name in widths for name in lists):
                for each in waiting:
                    options = csv.WriteOptions(include_header=not is_begun)
                    csv.write_csv(_flattened(each, widths), file, options)
                    is_begun = True
                waiting.clear()


def require_flat(schema: Any) -> None:
    """Raises TaskError if a column has more than texts, numbers and lists of these, as CSV has."""
    for field in schema:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        if pa.types.is_nested(kind):
            raise TaskError(
                f"the values of {field.name!r} are {field.type}, so they cannot be CSV columns. "
                "Use an --out file that ends in .parquet or .jsonl."
            )


def _add_widths(table: Any, widths: dict[str, list[str]]) -> None:
    """Adds the names of the numbers in each column of lists that has none yet."""
    for field in table.schema:
        if pa.types.is_list(field.type) and field.name not in widths:
            metadata = (field.metadata or {}).get(_NAMES)
            longest = pc.max(pc.list_value_length(table[field.name])).as_py()
            if metadata or longest is not None:
                names = json.loads(metadata) if metadata else map(str, range(longest))
                widths[field.name] = [*names]


def _flattened(table: Any, widths: Mapping[str, list[str]]) -> Any:
    """Each number of a list in a column of its own: ``probability:cat``, ``embedding:0``.

    Args:
        widths: the names of the numbers in each column; none: it is null everywhere.

    Raises:
        TaskError: the lists of a column are not of one length.
    """
    columns: dict[str, Any] = {}
    for field in table.schema:
        column = table[field.name].combine_chunks()
        if not pa.types.is_list(field.type):
            columns[field.name] = column
            continue
        width = widths.get(field.name, [])
        one = {"probabilities": "probability", "values": "value"}.get(field.name, field.name)
        if not {*pc.list_value_length(column).to_pylist()} <= {len(width), None}:
            raise TaskError(
                f"the lists in {field.name!r} differ in length, so they cannot be CSV columns. "
                "Use an --out file that ends in .parquet or .jsonl."
            )
        for place, name in enumerate(width):
            columns[f"{one}:{name}"] = pc.list_element(column, place)
    return pa.table(columns)


def _json_lines(path: Path, schema: Any, tables: Iterator[Any], about: Mapping[str, str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            columns = {name: _python(table[name].combine_chunks()) for name in table.schema.names}
            for row in zip(*columns.values(), strict=True):
                line = dict(zip(columns, row, strict=True))
                file.write(json_of(line, ascii_only=False) + "\n")


def _python(column: Any) -> list[Any]:
    """Python values; of float32, the shortest decimal that is read as the same float32."""
    if pa.types.is_list(column.type):
        flat = iter(_python(column.flatten()))
        return [None if row is None else [next(flat) for _ in row] for row in column.to_pylist()]
    if pa.types.is_float32(column.type):
        texts = column.cast(pa.string()).to_pylist()
        return [None if text is None else float(text) for text in texts]
    values: list[Any] = column.to_pylist()
    return values
