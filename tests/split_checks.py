"""Class folders, and what a run would read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from parquet_files import png

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.splits import Splits, open_splits
from raytrain_ddp.display.formatting import format_data


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
