"""The sections of a config that say what goes into the model: the data and their augmentation.

Imports nothing heavy, like sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ddp.config.field_types import Section, setting

TORCHVISION_ROOT = "data"
_MOST = 2**14  # far more is a slip, and would take all memory
_SCALE = "each value must be {} 1: divide values on the scale 0 to 255 by 255"
_MEAN = (lambda each: all(0 <= mean <= 1 for mean in each), _SCALE.format("0 to"))
_STD = (lambda each: all(0 < std <= 1 for std in each), _SCALE.format("above 0 and at most"))
_DIFFERENT = (lambda names: len({*names}) == len(names), "must be different columns")
_CLASSES = (
    lambda names: len({*names}) == len(names) >= 2,
    "must have 2 or more names, all different",
)
_RANGE = (lambda ends: ends[0] <= ends[1], "must be 0 < from <= to <= 1")
_JITTER = (
    lambda changes: all(0 <= each <= 2 for each in changes) and changes[3] <= 0.5,
    "must be 0 to 2, such as 0.4 for 40%, and hue, the last value, 0 to 0.5",
)


def _has_paths(config: Any) -> bool:
    return any(source != "digits" for source in _sources(config))


def _has_columns(config: Any) -> bool:
    return not all(source.startswith("torchvision:") for source in _sources(config))


def _sources(config: Any) -> list[str]:
    return [config.data.source, *filter(None, [config.data.eval_source])]


_PATHS = ("data.source = torchvision:NAME, or paths of images", _has_paths)
_COLUMNS = ("Parquet files or lists of images", _has_columns)
_LABELS = (
    "Parquet files or lists of images, and no data.target_columns",
    lambda c: _has_columns(c) and not c.data.target_columns,
)
_REPEATED = ("augment.repeats above 1", lambda c: c.augment.repeats > 1)


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Where the images come from, their order, and how they are loaded."""

    source: str = setting(
        "digits", path="data", aka="data dataset data-dir data-path train-dir train-data"
    )
    """Folder, Parquet, tar, list, or URI. A folder of class folders
    (ImageFolder), or one written by save_to_disk of Hugging Face datasets; Parquet files,
    WebDataset tar files, or lists of images (CSV, TSV, JSON lines), as a file, folder, glob or URI
    (s3://, gs://, hf://; not for tar files); a classification data set of torchvision, such as
    torchvision:CIFAR10, or any of the Hugging Face Hub, such as hf:ylecun/mnist, which are
    downloaded; or digits, which is bundled."""
    eval_source: str | None = setting(
        None, path="data", aka="val-dir eval-dir val-data eval-data test-data"
    )
    """Data to evaluate on, like source. Default: the validation or test split of source."""
    train_split: str = "auto"
    """Split to train on. auto: train, or all data if there are no named splits; a dot: the folder
    itself, if classes have the names of splits."""
    eval_split: str = "auto"
    """Split to evaluate on, of eval_source if set. auto: validation, else test; none: do not
    evaluate."""
    config: str = "auto"
    """Data set to use from a repository with several: a config of its README.md."""
    root: str | None = setting(None, free=True, path="folder", images=_PATHS)
    """Folder or URI of the images that a list names. Default: the folder of the list. For
    torchvision data sets, the folder to download into; default: data."""
    image_column: str = setting("image", may_be_empty=True, images=_COLUMNS)
    """Column with the images: struct<bytes, path> or binary (Parquet), or paths of files. For tar
    files: suffix of the images."""
    label_column: str = setting("label", may_be_empty=True, images=_LABELS)
    """Column with the labels: integers, strings, or booleans. For tar files: suffix of the labels
    (default: cls), or a field of the JSON files."""
    target_columns: tuple[str, ...] = setting((), check=_DIFFERENT)
    """Columns to predict instead of one class. With loss.name = bce, several labels: a column of
    booleans (or 0 and 1) for each, or one column of lists of labels. With mse, l1 or huber:
    columns of numbers."""
    classes: tuple[str, ...] | None = setting(None, free=True, check=_CLASSES)
    """Class names, in order. Default: the classes of the training set, sorted. Hidden folders are
    classes only if they are named here."""
    holdout: float = setting(0.0, least=0, below=1, aka="val-fraction test-size")
    """Fraction of the training set to evaluate on, such as 0.1. The run trains on the rest. The
    fraction is the same for each class. Replaces the evaluation split."""
    holdout_seed: int = setting(0, least=0, needs="data.holdout above 0")
    """Random seed that selects the held-out rows. They do not depend on seed."""
    image_size: int = setting(0, least=0, most=_MOST, aka="imgsz input-size crop-size resolution")
    """Side of the square images, in pixels. 0: as stored; all images must then have the same
    size."""
    start_size: int = setting(0, least=0, most=_MOST)
    """Side of the training images in the first epoch, in pixels. It grows to image_size in steps of
    32 pixels, over grow_epochs. 0: image_size from the start."""
    grow_epochs: int = setting(0, least=0, most=_MOST)
    """With start_size: the first epoch with images of image_size, counted from 0."""
    eval_size: int = setting(0, least=0, most=_MOST)
    """Side of the images in evaluation, in pixels. 0: same as image_size."""
    eval_crop: float = setting(0.875, above=0, most=1, images="data.image_size or data.eval_size")
    """Share of the shorter side that evaluation keeps, in the center, such as 224 of 256 pixels."""
    interpolation: Literal["bilinear", "bicubic"] = setting(
        "bilinear", images="data.image_size or data.eval_size or augment.crop = random"
    )
    """How images are resized, with antialiasing."""
    mean: tuple[float, float, float] = setting((0.485, 0.456, 0.406), check=_MEAN)
    """Mean of each channel (RGB, scale 0 to 1), subtracted on the device."""
    std: tuple[float, float, float] = setting((0.229, 0.224, 0.225), check=_STD)
    """Standard deviation of each channel (RGB, scale 0 to 1)."""
    exif_orientation: bool = False
    """Rotate images as their EXIF tag says. torchvision does not."""
    jpeg_scaling: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if that leaves twice the pixels needed."""
    shuffle: Literal["auto", "full", "block"] = setting("auto", of_loop=True)
    """Order of the samples. full: any row may follow any other; block: blocks (Parquet row groups)
    are permuted, then the rows within windows of blocks; auto: block for Parquet files with more
    than 512 MiB of images."""
    shuffle_window: int | Literal["auto"] = setting(
        "auto", least=1, needs="data.shuffle = block or data.shuffle = auto", of_loop=True
    )
    """Blocks per window of the block shuffle. auto: as many as take 64 MiB, 1 to 16."""
    bad_records: Literal["error", "skip"] = setting("error", of_loop=True)
    """What to do with an image that cannot be decoded. error: end the run (exit status 4); skip:
    leave it out."""
    max_bad: int = setting(100, free=True, least=0, needs="data.bad_records = skip", of_loop=True)
    """With bad_records = skip: number of bad records that an epoch may have."""
    memory_mib: int = setting(1024, free=True, least=1, images=_COLUMNS)
    """Memory limit for row groups of Parquet files, in MiB per worker. Evaluation may use as much
    again."""
    workers: int | Literal["auto"] = setting(
        "auto",
        free=True,
        least=0,
        most=_MOST,
        of_loop=True,
        aka="loader-workers dataloader-num-workers",
    )
    """Loader threads per training worker, or processes for your own data sets. 0: load in the
    training thread. auto: as many as the worker has CPUs."""
    prefetch: int = setting(4, free=True, least=1, needs="data.workers above 0", of_loop=True)
    """Micro-batches prepared ahead per loader thread or process."""
    prefetch_mib: int = setting(
        1024, free=True, least=1, needs="data.workers above 0", of_loop=True
    )
    """Memory limit for micro-batches prepared ahead, in MiB per worker."""

    @property
    def may_skip(self) -> bool:
        """Whether bad records are left out."""
        return self.bad_records == "skip"


@dataclass(frozen=True)
class AugmentConfig(Section, name="augment"):
    """Augmentation of training images. The random numbers depend on (seed, epoch, row, repeat), or
    on (seed, step, slot) where images are mixed."""

    crop: Literal["none", "shift", "random"] = "shift"
    """How images are cropped. shift: pad by an eighth of the width and crop back; random: random
    resized crop."""
    scale: tuple[float, float] = setting(
        (0.08, 1.0), above=0, most=1, check=_RANGE, images="augment.crop = random"
    )
    """With crop = random: smallest and largest area of a crop, as a fraction of the image."""
    flip: bool = False
    """Flip half of the images left to right."""
    policy: Literal["none", "randaugment", "trivial", "augmix"] = setting(
        "none", aka="auto-augment autoaugment aa"
    )
    """RandAugment, TrivialAugmentWide, or AugMix, with torchvision's operations and defaults."""
    operations: int = setting(2, least=1, images="augment.policy = randaugment")
    """randaugment: number of operations per image."""
    magnitude: int = setting(9, least=0, most=30, images="augment.policy = randaugment")
    """randaugment: strength of the operations, 0 to 30."""
    jitter: tuple[float, float, float, float] = setting((0.0, 0.0, 0.0, 0.0), check=_JITTER)
    """Maximum change of brightness, contrast, saturation, and hue (torchvision's ColorJitter)."""
    erase: float = setting(0.0, least=0, most=1)
    """Probability that a random rectangle is erased."""
    mixup: float = setting(0.0, least=0)
    """Alpha of mixup with another image of the micro-batch. 0: off. If cutmix is on too, each is
    applied half of the time. An image that is alone in its micro-batch is not mixed."""
    cutmix: float = setting(0.0, least=0)
    """Alpha of CutMix with another image of the micro-batch. 0: off."""
    repeats: int = setting(1, least=1, of_loop=True)
    """Number of times that each image is used per epoch (repeated augmentation). It is decoded once
    and augmented differently each time."""
    spread_repeats: bool = setting(False, needs=_REPEATED, of_loop=True)
    """Put the repeats of an image into different micro-batches of a step, like torchvision's
    RASampler. An epoch is then as long as without repeats, and uses one in `repeats` images."""
