"""The file of predictions, and the hidden folder in which it is made.

    .NAME.predicting/            next to the file; deleted when it is complete
      plan.json                  what is predicted, and how: compared when the command is repeated
      part-00000000.parquet      the rows of a few chunks; complete, or not there

A part depends on the plan only. So the file has the same bytes, whoever made its parts, and however
often the command was killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain_ddp.errors import ConfigError, DataError, PreflightError, first_line
from raytrain_ddp.files import (
    different,
    fsync,
    read_json,
    replace_with,
    require_alone,
    require_utf8,
    write_json,
)
from raytrain_ddp.tools.predict.result_table import ERROR, aligned, require_flat, whole, writer_of

_PLAN = "plan.json"


class Totals(NamedTuple):
    """Counts over the rows of a file.

    Args:
        labeled, right: rows with a class and a label, and those where they are the same.
    """

    rows: int = 0
    bad: int = 0
    labeled: int = 0
    right: int = 0


class OutputParts:
    """The parts of the file `out`. Nothing is written before `held`.

    Raises:
        ConfigError: the format is unknown, there is no such folder, or the file exists already.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        self.out, self._overwrite = out, overwrite
        self.folder = out.parent / f".{out.name}.predicting"
        writer = writer_of(out.name)
        if writer is None:
            raise ConfigError(
                f"--out {out}: expected a name that ends with .parquet, .csv or .jsonl."
            )
        require_utf8("--out", out)  # as pyarrow does
        self._writer = writer
        if not out.parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}.")
        if out.is_dir():
            raise ConfigError(f"--out {out}: is a folder: give the name of a file.")
        if out.exists() and not overwrite and not (self.folder / _PLAN).exists():
            raise ConfigError(f"--out {out}: exists already: give another name, or --overwrite.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for one process.

        Raises:
            RunLockedError: another process holds the lock.
            PreflightError: the folder cannot be written to, as from the other methods.
        """
        with self._writing():
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / "lock").open("w")
        with lock:
            text = "another process is writing it: wait for it, or stop it."
            require_alone(lock, f"--out {self.out}: {text}")
            try:
                yield
            finally:
                if self._is_held(lock) and not any(self.folder.glob("part-*")):
                    shutil.rmtree(self.folder, ignore_errors=True)  # nothing to resume

    def _is_held(self, lock: IO[str]) -> bool:
        """Whether the folder is still the one that this process has locked."""
        with suppress(OSError):
            return os.path.samestat((self.folder / "lock").stat(), os.fstat(lock.fileno()))
        return False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # such as a full disk
            kept = f" Finished work is kept in {self.folder}: the same command continues."
            raise PreflightError(
                f"--out {self.out}: cannot be written: {error.strerror or error}."
                f"{kept if any(self.folder.glob('part-*')) else ''}"
            ) from None

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Records what is predicted, or compares it with what was begun before.

        Raises:
            ConfigError: they differ.
            DataError: the record is damaged.
        """
        try:
            before = read_json(self.folder / _PLAN)
        except DataError as error:
            if not self._overwrite:
                raise DataError(f"{error} To begin anew: --overwrite.") from None
            before = None
        has_work = any(self.folder.glob("part-*"))
        changes = different(before, plan) if before is not None and has_work else []
        if changes and not self._overwrite:
            raise ConfigError(
                f"--out {self.out}: other predictions were started here ({'; '.join(changes)}): "
                "repeat that command, or --overwrite."
            )
        if before is None or changes or not has_work:
            with self._writing():
                for old in self.folder.glob("part-*"):
                    old.unlink()
                write_json(self.folder / _PLAN, plan, self.folder)

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}.parquet"

    def write(self, part: int, table: Any) -> None:
        """Raises TaskError if the file cannot have these columns."""
        if self.out.suffix.lower() == ".csv":
            require_flat(table.schema)
        with self._writing(), replace_with(self.path(part), self.folder) as temp:
            pq.write_table(table, temp, compression="zstd")

    def _read(self, read: Callable[[Path], Any], part: int) -> Any:
        try:
            return read(self.path(part))
        except (OSError, pa.ArrowException) as error:
            text = "delete it, and repeat the command."
            raise DataError(f"{self.path(part)}: damaged: {first_line(error)}: {text}") from None

    def finish(self, parts: int, about: Mapping[str, str]) -> Totals:
        """Writes the file from all parts, in order, a part in memory at a time; then gives it its
        name, and deletes the parts.

        Raises:
            DataError: a part is damaged.
        """
        schema = whole([self._read(pq.read_schema, part) for part in range(parts)])
        totals = Totals()

        def tables() -> Iterator[Any]:
            nonlocal totals
            for part in range(parts):
                table = aligned(schema, self._read(pq.read_table, part))
                totals = _added(totals, table)
                yield table

        with self._writing():
            with replace_with(self.out, self.folder) as temp:
                self._writer(temp, schema, tables(), about)
            fsync(self.out.parent)
            shutil.rmtree(self.folder)
        return totals


def _added(totals: Totals, table: Any) -> Totals:
    right = labeled = 0
    if {"class", "label"} <= {*table.schema.names}:
        same = pc.equal(table["class"], table["label"])
        labeled, right = len(table) - same.null_count, pc.sum(same).as_py() or 0
    counts = (len(table), len(table) - table[ERROR].null_count, labeled, right)
    return Totals(*map(sum, zip(totals, counts, strict=True)))
