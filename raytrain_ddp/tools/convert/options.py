"""The options of `convert`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.flags import positional
from raytrain_ddp.config.validation import ADDRESS, MAY_BE_EMPTY, require, require_least

_QUALITY = 90


@dataclass(frozen=True)
class ConvertArgs:
    """Convert images to Parquet shards for training.

    The shards have the layout of Hugging Face `datasets`. They depend on SRC and the flags only,
    not on the number of threads. The same command again resumes where it was stopped. DST appears
    when it is complete.
    """

    source: str = field(metadata=positional("SRC"))
    """Any --data.source of fit: folder, Parquet, tar files, list, torchvision:NAME, or URI."""
    dest: str = field(metadata=positional("DST"))
    """Folder to create."""
    workers: int | None = None
    """Number of threads. Default: one per CPU."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Convert on a running Ray cluster. SRC and DST must be shared folders."""
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
    """Approximate total size of the images in a file, in MiB, before they are resized."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with images that cannot be decoded. error: stop (exit status 4); skip: leave them
    out, and list them in dataset.json."""
    check: bool = True
    """Decode each image, to find those that cannot be decoded."""

    def __post_init__(self) -> None:
        require_least(self, workers=1, resize_short=0)
        require(1 <= self.quality <= 100, "--quality", self.quality, "must be 1 to 100")
        ok = self.resize_short > 0 or self.quality == _QUALITY
        require(ok, "--quality", self.quality, "has no effect without --resize-short")
        require(0 <= self.seed < 2**64, "--seed", self.seed, "must be 0 or more, below 2**64")
        require(self.shard_mib > 0, "--shard-mib", self.shard_mib, "must be above 0")
        ok = self.address is None or self.workers is None
        require(ok, "--workers", self.workers, "has no effect with --address")
