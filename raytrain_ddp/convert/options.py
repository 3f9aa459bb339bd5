"""The options of `convert`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_ddp.config.validation import require


@dataclass(frozen=True)
class ConvertConfig:
    """Equal configs and equal sources give equal bytes, on any number of processes."""

    eval_source: str | None = None
    """Source of the evaluation split. Default: the validation and test splits beside train."""
    train_split: str = "auto"
    """Name of the split to train on, as --data.train-split of fit."""
    eval_split: str = "auto"
    """Name of the split to evaluate on, as --data.eval-split of fit; auto: validation and test."""
    config: str = "auto"
    """Which of several data sets in one repository, as --data.config of fit."""
    root: str = "data"
    """Folder for downloads of torchvision data sets."""
    image_column: str = "image"
    """Parquet sources: column with the images."""
    label_column: str = "label"
    """Parquet sources: column with the labels."""
    resize_short: int = 0
    """Make the shorter side of larger images so many pixels, and all images RGB JPEG. 0: keep the
    bytes as they are."""
    quality: int = 90
    """JPEG quality with --resize-short, 1 to 100."""
    seed: int = 0
    """Of the shuffle."""
    shuffle: bool = True
    """Shuffle each split once, over all its rows."""
    shard_mib: float = 256.0
    """Images per file, about."""
    row_group_mib: float = 8.0
    """Images per row group, at most (but one image at least). A loader keeps 64 MiB of them
    per lane of a block shuffle, so 8 to mix; and 8 MiB suffice for an object store's throughput."""
    rows_per_group: int = 256
    """Rows per row group, at most."""
    bad_records: Literal["error", "skip"] = "error"
    """What happens to images that cannot be decoded; skipped ones are listed in dataset.json."""
    check: bool = True
    """Decode each image, to find those that cannot be."""
    stats_images: int = 2000
    """So many images of the train split, evenly spaced, give mean and std. 0: all."""

    def __post_init__(self) -> None:
        require(self.resize_short >= 0, "--resize-short", self.resize_short, "must be 0 or more")
        require(1 <= self.quality <= 100, "--quality", self.quality, "must be 1 to 100")
        require(0 <= self.seed < 2**64, "--seed", self.seed, "must be 0 or more, below 2**64")
        require(self.stats_images >= 0, "--stats-images", self.stats_images, "must be 0 or more")
        for name in ("shard_mib", "row_group_mib", "rows_per_group"):
            value = getattr(self, name)
            require(value > 0, f"--{name.replace('_', '-')}", value, "must be above 0")
