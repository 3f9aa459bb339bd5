"""Parquet files of images for tests, and functions to read them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from tarfile import TarInfo
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import Located, locate
from raytrain_ddp.data.formats.shard_images import ShardImages

ROWS_PER_GROUP = 4


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def noise(seed: int, height: int, width: int, form: str = "png") -> bytes:
    random = np.random.Generator(np.random.Philox(seed))
    return encoded(Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)), form)


def png(seed: int) -> bytes:
    """A picture of noise."""
    return noise(seed, 12, 10)


def write_tar(path: Path, members: Iterable[tuple[str, bytes] | TarInfo], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as file:
        for member in members:
            if isinstance(member, TarInfo):
                file.addfile(member)
                continue
            info = TarInfo(member[0])
            info.size = len(member[1])
            file.addfile(info, io.BytesIO(member[1]))
    return path


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"row_group_size": ROWS_PER_GROUP, "write_page_checksum": True, **options}
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def hugging_face(images: Sequence[bytes | None], paths: Sequence[str | None] = ()) -> pa.Array:
    """A column as `datasets` writes it."""
    paths = [*paths, *[None] * (len(images) - len(paths))]
    records = [{"bytes": b, "path": p} for b, p in zip(images, paths, strict=True)]
    return pa.array(records, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def write_images(path: Path, rows: int, first: int = 0, **options: Any) -> str:
    """Row r of all files has picture r and label r."""
    ids = range(first, first + rows)
    columns = {"image": hugging_face([png(i) for i in ids]), "label": list(ids)}
    return write_parquet(path, columns, **options)


def opened(*paths: str, **fields: Any) -> ShardImages:
    return ShardImages(paths, DataConfig(**fields))


def all_of(source: ShardImages) -> list[tuple[Any, int]]:
    return source.read(np.arange(source.blocks.sum()))


def located(
    source: str, eval_source: str | None = None, **fields: Any
) -> tuple[Located, Located | None]:
    """The train split and the evaluation split."""
    found = locate(DataConfig(source=source, eval_source=eval_source, **fields))
    return found.train, found.eval


def converted(root: Path, **changes: Any) -> Path:
    """A folder as `convert` leaves it; the files contain their names."""
    names = {"b.parquet": "train", "a.parquet": "train", "c.parquet": "validation"}
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    files = [{"path": name, "split": split, "bytes": 9} for name, split in names.items()]
    reported = {"format": "raytrain_ddp", "version": 1, "files": files, **changes}
    (root / "dataset.json").write_text(json.dumps(reported))
    return root


def with_class_names(path: Path, names: list[str], labels: list[int]) -> str:
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": [png(0)] * len(labels), "label": pa.array(labels, pa.int64())})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return str(path)
