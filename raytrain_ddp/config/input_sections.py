"""The sections of a config that say what goes into the model: the data and their augmentation.

Imports nothing heavy, like sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.config.validation import FREE, MAY_BE_EMPTY

TORCHVISION_ROOT = "data"


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Where the images come from, their order, and how they are loaded."""

    source: str = field(default="digits", metadata={"path": "data"})
    """Folder, Parquet, tar, list, or URI. A folder of class folders
    (ImageFolder), or one written by save_to_disk of Hugging Face datasets; Parquet files,
    WebDataset tar files, or lists of images (CSV, TSV, JSON lines), as a file, folder, glob or URI
    (s3://, gs://, hf://; not for tar files); a classification data set of torchvision, such as
    torchvision:CIFAR10, or any of the Hugging Face Hub, such as hf:ylecun/mnist, which are
    downloaded; or digits, which is bundled."""
    eval_source: str | None = field(default=None, metadata={"path": "data"})
    """Data to evaluate on, like source. Default: the validation or test split of source."""
    train_split: str = "auto"
    """Split to train on. auto: train, or all data if there are no named splits; a dot: the folder
    itself, if classes have the names of splits."""
    eval_split: str = "auto"
    """Split to evaluate on, of eval_source if set. auto: validation, else test; none: do not
    evaluate."""
    config: str = "auto"
    """Data set to use from a repository with several: a config of its README.md, or a folder."""
    root: str | None = field(default=None, metadata={**FREE, "path": "folder"})
    """Folder or URI of the images that a list names. Default: the folder of the list. For
    torchvision data sets, the folder to download into; default: data."""
    image_column: str = field(default="image", metadata=MAY_BE_EMPTY)
    """Column with the images: struct<bytes, path> or binary (Parquet), or paths of files. For tar
    files: suffix of the images."""
    label_column: str = field(default="label", metadata=MAY_BE_EMPTY)
    """Column with the labels: integers, strings, or booleans. For tar files: suffix of the labels
    (default: cls), or a field of the JSON files."""
    target_columns: tuple[str, ...] = ()
    """Columns to predict instead of one class. With loss.name = bce, several labels: a column of
    booleans (or 0 and 1) for each, or one column of lists of labels. With mse, l1 or huber:
    columns of numbers."""
    classes: tuple[str, ...] | None = field(default=None, metadata=FREE)  # compared as data
    """Class names, in order. Default: the classes of the training set, sorted. Hidden folders are
    classes only if they are named here."""
    holdout: float = 0.0
    """Fraction of the training set to evaluate on, such as 0.1. The run trains on the rest. The
    fraction is the same for each class. Replaces the evaluation split."""
    holdout_seed: int = 0
    """Random seed that selects the held-out rows. They do not depend on seed."""
    image_size: int = 0
    """Side of the square images, in pixels. 0: as stored; all images must then have the same
    size."""
    start_size: int = 0
    """Side of the training images in the first epoch, in pixels. It grows to image_size in steps of
    32 pixels, over grow_epochs. 0: image_size from the start."""
    grow_epochs: int = 0
    """With start_size: the first epoch with images of image_size, counted from 0."""
    eval_size: int = 0
    """Side of the images in evaluation, in pixels. 0: same as image_size."""
    eval_crop: float = 0.875
    """Share of the shorter side that evaluation keeps, in the center, such as 224 of 256 pixels."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized, with antialiasing."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each channel (RGB, scale 0 to 1), subtracted on the device."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel (RGB, scale 0 to 1)."""
    exif_orientation: bool = False
    """Rotate images as their EXIF tag says. torchvision does not."""
    jpeg_scaling: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if that leaves twice the pixels needed."""
    shuffle: Literal["auto", "full", "block"] = "auto"
    """Order of the samples. full: any row may follow any other; block: blocks (Parquet row groups)
    are permuted, then the rows within windows of blocks; auto: block for Parquet files with more
    than 512 MiB of images."""
    shuffle_window: int | Literal["auto"] = "auto"
    """Blocks per window of the block shuffle. auto: as many as take 64 MiB, 1 to 16."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be decoded. error: end the run (exit status 4); skip:
    leave it out."""
    max_bad: int = field(default=100, metadata=FREE)
    """With bad_records = skip: number of bad records that an epoch may have."""
    memory_mib: int = field(default=1024, metadata=FREE)
    """Memory limit for row groups of Parquet files, in MiB per worker. Evaluation may use as much
    again."""
    workers: int | Literal["auto"] = field(default="auto", metadata=FREE)
    """Loader threads per training worker, or processes for your own data sets. 0: load in the
    training thread. auto: add more while training waits for data, up to the CPUs of the worker."""
    prefetch: int = field(default=4, metadata=FREE)
    """Micro-batches prepared ahead per loader thread or process."""
    prefetch_mib: int = field(default=1024, metadata=FREE)
    """Memory limit for micro-batches prepared ahead, in MiB per worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("eval_crop", 0 < self.eval_crop <= 1, "must be above 0 and at most 1")
        sizes = ("image_size", "start_size", "grow_epochs", "eval_size")
        self.at_least(0, *sizes, "max_bad", "workers")
        self.at_most(2**14, *sizes, "workers")
        self.at_least(1, "prefetch", "prefetch_mib", "memory_mib", "shuffle_window")
        rule = f"must be below data.image_size = {self.image_size}"
        self.require("start_size", not self.start_size or self.start_size < self.image_size, rule)
        rule = f"set both, or neither, of this and data.start_size = {self.start_size}"
        self.require("grow_epochs", bool(self.grow_epochs) == bool(self.start_size), rule)
        rule = "each value must be {} 1: divide values on the scale 0 to 255 by 255"
        self.require("mean", all(0 <= mean <= 1 for mean in self.mean), rule.format("0 to"))
        self.require(
            "std", all(0 < std <= 1 for std in self.std), rule.format("above 0 and at most")
        )
        rule = (
            "must be a folder, Parquet files, a list of images, 'torchvision:NAME', 'hf:NAME' or "
            "'digits'"
        )
        self.require("source", self.source, rule)
        for name in ("train_split", "eval_split", "config"):
            self.require(name, getattr(self, name), "must be a name, or auto")
        columns = self.target_columns
        self.require("target_columns", len({*columns}) == len(columns), "must be different columns")
        self._require_classes()
        self._require_holdout()

    @property
    def may_skip(self) -> bool:
        """Whether bad records are left out."""
        return self.bad_records == "skip"

    def _require_classes(self) -> None:
        rule = "must have 2 or more names, all different"
        classes = self.classes
        ok = classes is None or (len(classes) >= 2 and len(set(classes)) == len(classes))
        self.require("classes", ok, rule)

    def _require_holdout(self) -> None:
        self.below_one("holdout")
        self.at_least(0, "holdout_seed")
        rule = "already provides the evaluation data: set it to 0, or remove data.{} = {!r}"
        for name, unset in (("eval_source", (None,)), ("eval_split", ("auto", "none"))):
            given = getattr(self, name)
            ok = not self.holdout or given in unset
            self.require("holdout", ok, rule.format(name, given))


@dataclass(frozen=True)
class AugmentConfig(Section, name="augment"):
    """Augmentation of training images. The random numbers depend on (seed, epoch, row, repeat), or
    on (seed, step, slot) where images are mixed."""

    crop: Literal["none", "shift", "random"] = "shift"
    """How images are cropped. shift: pad by an eighth of the width and crop back; random: random
    resized crop."""
    scale: tuple[float, float] = (0.08, 1.0)
    """With crop = random: smallest and largest area of a crop, as a fraction of the image."""
    flip: bool = False
    """Flip half of the images left to right."""
    policy: Literal["none", "randaugment", "trivial", "augmix"] = "none"
    """RandAugment, TrivialAugmentWide, or AugMix, with torchvision's operations and defaults."""
    operations: int = 2
    """randaugment: number of operations per image."""
    magnitude: int = 9
    """randaugment: strength of the operations, 0 to 30."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Maximum change of brightness, contrast, saturation, and hue (torchvision's ColorJitter)."""
    erase: float = 0.0
    """Probability that a random rectangle is erased."""
    mixup: float = 0.0
    """Alpha of mixup with another image of the micro-batch. 0: off. If cutmix is on too, each is
    applied half of the time. An image that is alone in its micro-batch is not mixed."""
    cutmix: float = 0.0
    """Alpha of CutMix with another image of the micro-batch. 0: off."""
    repeats: int = 1
    """Number of times that each image is used per epoch (repeated augmentation). It is decoded once
    and augmented differently each time."""
    spread_repeats: bool = False
    """Put the repeats of an image into different micro-batches of a step, like torchvision's
    RASampler. An epoch is then as long as without repeats, and uses one in `repeats` images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "mixup", "cutmix")
        self.at_least(1, "operations", "repeats")
        self.require("magnitude", 0 <= self.magnitude <= 30, "must be 0 to 30")
        self.require("erase", 0 <= self.erase <= 1, "must be a probability, 0 to 1")
        low, high = self.scale
        self.require("scale", 0 < low <= high <= 1, "must be 0 < from <= to <= 1")
        *factors, hue = self.jitter
        rule = "must be 0 to 2, such as 0.4 for 40%, and hue, the last value, 0 to 0.5"
        self.require("jitter", all(0 <= f <= 2 for f in factors) and 0 <= hue <= 0.5, rule)
