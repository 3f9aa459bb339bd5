"""The file of predictions, and its parts in the hidden folder in which it is made.

.NAME.predicting/            see `Staging`
  part-00000000.parquet      the rows of a few chunks"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain_ddp.errors import ConfigError, DataError, first_line
from raytrain_ddp.files import replace_with, require_utf8
from raytrain_ddp.records import json_of
from raytrain_ddp.tools.predict.result_table import ERROR, joined
from raytrain_ddp.tools.staging import Staging

_GROUP_ROWS, _GROUP_BYTES = 65536, 64 * 2**20  # of a row group


class ResultFile(Staging):
    """The file `out`. Nothing is written before `held`.

    Raises:
        ConfigError: the format is unknown, there is no such folder, or the file exists already.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        super().__init__(out, "predicting", f"--out {out}")
        require_utf8("--out", out)  # as pyarrow does
        self._write = _WRITERS.get(out.suffix.lower())
        is_begun = overwrite or self.plan.exists()
        for is_wrong, why in (
            (self._write is None, "must end with .parquet, .csv or .jsonl"),
            (not out.parent.is_dir(), f"there is no folder {out.parent}"),
            (out.is_dir(), "is a folder: give the name of a file"),
            (out.exists() and not is_begun, "exists already: give another name, or --overwrite"),
        ):
            if is_wrong:
                raise ConfigError(f"--out {out}: {why}.")

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def write_part(self, number: int, table: Any) -> None:
        with self.writing(), replace_with(self.part(number), self.folder) as temp:
            pq.write_table(table, temp, compression="zstd")

    def complete(self, parts: int, about: Mapping[str, str]) -> list[int]:
        """Writes the file from all parts, in order, a part in memory at a time.

        Returns:
            How many rows there are, cannot be read, have a class and a label, and the same.

        Raises:
            DataError: a part is damaged.
        """
        schemas = [self._read(pq.read_schema, number) for number in range(parts)]
        whole = joined([schema.empty_table() for schema in schemas])
        counts = []

        def table_of(number: int) -> Any:
            table = joined([whole, self._read(pq.read_table, number)])
            counts.append(_counts(table))
            return table

        assert self._write is not None
        with self.writing():
            self._write(self.result, whole.schema.with_metadata(about), map(table_of, range(parts)))
        self.finish()
        return [*map(sum, zip(*counts, strict=True))]

    def _read(self, read: Callable[[Path], Any], number: int) -> Any:
        try:
            return read(self.part(number))
        except (OSError, pa.ArrowException) as error:
            text = "delete it, and repeat the command."
            raise DataError(f"{self.part(number)}: damaged: {first_line(error)}: {text}") from None


def _counts(table: Any) -> tuple[int, int, int, int]:
    right = labeled = 0
    if {"class", "label"} <= {*table.schema.names}:
        same = pc.equal(table["class"], table["label"])
        labeled, right = len(table) - same.null_count, pc.sum(same).as_py() or 0
    return len(table), len(table) - table[ERROR].null_count, labeled, right


def _parquet(path: Path, schema: Any, tables: Iterable[Any]) -> None:
    group: list[Any] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in chain(tables, [None]):
            rows, size = sum(map(len, group)), sum(each.nbytes for each in group)
            if rows and (table is None or rows >= _GROUP_ROWS or size >= _GROUP_BYTES):
                writer.write_table(pa.concat_tables(group).cast(schema), row_group_size=rows)
                group.clear()
            group.append(table)


def _csv(path: Path, schema: Any, tables: Iterable[Any]) -> None:
    from pyarrow import csv

    with csv.CSVWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _json_lines(path: Path, schema: Any, tables: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            columns = {name: _shortest(table[name].combine_chunks()) for name in schema.names}
            for row in pa.table(columns).to_pylist():
                file.write(json_of(row, ascii_only=False) + "\n")


def _shortest(column: Any) -> Any:
    """float32 as the float64 that is its shortest decimal, also in lists."""
    for kind, text, wide in (
        (pa.float32(), pa.string(), pa.float64()),
        (pa.list_(pa.float32()), pa.list_(pa.string()), pa.list_(pa.float64())),
    ):
        if column.type == kind:
            return column.cast(text).cast(wide)
    return column


_WRITERS = {".parquet": _parquet, ".csv": _csv, ".jsonl": _json_lines, ".ndjson": _json_lines}
