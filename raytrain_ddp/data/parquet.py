"""Images in Parquet files, as Hugging Face `datasets` writes them. Row groups are the blocks."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_ddp.data.plan import Rows
from raytrain_ddp.errors import DataError, did_you_mean

_CACHE_BYTES = 512 * 2**20


class ParquetImages:
    """Rows of (encoded image, label) from Parquet files.

    Args:
        image_column: struct<bytes, path>, or binary.
        label_column: integers from 0.

    Raises:
        DataError: a file is missing or damaged, or a column is missing or of the wrong type.
    """

    def __init__(self, paths: Sequence[str], image_column: str, label_column: str) -> None:
        self._columns = (image_column, label_column)
        self._files = [_open(path) for path in paths]
        self._paths = list(paths)
        self._groups: list[tuple[int, int]] = []  # (file, row group) of each block
        rows: list[int] = []
        for index, file in enumerate(self._files):
            self._check_columns(file.schema_arrow, paths[index])
            for group in range(file.metadata.num_row_groups):
                self._groups.append((index, group))
                rows.append(file.metadata.row_group(group).num_rows)
        self.blocks: Rows = np.array(rows, dtype=np.int64)
        if not rows or not self.blocks.sum():
            raise DataError(f"{', '.join(paths)}: 0 rows.")
        self._starts = np.cumsum(self.blocks) - self.blocks
        self._cache: OrderedDict[int, tuple[list[bytes], Rows]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()  # a ParquetFile is not made for several threads
        self.class_names = self._class_names()

    def read(self, rows: Rows) -> list[tuple[bytes, int]]:
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        records = []
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            images, labels = self._block(block)
            place = row - int(self._starts[block])
            records.append((images[place], int(labels[place])))
        return records

    def fingerprint(self) -> str:
        """Of the names, sizes and footers: a footer has the rows and offsets of its file."""
        digest = sha256()
        for path, file in zip(self._paths, self._files, strict=True):
            digest.update(f"{Path(path).name} {Path(path).stat().st_size} ".encode())
            digest.update(repr(file.metadata.to_dict()).encode())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """File, row group and row, for messages."""
        block = int(np.searchsorted(self._starts, row, side="right")) - 1
        file, group = self._groups[block]
        return f"{self._paths[file]}, row group {group}, row {row - int(self._starts[block])}"

    def _block(self, block: int) -> tuple[list[bytes], Rows]:
        with self._lock:
            if block in self._cache:
                self._cache.move_to_end(block)
                return self._cache[block]
            value = self._read_block(block)
            self._cache[block] = value
            self._cached_bytes += sum(map(len, value[0]))
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                _, (images, _) = self._cache.popitem(last=False)
                self._cached_bytes -= sum(map(len, images))
            return value

    def _read_block(self, block: int) -> tuple[list[bytes], Rows]:
        index, group = self._groups[block]
        where = f"{self._paths[index]}, row group {group}"
        try:
            table = self._files[index].read_row_group(group, columns=list(self._columns))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{where}: cannot be read: {error}.") from error
        images, labels = (table.column(name).combine_chunks() for name in self._columns)
        if pa.types.is_struct(images.type):
            images = images.field("bytes")
        for column, values in zip(self._columns, (images, labels), strict=True):
            if values.null_count:
                row = values.is_null().index(True).as_py()
                raise DataError(f"{where}, row {row}: {column} is null.")
        return images.to_pylist(), labels.to_numpy(zero_copy_only=False).astype(np.int64)

    def _check_columns(self, schema: pa.Schema, path: str) -> None:
        for column in self._columns:
            if column not in schema.names:
                raise DataError(
                    f"{path}: no column {column!r} among {', '.join(schema.names)}."
                    f"{did_you_mean(column, schema.names)} Set --data.image-column or "
                    "--data.label-column."
                )
        image, label = (schema.field(column).type for column in self._columns)
        if pa.types.is_struct(image):
            image = image.field("bytes").type if image.get_field_index("bytes") >= 0 else image
        if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
            raise DataError(
                f"{path}: column {self._columns[0]!r} is {image}; encoded images are expected "
                "(struct<bytes, path> or binary)."
            )
        if not pa.types.is_integer(label):
            raise DataError(f"{path}: column {self._columns[1]!r} is {label}; integers expected.")

    def _class_names(self) -> list[str]:
        """From the ClassLabel feature, else one name per label up to the largest."""
        metadata = self._files[0].schema_arrow.metadata or {}
        try:
            features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
            return [str(name) for name in features[self._columns[1]]["names"]]
        except (KeyError, TypeError, ValueError):
            return [str(label) for label in range(self._largest_label() + 1)]

    def _largest_label(self) -> int:
        largest = -1
        for index, group in self._groups:
            row_group = self._files[index].metadata.row_group(group)
            for c in range(row_group.num_columns):
                column: Any = row_group.column(c)
                statistics = column.statistics
                known = statistics is not None and statistics.has_min_max
                if column.path_in_schema == self._columns[1] and known:
                    largest = max(largest, int(statistics.max))
        if largest < 0:
            raise DataError(
                f"{self._paths[0]}: neither class names nor label statistics: write the files with "
                "statistics, or as Hugging Face ClassLabel."
            )
        return largest


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}.") from error
