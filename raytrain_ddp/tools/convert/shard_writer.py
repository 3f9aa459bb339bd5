"""Writes Parquet shards from the lists of their rows, in threads or Ray tasks."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from raytrain_ddp.data.formats.shard import content_of
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.pixels.decoding import (
    ORIENTATION,
    open_encoded_image,
    orientation_of,
    reason_for,
    shrink_for,
)
from raytrain_ddp.errors import RaytrainError, first_line
from raytrain_ddp.files import fsync, replace_with
from raytrain_ddp.tools.convert.source_rows import Row, open_copy
from raytrain_ddp.tools.staging import sha256_of, write_json

if TYPE_CHECKING:
    from raytrain_ddp.tools.convert.__main__ import ConvertArgs

_MAX_JPEG_SIDE = 65_500


def shrink_image(content: bytes, short: int, quality: int) -> bytes:
    """An image as RGB JPEG, with its shorter side reduced to `short` pixels.

    An RGB JPEG that is not too large stays unchanged: encoding it again would lose quality. Of the
    EXIF data, the orientation is kept. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is
    at least twice the new size.

    Raises:
        Exception: it cannot be decoded; decoders raise any type.
    """
    picture = open_encoded_image(content)
    image = Image.open(io.BytesIO(content))
    height, width = old = (picture.height, picture.width)
    if (least := min(old)) > short:
        height, width = (max(1, round(side * short / least)) for side in old)
    elif image.format == "JPEG" and image.mode == "RGB":
        return content
    if max(height, width) > _MAX_JPEG_SIDE:
        raise ValueError(f"{width} x {height} pixels: a JPEG has at most {_MAX_JPEG_SIDE} per side")
    pixels = picture.pixels(shrink_for(old, (height, width)))
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if (orientation := orientation_of(image)) != 1:
        exif[ORIENTATION] = orientation
    encoded = io.BytesIO()
    resized.save(encoded, "JPEG", quality=quality, exif=exif)
    return encoded.getvalue()


MIB = 2**20
# A loader keeps 64 MiB of row groups for each lane of a block shuffle, so 8 of these. And 8 MiB are
# enough for the throughput of an object store.
_ROW_GROUP_BYTES = 8 * MIB
_ROW_GROUP_ROWS = 256

Record = dict[str, Any]
"""A complete shard: path, rows, bytes, sha256; bad: (row, why) for each row without an image."""


class ShardTask(NamedTuple):
    """A shard to write: `folder` gets its record, and the folder ``result`` in it the shard."""

    name: str
    folder: Path
    rows: list[Row]
    copy: Path
    class_names: list[str]
    args: ConvertArgs


def write_shard(task: ShardTask) -> Record:
    """Writes the shard and its record, both durably.

    Raises:
        DataError: a source file is missing, or `folder` does not exist here.
        OSError: the shard cannot be written.
    """
    folder = task.folder
    record: Record = {"path": task.name, "rows": 0, "bad": []}
    schema = _schema(task.class_names)
    with replace_with(folder / "result" / task.name, folder) as temp:
        with pq.ParquetWriter(
            str(temp),
            schema,
            compression="none",  # useless for JPEG, and uncompressed pages can be read in place
            use_dictionary=False,
            write_statistics=["label"],
            write_page_checksum=True,
            data_page_size=MIB,  # covered by one checksum
            write_batch_size=1,  # the page size is checked after this many rows
        ) as writer:
            for rows in _row_groups(task, record):
                table = pa.Table.from_pylist(rows, schema=schema)
                writer.write_table(table, row_group_size=len(rows))
                record["rows"] += len(rows)
        record |= {"bytes": temp.stat().st_size, "sha256": sha256_of(temp)}
    fsync(folder / "result")
    write_json(folder / f"{task.name}.json", record, folder)
    return record


def _schema(class_names: list[str]) -> pa.Schema:
    """The schema that Hugging Face `datasets` writes for the features Image and ClassLabel."""
    label = {"names": class_names, "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)


def _row_groups(task: ShardTask, record: Record) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows to store, in groups. Adds bad rows to `record`."""
    group: list[dict[str, Any]] = []
    size = 0
    copied = open_copy(task.copy)["image"] if task.copy.exists() else None
    for row in task.rows:
        try:
            image = _image(row, copied, task.args)
        except Exception as error:  # decoders raise any type
            record["bad"].append((row.number, reason_for(error)))
            continue
        is_full = len(group) == _ROW_GROUP_ROWS or size + len(image) > _ROW_GROUP_BYTES
        if group and is_full:
            yield group
            group, size = [], 0
        group.append({"image": {"bytes": image, "path": row.path}, "label": row.label})
        size += len(image)
    if group:
        yield group


def _image(row: Row, copied: Any, args: ConvertArgs) -> bytes:
    """The bytes to store; raises any error if there is no image, or it cannot be decoded."""
    content: bytes | BadRecord = BadRecord(row.why)
    if not row.why:
        content = content_of(row.file) if row.file else copied[row.number].as_py()
    if isinstance(content, BadRecord):
        raise content
    if args.resize_short:
        return shrink_image(content, args.resize_short, args.quality)
    if args.check:
        open_encoded_image(content).pixels()
    return content


# ------------------------------------------------------------------ many


def in_threads(workers: int, tasks: Iterable[ShardTask]) -> Iterator[Record]:
    """Writes shards, in any order, in threads: the slow work (decoding, hashing, file access)
    releases the GIL. After an error, shards that are being written are completed."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(write_shard, task) for task in tasks]
        try:
            yield from (future.result() for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


def on_ray(tasks: Iterable[ShardTask]) -> Iterator[Record]:
    """Writes shards, in any order, on the Ray that this process is connected to.

    Raises:
        RaytrainError: Ray could not finish a task.
    """
    import ray

    remote = ray.remote(num_cpus=1)(write_shard)
    pending = [remote.remote(task) for task in tasks]
    try:
        while pending:
            (done,), pending = ray.wait(pending)
            yield ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = first_line(error)
        raise RaytrainError(f"Ray lost a task: {reason}. Run the same command again.") from error
