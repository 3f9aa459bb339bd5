"""Writes one Parquet shard, in any process, from files that contain its images.

Does not import torch: each of many processes would need seconds for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.pixels.decoding import reason_for
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import fsync, replace_with, sha256_of, write_json
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.convert.pixels import PixelCounts, decode_image, shrink_image

MIB = 2**20
PART = ".part"  # ends the name of a shard until the whole data set is complete
_PAGE_BYTES = MIB  # covered by one checksum
_READ_BYTES = 8 * MIB

Tell = Callable[[int, int], None]  # (images finished, their bytes in the source)
Phase = Callable[[str, int], Tell]  # starts a phase: (title, number of images)


class Record(NamedTuple):
    """A row to be written: where the bytes of its image are, and its label and path."""

    row: int  # of the source's split
    file: str
    offset: int
    size: int
    label: int
    path: str | None


@dataclass(frozen=True)
class ShardTask:
    """A shard to write into the folder `stage`.

    Args:
        sampled: rows whose pixels are counted.
    """

    name: str
    stage: str
    records: list[Record]
    sampled: frozenset[int]
    class_names: tuple[str, ...]
    config: ConvertConfig


@dataclass(frozen=True)
class ShardDone:
    """The record of a complete shard.

    Args:
        bad: skipped rows, and why.
    """

    name: str
    rows: int
    bytes: int
    sha256: str
    bad: list[tuple[int, str]]
    pixels: PixelCounts

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "pixels": self.pixels.to_dict()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> ShardDone:
        bad = [(row, why) for row, why in record["bad"]]
        return cls(**{**record, "bad": bad, "pixels": PixelCounts.from_dict(record["pixels"])})


def write_shard(task: ShardTask, tell: Tell) -> ShardDone:
    """Writes the shard and its record, both durably.

    Raises:
        BadRecord: (row, reason), with `bad_records = "error"`.
        DataError: a source file is missing or has changed, or `stage` does not exist.
        OSError: the shard cannot be written.
    """
    stage = Path(task.stage)
    state = stage / "state"
    part = stage / f"{task.name}{PART}"
    images = _Images(task, tell)
    rows = 0
    with replace_with(part, state) as temp:
        with pq.ParquetWriter(
            str(temp),
            schema(task.class_names),
            compression="none",  # useless for JPEG, and uncompressed pages can be read in place
            use_dictionary=False,
            write_statistics=["label"],
            write_page_checksum=True,
            data_page_size=_PAGE_BYTES,
            write_batch_size=1,  # the page size is checked after this many rows
        ) as writer:
            for group in images.groups():
                writer.write_table(group, row_group_size=len(group))
                rows += len(group)
        size, digest = temp.stat().st_size, sha256_of(temp)
    fsync(stage)
    done = ShardDone(task.name, rows, size, digest, images.bad, images.counts)
    write_json(record_path(stage, task.name), done.to_dict(), state)
    return done


def finished_shard(stage: Path, name: str, part: Path) -> ShardDone | None:
    """The record of a shard that an earlier process finished and that still exists."""
    try:
        record = json.loads(record_path(stage, name).read_text(encoding="utf-8"))
        done = ShardDone.from_dict(record)
        return done if part.stat().st_size == done.bytes else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def record_path(stage: Path, name: str) -> Path:
    return stage / "state" / f"{name}.json"


def schema(class_names: tuple[str, ...]) -> pa.Schema:
    """The schema that Hugging Face `datasets` writes for the features Image and ClassLabel."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(class_names), "_type": "ClassLabel"},
    }
    return pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("label", pa.int64()),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )


def stored_image(
    content: bytes, config: ConvertConfig, count: bool
) -> tuple[bytes, PixelCounts | None]:
    """The bytes to store for an image, and with `count` the histogram of its decoded pixels.

    Raises:
        BadRecord: it cannot be decoded; detected only if it is decoded.
    """
    try:
        if config.resize_short:
            content = shrink_image(content, config.resize_short, config.quality)
        counts = None
        if count or (config.check and not config.resize_short):
            pixels = decode_image(content)
            counts = PixelCounts.of(pixels) if count else None
    except Exception as error:  # decoders raise any type
        raise BadRecord(reason_for(error)) from None
    return content, counts


class _Images:
    """The rows of a shard, with one row group in memory at a time."""

    def __init__(self, task: ShardTask, tell: Tell) -> None:
        self._task, self._tell = task, tell
        self._schema = schema(task.class_names)
        self.bad: list[tuple[int, str]] = []
        self.counts = PixelCounts.none()

    def groups(self) -> Iterator[pa.Table]:
        limit = self._task.config.row_group_mib * MIB
        group: list[tuple[bytes, Record]] = []
        size = 0
        for content, record in self._rows():
            full = len(group) == self._task.config.rows_per_group
            if group and (full or size + len(content) > limit):
                yield self._table(group)
                group, size = [], 0
            group.append((content, record))
            size += len(content)
        if group:
            yield self._table(group)

    def _rows(self) -> Iterator[tuple[bytes, Record]]:
        config = self._task.config
        for record in self._task.records:
            content = read_image(record)
            self._tell(1, len(content))
            try:
                kept, counts = stored_image(content, config, record.row in self._task.sampled)
            except BadRecord as why:
                if config.bad_records == "error":
                    raise BadRecord(record.row, str(why)) from why
                self.bad.append((record.row, str(why)))
                continue
            if counts is not None:
                self.counts = self.counts.plus(counts)
            yield kept, record

    def _table(self, group: list[tuple[bytes, Record]]) -> pa.Table:
        contents = pa.array([content for content, _ in group], pa.binary())
        paths = pa.array([_text(record.path) for _, record in group], pa.string())
        images = pa.StructArray.from_arrays([contents, paths], ["bytes", "path"])
        labels = pa.array([record.label for _, record in group], pa.int64())
        return pa.table([images, labels], schema=self._schema)


def read_image(record: Record) -> bytes:
    """The bytes in the source.

    Raises:
        DataError: the file is missing or has become shorter.
    """
    try:
        with open(record.file, "rb") as file:
            file.seek(record.offset)
            content = file.read(record.size)
    except OSError as error:
        raise DataError(f"{record.file}: cannot be read: {error.strerror}.") from error
    if len(content) != record.size:
        raise DataError(f"{record.file}: {record.size} bytes expected, {len(content)} read.")
    return content


def _text(path: str | None) -> str | None:
    """A file name may be any bytes; a string column requires UTF-8."""
    return path and path.encode("utf-8", "replace").decode()
