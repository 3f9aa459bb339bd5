"""Outputs as tables, with a row for each row of the input: the file of predictions, and its parts,
which are kept in a hidden folder until the file is complete.

.NAME.predicting/            see `Staging`
  part-00000000.parquet      the rows of a few chunks"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.files import replace_with
from raytrain_ddp.tools.inference.inputs import Column
from raytrain_ddp.tools.inference.loaded_model import Outputs
from raytrain_ddp.tools.staging import Staging

ERROR = "error"
_ONE_OF = {"probabilities": "probability", "values": "value"}


class ResultFile(Staging):
    """The file `out`. Nothing is written before `held()`.

    Raises:
        ConfigError: the format is unknown, there is no such folder, or the file exists already.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        super().__init__(out, "predicting", f"--out {out}")
        self._form = out.suffix.lower()
        if self._form not in _WRITERS:
            raise ConfigError(f"--out {out}: must end with .parquet or .csv.")
        self.require_place(overwrite, "is a folder" if out.is_dir() else "")

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def write_part(self, number: int, table: Any) -> None:
        """Raises ConfigError if a column cannot be in the file."""
        lists = [field.name for field in table.schema if pa.types.is_nested(field.type)]
        if lists and self._form == ".csv":
            raise ConfigError(f"--out {self.out}: the column {lists[0]!r} has lists: use .parquet.")
        with self.writing(), replace_with(self.part(number), self.folder) as temp:
            pq.write_table(table, temp, compression="zstd")

    def complete(self, parts: int, about: Mapping[str, str]) -> int:
        """Writes the file from all parts, in order, a part in memory at a time; returns how many
        rows cannot be read."""
        schemas = [pq.read_schema(self.part(number)) for number in range(parts)]
        whole = joined([schema.empty_table() for schema in schemas])
        schema, bad = whole.schema.with_metadata(about), 0
        with self.writing(), _WRITERS[self._form](self.result, schema) as writer:
            for number in range(parts):
                table = joined([whole, pq.read_table(self.part(number))])
                writer.write_table(table)
                bad += len(table) - table[ERROR].null_count
        self.finish()
        return bad


def _parquet(path: Path, schema: Any) -> Any:
    return pq.ParquetWriter(path, schema, compression="zstd")


_WRITERS = {".parquet": _parquet, ".csv": csv.CSVWriter}


def table_of(
    chunk: Outputs, places: Iterable[Column], said: Iterable[Column], bad: Mapping[int, str]
) -> Any:
    """The rows of a chunk: `places`, what the model says of them, and the errors of bad ones.

    Args:
        said: what the model says of the rows without an error.

    Raises:
        TaskError: a value of the task cannot be a column.
    """
    where = {row: place for place, row in enumerate(chunk.kept)}
    chosen = pa.array([where.get(row) for row in chunk.rows], pa.int32())
    errors = pa.array([bad.get(row) for row in chunk.rows], pa.string())
    columns = [(name, _array(name, each), names) for name, each, names in places]
    columns += [(name, _array(name, each).take(chosen), names) for name, each, names in said]
    columns.append((ERROR, errors, ()))
    fields = [
        pa.field(name, array.type, metadata={"names": json.dumps(names)} if names else None)
        for name, array, names in columns
    ]
    return pa.table([array for _, array, _ in columns], schema=pa.schema(fields))


def flat(columns: Iterable[Column]) -> Iterator[Column]:
    """The same columns, with one for each number that has a name, such as ``probability:cat``."""
    for name, value, names in columns:
        for place, one in enumerate(names):
            yield f"{_ONE_OF.get(name, name)}:{one}", torch.as_tensor(value)[:, place], ()
        if not names:
            yield name, value, ()


def _array(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = value.numpy()
        value = numbers if numbers.ndim == 1 else [*numbers.reshape(len(numbers), -1)]
    else:  # bytes of a path that are not valid UTF-8 are escaped
        odd = "backslashreplace"
        value = [e.encode("utf-8", odd).decode() if isinstance(e, str) else e for e in value]
    try:
        return pa.array(value)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the value of {name!r} cannot be a column: {error}.") from None


def joined(tables: Sequence[Any]) -> Any:
    """One table with the columns of all tables, in the order of the widest, with types that hold
    all values. Columns that a table lacks are null: for example, all outputs if all rows are bad.

    Raises:
        TaskError: a column has values of types that have no common type.
    """
    widest = max(tables, key=lambda table: len(table.schema))
    try:
        made = pa.concat_tables([widest[:0], *tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the outputs cannot be stored as columns: {error}.") from None
    return made.combine_chunks()
