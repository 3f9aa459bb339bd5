"""The options of `convert`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.validation import MAY_BE_EMPTY, require, require_least

_QUALITY = 90


@dataclass(frozen=True)
class ConvertConfig:
    """Equal configs and equal sources give equal bytes, on any number of processes."""

    eval_source: str | None = None
    """Source of the evaluation split. Default: the validation and test splits of SRC."""
    train_split: str = "auto"
    """Split to train on, as --data.train-split of fit."""
    eval_split: str = "auto"
    """Split to evaluate on, as --data.eval-split of fit. auto: validation and test."""
    config: str = "auto"
    """Data set to use from a repository with several, as --data.config of fit."""
    root: str | None = None
    """Folder of the images that a list names, or of torchvision data sets, as --data.root of fit.
    """
    image_column: str = field(default="image", metadata=MAY_BE_EMPTY)
    """Column with the images, or with their paths."""
    label_column: str = field(default="label", metadata=MAY_BE_EMPTY)
    """Column with the labels."""
    resize_short: int = 0
    """Resize larger images to this many pixels on the shorter side, and make all images RGB JPEG.
    0: keep the bytes as they are."""
    quality: int = _QUALITY
    """JPEG quality with --resize-short, 1 to 100."""
    seed: int = 0
    """Random seed of the shuffle."""
    shuffle: bool = True
    """Shuffle each split once, over all its rows."""
    shard_mib: float = 256.0
    """Approximate size of the images in a file, in MiB."""
    row_group_mib: float = 8.0
    """Maximum size of the images in a row group, in MiB (but at least one image). A loader keeps 64
    MiB of row groups per lane of a block shuffle, so 8 of these; and 8 MiB are enough for the
    throughput of an object store."""
    rows_per_group: int = 256
    """Maximum number of rows in a row group."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with images that cannot be decoded. error: stop (exit status 4); skip: leave them
    out, and list them in dataset.json."""
    check: bool = True
    """Decode each image, to find those that cannot be decoded."""
    stats_images: int = 2000
    """Number of training images, evenly spaced, that mean and std are computed from. 0: all."""

    def __post_init__(self) -> None:
        require_least(self, resize_short=0, stats_images=0)
        require(1 <= self.quality <= 100, "--quality", self.quality, "must be 1 to 100")
        ok = self.resize_short > 0 or self.quality == _QUALITY
        require(ok, "--quality", self.quality, "has no effect without --resize-short")
        require(0 <= self.seed < 2**64, "--seed", self.seed, "must be 0 or more, below 2**64")
        for name in ("shard_mib", "row_group_mib", "rows_per_group"):
            value = getattr(self, name)
            require(value > 0, f"--{name.replace('_', '-')}", value, "must be above 0")
