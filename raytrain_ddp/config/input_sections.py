"""The sections of a config that say what goes into the model: the data and their augmentation.

Imports nothing heavy, as sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.validation import FREE, at_least, below_one, require


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from, in which order, and who decodes them."""

    source: str = "digits"
    """'digits' (bundled), 'torchvision:CIFAR10' (any classification set, downloaded), a folder of
    class folders (ImageFolder), or Parquet files: file, folder, glob or URI (s3://, gs://, hf://)."""
    eval_source: str | None = None
    """Like source, for evaluation. Default: the validation or test split of source."""
    train_split: str = "auto"
    """Name of the split to train on; auto: train, or everything if there are no named splits."""
    eval_split: str = "auto"
    """Name of the split to evaluate on (of eval_source if set); auto: validation, else test; none:
    do not evaluate."""
    config: str = "auto"
    """Which of several data sets in a repository to use: a config of its README.md, or a folder."""
    root: str = field(default="data", metadata=FREE)
    """Folder for downloads of torchvision data sets."""
    image_column: str = "image"
    """Parquet column with the images: struct<bytes, path> or binary."""
    label_column: str = "label"
    """Parquet column with the labels: integers, strings or booleans."""
    classes: tuple[str, ...] | None = field(default=None, metadata=FREE)  # compared as data
    """Class names, in order. Default: the classes of the training set, sorted."""
    holdout: float = 0.0
    """Evaluate on this fraction of the training set, such as 0.1, and train on the rest: the same
    fraction of each class. Replaces the evaluation split."""
    holdout_seed: int = 0
    """Selects which rows are held out; they do not depend on seed."""
    image_size: int = 0
    """Side of the square images the model sees, in pixels. 0: as stored (all must be equal)."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Per-channel mean of the images (RGB, scale 0 to 1), subtracted on the device."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Per-channel standard deviation of the images (RGB, scale 0 to 1)."""
    exif_orientation: bool = False
    """Turn images as their EXIF tag says; torchvision does not."""
    jpeg_scaling: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where that leaves twice the pixels needed."""
    shuffle: Literal["auto", "full", "block"] = "auto"
    """full: any row may follow any other; block: blocks (Parquet row groups) are permuted, then the
    rows within windows of blocks; auto: block for Parquet files of more than 512 MiB of images."""
    shuffle_window: int | Literal["auto"] = "auto"
    """Blocks per window of the block shuffle; auto: those that take 64 MiB, 1 to 16."""
    bad_records: Literal["error", "skip"] = "error"
    """What happens to an image that cannot be decoded."""
    max_bad: int = field(default=100, metadata=FREE)
    """skip: how many bad records an epoch may have."""
    memory_mib: int = field(default=1024, metadata=FREE)
    """Most memory for row groups of Parquet files, per worker; as much again for evaluation."""
    cache: str | None = field(default=None, metadata=FREE)
    """Folder on each node's own disk for copies of row groups of remote Parquet files."""
    cache_gib: float = field(default=100.0, metadata=FREE)
    """Most disk space for data.cache, per node; the longest unused of other data sets makes way."""
    workers: int | Literal["auto"] = field(default="auto", metadata=FREE)
    """Loader threads per training worker, or processes for your own data sets; 0 loads in the
    training thread; auto: adds more while training waits for data, up to the worker's CPUs."""
    prefetch: int = field(default=4, metadata=FREE)
    """Micro-batches prepared ahead per loader thread or process."""
    prefetch_mib: int = field(default=1024, metadata=FREE)
    """Most memory for micro-batches prepared ahead, per worker."""

    def __post_init__(self) -> None:
        at_least(0, "data", self, "image_size", "max_bad", "cache_gib")
        at_least(1, "data", self, "prefetch", "prefetch_mib", "memory_mib")
        window_ok = self.shuffle_window == "auto" or self.shuffle_window >= 1
        require(window_ok, "data.shuffle_window", self.shuffle_window, "must be auto, or 1 or more")
        require(min(self.std) > 0, "data.std", self.std, "each value must be above 0")
        workers_ok = self.workers == "auto" or self.workers >= 0
        require(workers_ok, "data.workers", self.workers, "must be auto, or 0 or more")
        rule = "must be a folder, Parquet files, 'torchvision:NAME' or 'digits'"
        require(bool(self.source), "data.source", self.source, rule)
        for name in ("train_split", "eval_split", "config"):
            value = getattr(self, name)
            require(bool(value), f"data.{name}", value, "must be a name, or auto")
        self._require_classes()
        self._require_holdout()

    def _require_classes(self) -> None:
        rule = "must have 2 or more names, all different"
        classes = self.classes
        ok = classes is None or (len(classes) >= 2 and len(set(classes)) == len(classes))
        require(ok, "data.classes", classes, rule)

    def _require_holdout(self) -> None:
        below_one("data", self, "holdout")
        at_least(0, "data", self, "holdout_seed")
        rule = "already provides the evaluation data: remove data.{} = {!r}"
        for name, unset in (("eval_source", (None,)), ("eval_split", ("auto", "none"))):
            given = getattr(self, name)
            ok = not self.holdout or given in unset
            require(ok, "data.holdout", self.holdout, rule.format(name, given))


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images. Each random number belongs to (seed, epoch, row, repeat), or
    to (seed, step, slot) where images are mixed."""

    crop: Literal["none", "shift", "random"] = "shift"
    """none; shift: pad by an eighth of the width and crop back; random: random resized crop."""
    scale: tuple[float, float] = (0.08, 1.0)
    """random: share of the image's area that a crop takes, from and to."""
    flip: bool = False
    """Mirror half of the images left to right."""
    policy: Literal["none", "randaugment", "trivial", "augmix"] = "none"
    """RandAugment, TrivialAugmentWide or AugMix, with torchvision's operations and defaults."""
    operations: int = 2
    """randaugment: how many operations follow each other."""
    magnitude: int = 9
    """randaugment: their strength, 0 to 30."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Most change of brightness, contrast, saturation and hue (torchvision's ColorJitter)."""
    erase: float = 0.0
    """Probability that a random rectangle is erased."""
    mixup: float = 0.0
    """Alpha of mixup with another image of the micro-batch; 0: off. If cutmix is on too, each is
    applied half of the time. An image that is alone in its micro-batch is not mixed."""
    cutmix: float = 0.0
    """Alpha of cutmix with another image of the micro-batch; 0: off."""
    repeats: int = 1
    """Each image comes so many times an epoch, augmented differently, decoded once."""

    def __post_init__(self) -> None:
        at_least(0, "augment", self, "mixup", "cutmix")
        at_least(1, "augment", self, "operations", "repeats")
        magnitude_ok = 0 <= self.magnitude <= 30
        require(magnitude_ok, "augment.magnitude", self.magnitude, "must be 0 to 30")
        require(0 <= self.erase <= 1, "augment.erase", self.erase, "must be a probability, 0 to 1")
        low, high = self.scale
        require(0 < low <= high <= 1, "augment.scale", self.scale, "must be 0 < from <= to <= 1")
        require(min(self.jitter) >= 0, "augment.jitter", self.jitter, "each must be 0 or more")
        hue = self.jitter[3]
        require(hue <= 0.5, "augment.jitter", self.jitter, "hue, the last, must be 0.5 or less")
