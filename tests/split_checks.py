"""Data sets on the disk, and what a run would read from them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from parquet_files import png
from PIL import Image

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import Found, locate, open_data_set
from raytrain_ddp.data.discovery.split_names import ROLE_OF
from raytrain_ddp.data.splits import Splits, open_splits
from raytrain_ddp.tools.formatting import format_data

Parts = dict[str, set[str]]


def labels_of(source: Any) -> list[int]:
    """As they are read with the images, row by row."""
    return [label for _, label in source.read(np.arange(source.blocks.sum()))]


def folder(root: Path, **counts: int) -> Path:
    """Class folders with so many pictures."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(png(number))
    return root


def splits_of(source: Path | str, **fields: Any) -> Splits:
    return open_splits(DataConfig(source=str(source), **fields))


def lines(splits: Splits) -> dict[str, str]:
    reported: dict[str, str] = {}
    for title, text in format_data(splits.summary(), "images"):
        reported[title] = f"{reported[title]} | {text}" if title in reported else text
    return reported


# ------------------------------------------------------------------ files by split


def tiny_picture(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (number * 40, 0, 0)).save(content, "png")
    return content.getvalue()


def write(root: Path, *names: str, readme: str = "") -> Path:
    """Files of the kinds that their names say, with one row each."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif name.lower().endswith(".parquet"):
            images = [{"bytes": tiny_picture(0), "path": None}]
            pq.write_table(pa.table({"image": images, "label": [0]}), path)
        elif name.lower().endswith((".png", ".jpg")):
            path.write_bytes(tiny_picture(len(name) % 4))
        else:
            path.write_text("other\n")
    if readme:
        (root / "README.md").write_text(readme)
    return root


def found_at(source: Path | str, **fields: Any) -> Found:
    return locate(DataConfig(source=str(source), **fields))


def below(root: Path, paths: Sequence[str]) -> set[str]:
    return {str(Path(path).relative_to(root.resolve())) for path in paths}


def parts_of(found: Found, root: Path) -> tuple[set[str], set[str]]:
    return below(root, found.train.paths), below(root, found.eval.paths if found.eval else ())


def of_datasets(root: Path, config: str | None = None) -> Parts:
    """Files by split, as `load_dataset` would read them; empty if it refuses."""
    import datasets

    cache = str(root.parent / "cache")
    try:
        builder = datasets.load_dataset_builder(str(root), config, cache_dir=cache)
    except (ValueError, FileNotFoundError):
        return {}
    files = builder.config.data_files
    return {split: below(root, files[split]) for split in files}


def of_ours(root: Path, config: str = "auto") -> Parts:
    """The same by this package, under the names of `datasets`."""
    found = open_data_set(str(root), "data.source", DataConfig(config=config))
    parts: Parts = {}
    for split, files in found.splits.items():
        name = ROLE_OF.get(split, split or "train")
        parts.setdefault(name, set()).update(below(root, [*map(found.uri_of, files)]))
    return parts
