"""Opens the splits of a source for conversion, and lists their rows. Imports torch only for
torchvision's own data sets.

A shuffled shard has rows from everywhere. To read each from a file of many rows would cost its row
group; so such a source is first copied, in its order, to an Arrow file, in which any row is read
alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import Located, locate, role_of
from raytrain_ddp.data.formats.file_formats import open_shards
from raytrain_ddp.data.formats.labels import NoLabelsError
from raytrain_ddp.data.formats.shard import sizes_of
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.pixels.decoding import reason_for
from raytrain_ddp.data.splits import Splits, notes_of, open_images, unused_fields
from raytrain_ddp.errors import DataError, RaytrainError
from raytrain_ddp.files import replace_with

if TYPE_CHECKING:
    from raytrain_ddp.tools.convert.__main__ import ConvertArgs

_READ = (
    *("source", "eval_source", "train_split", "eval_split", "config", "root"),
    *("image_column", "label_column", "bad_records"),
)
_COPY = pa.schema([("image", pa.large_binary()), ("why", pa.string())])

Tell = Callable[[int, int], None]  # (images finished, their bytes in the source)
Phase = Callable[[str, int], Tell]  # starts a phase: (title, number of images)


class SourceSplit(NamedTuple):
    """A split, with the name that its shards get."""

    name: str
    found: Located
    source: Any  # a FolderImages, ShardImages or TorchvisionImages
    data: DataConfig


class Row(NamedTuple):
    """A row of a split.

    Args:
        size: of the image, in bytes.
        path: to be stored.
        file: the image, if it has a file of its own.
        why: there is no image; "": there is one.
    """

    number: int
    label: int
    size: int
    path: str | None
    file: str = ""
    why: str = ""


def open_source_splits(args: ConvertArgs) -> tuple[list[SourceSplit], Splits]:
    """The splits that training would read, that to train on first; and what is known of them, with
    notes about data that is not converted.

    Raises:
        DataError: there is nothing to convert, or a split has a class that the train split lacks.
    """
    data = DataConfig(**{name: getattr(args, name) for name in _READ})
    found = locate(data, more=True)
    train = open_images(found.train, data)
    splits = [SourceSplit("train", found.train, train, data)]
    notes = [*found.notes, *notes_of(train, "the training set")]
    notes += [f"--{name.replace('_', '-')} {why}" for name, why in unused_fields(train, data)]
    for part in filter(None, (found.eval, *found.more)):
        name = part.name.lower() if role_of(part.name) in ("validation", "test") else "test"
        try:
            opened = open_images(part, data, train.class_names)
        except NoLabelsError as error:
            if args.eval_source is not None or args.eval_split != "auto":
                raise
            notes.append(f"not converted: {error}")
        else:
            splits.append(SourceSplit(name, part, opened, data))
            notes += notes_of(opened, f"the {name} split")
    for split in splits:
        if split.found.kind == "files":
            split.source.labels()  # raises for a label that is not a class
    second = splits[1] if len(splits) > 1 else None
    named = f"the {second.name} split" if second else ""
    return splits, Splits(train, second and second.source, named, tuple(notes))


def list_rows(split: SourceSplit, copy: Path, phase: Phase) -> list[Row]:
    """The rows. Those that have no files of their own are copied to the file `copy` first.

    Raises:
        DataError: a file or label cannot be read.
    """
    source, kind = split.source, split.found.kind
    labels = source.labels().tolist()
    if files := [os.path.abspath(path) for path, _ in getattr(source, "files", None) or ()]:
        root = os.path.abspath(split.found.paths[0] if kind == "folder" else source.image_root)
        rows = []
        for number, (file, label, size) in enumerate(
            zip(files, labels, sizes_of(files), strict=True)
        ):
            path = file.removeprefix(f"{root}/").encode("utf-8", "replace").decode()  # any bytes
            why = str(_image(source, number)) if size < 0 else ""
            rows.append(Row(number, label, max(0, size), path, file, why))
        return rows
    if not copy.exists():
        _copy(source, copy, phase(f"{split.name}: reading", len(labels)))
    copied = open_copy(copy)
    sizes = pc.fill_null(pc.binary_length(copied["image"]), 0).to_pylist()
    paths: list[str | None] = [None] * len(labels)
    if kind == "files":
        paths = []
        for shard in open_shards(split.found.paths, split.data, binary=False):
            column, count = shard.path_column, sum(group.rows for group in shard.groups)
            paths += shard.values(column) if column else [None] * count
    columns = zip(labels, sizes, paths, copied["why"].to_pylist(), strict=True)
    return [
        Row(number, label, size, path, "", why)
        for number, (label, size, path, why) in enumerate(columns)
    ]


def open_copy(path: Path) -> pa.Table:
    """The columns image (null: there is none) and why; in memory as far as they are used."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _copy(source: Any, path: Path, tell: Tell) -> None:
    start = 0
    with (
        replace_with(path, path.parent) as temp,
        pa.OSFile(str(temp), "wb") as file,
        pa.ipc.new_file(file, _COPY) as writer,
        ThreadPoolExecutor() as threads,
    ):
        for rows in source.blocks.tolist():
            read = [_image(source, row) for row in range(start, start + rows)]
            found = [*threads.map(_encoded, read)]
            images = [image if isinstance(image, bytes) else None for image in found]
            whys = ["" if isinstance(image, bytes) else str(image) for image in found]
            writer.write_batch(pa.record_batch([images, whys], schema=_COPY))
            tell(rows, sum(len(image or b"") for image in images))
            start += rows


def _image(source: Any, row: int) -> Any:
    """Bytes, a BadRecord, or a PIL image."""
    try:
        return source.read(np.array([row]))[0][0]
    except RaytrainError:
        raise
    except Exception as error:  # any exception of the data set
        raise DataError(f"{source.where(row)}: cannot be read: {error}.") from error


def _encoded(image: Any) -> bytes | BadRecord:
    """A PIL image as PNG."""
    if isinstance(image, bytes | BadRecord):
        return image
    encoded = BytesIO()
    try:
        image.save(encoded, "PNG")
    except Exception as error:  # PIL decodes lazily, and decoders raise any type
        return BadRecord(reason_for(error))
    return encoded.getvalue()
