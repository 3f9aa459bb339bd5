"""Opens the splits of a run with one list of classes, and describes them. Imports torch only for
torchvision data sets."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np

from raytrain_ddp.config.sections import TORCHVISION_ROOT, DataConfig
from raytrain_ddp.data.discovery.data_check import Found, Located, locate, locate_evaluation
from raytrain_ddp.data.discovery.file_listing import EXTENSIONS, counted, is_image, list_on_disk
from raytrain_ddp.data.formats.labels import (
    NoLabelsError,
    UnknownClassError,
    distinct_names,
    normalized,
    numbers_in,
)
from raytrain_ddp.data.formats.shard import content_of, sizes_of
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order import RowMask, Rows, hash64, mix64, runs_of
from raytrain_ddp.errors import DataError
from raytrain_ddp.events import DataSummary, SplitSummary

Predicted = Literal["classes", "labels", "targets"]
Counted = tuple[Sequence[Rows | None], list[str]]
"""The rows of each class of both splits, and notes about images that lists name more than once."""

_NAMES_SHOWN = 5
_ROWS_PER_BLOCK = 256
_COUNTED_WITHIN_S = 20.0  # runs while the model is prepared; no long waits for slow storage
_STREAM = 0x5EED_0007  # separates the random bits of the held-out rows from other uses
_NO_EVALUATION = (
    "the run is not evaluated because there is no evaluation split: set --data.holdout 0.1 to hold "
    "out a part of the training set, or set --data.eval-source."
)


@dataclass
class Splits:
    """The data of a run.

    Args:
        eval_from: where the evaluation split comes from; "" without one.
        notes: sentences about data that is not used, and other remarks.
        predicted: what `class_names` are.
    """

    train: ImageSource
    eval: ImageSource | None
    eval_from: str
    notes: tuple[str, ...]
    predicted: Predicted = "classes"
    _counts: Future[Counted] | None = None
    _began: float = 0.0

    @property
    def class_names(self) -> list[str]:
        return self.train.class_names

    def begin_counting(self) -> None:
        """Starts reading the labels in a thread; `summary` includes the counts if they are
        available by then."""
        if self._counts is None:
            self._began, self._counts = time.monotonic(), Future()
            Thread(target=self._count, args=(self._counts,), name="counting", daemon=True).start()

    def summary(self) -> DataSummary:
        """The input of `format_data`: rows and classes of both splits, their origin, notes.

        Raises:
            DataError: a label that has been read is not a class.
        """
        self.begin_counting()
        assert self._counts is not None
        left_s = self._began + _COUNTED_WITHIN_S - time.monotonic()
        done, _ = wait([self._counts], max(0.0, left_s))
        (of_train, of_eval), repeated = self._counts.result() if done else ((None, None), [])
        return DataSummary(
            train=self._summary_of(self.train, of_train),
            eval=self._summary_of(self.eval, of_eval, self.eval_from) if self.eval else None,
            classes=len(self.class_names),
            names=self.class_names[:_NAMES_SHOWN],
            notes=[*self.notes, *repeated],
            predicted=self.predicted,
        )

    def _count(self, result: Future[Counted]) -> None:
        try:
            sources = (self.train, self.eval)
            paths: list[Any] = [source.paths() if source else [] for source in sources]
            result.set_result(([*map(self._rows_of_class, sources)], [*_repeated(*paths)]))
        except Exception as error:
            result.set_exception(error)

    def _rows_of_class(self, source: ImageSource | None) -> Rows | None:
        labels = source.labels() if source is not None else None  # all are checked
        if labels is None or self.predicted == "targets":
            return None
        if self.predicted == "labels":
            return np.array(labels.sum(0, dtype=np.int64))
        return np.bincount(labels, minlength=len(self.class_names))

    def _summary_of(
        self, source: ImageSource, counts: Rows | None, origin: str = ""
    ) -> SplitSummary:
        rows = int(source.blocks.sum())
        if counts is None:
            return SplitSummary(rows, origin)
        few, many = (
            (self.class_names[at], int(counts[at])) for at in (counts.argmin(), counts.argmax())
        )
        return SplitSummary(rows, origin, few, many, int((counts == 0).sum()))

    def close(self) -> None:
        """Ends the read-ahead threads; the sources remain usable."""
        for source in (self.train, self.eval):
            if source is not None:
                source.close()


def open_splits(config: DataConfig, found: Found | None = None, binary: bool = False) -> Splits:
    """Opens the data that `config` refers to, or that was already `found`.

    Args:
        binary: the targets are labels, which a row has or does not have.

    The classes are `config.classes` if set, or else those of the training set.

    Raises:
        ConfigError: there is no such data set.
        DataError: data is missing, damaged or has the wrong format, there is only one class, or the
            evaluation set has a class that the training set lacks.
        PreflightError: an object store does not respond.
    """
    if config.holdout:  # replaces the evaluation split
        found = locate(replace(config, eval_split="none"))
    found = found or locate(config)
    try:
        train: ImageSource = open_images(found.train, config, config.classes, binary)
    except UnknownClassError as error:
        raise DataError(
            f"{error} The classes of the run are those of data.classes: correct or remove it."
        ) from None
    classes = train.class_names
    targets: Predicted = "labels" if binary else "targets"
    predicted: Predicted = targets if config.target_columns else "classes"
    if len(classes) < 2 and predicted != "targets":
        unread = "".join(f" ({note[:-1]})." for note in found.notes if note[:8] == "not used")
        raise DataError(
            f"data.source has only {f'one class, {classes[0]!r}' if classes else 'empty lists'}: "
            f"it must have folders or labels for at least 2 classes.{unread}"
        )
    notes = [*found.notes, *notes_of(train, "the training set")]
    notes += [f"data.{name} {why}" for name, why in unused_fields(train, config)]
    if config.holdout:
        rest, part = _parts_of(train, config)
        origin = f"{config.holdout:.3g} of the training set (data.holdout)"
        return Splits(rest, part, origin, tuple(notes), predicted)
    evaluation: ImageSource | None = None
    try:
        if found.eval is not None:
            evaluation = open_images(found.eval, config, classes, binary)
    except NoLabelsError as error:
        if config.eval_source is not None or config.eval_split != "auto":
            raise
        notes.append(f"not used for evaluation: {error}")
    if evaluation is None:
        notes += [_NO_EVALUATION] * (config.eval_split != "none")
        return Splits(train, None, "", tuple(notes), predicted)
    eval_from, split = found.eval_from, evaluation.split
    if split and found.eval and not found.eval.name:  # torchvision sets choose it when opened
        eval_from = f"the {split} split of {eval_from}"
        notes += [f"the run is evaluated on {eval_from} only."] * (split != "test")
    notes += notes_of(evaluation, "the evaluation set")
    return Splits(train, evaluation, eval_from, tuple(notes), predicted)


def open_evaluation(config: DataConfig, classes: Sequence[str], binary: bool) -> ImageSource:
    """Opens `config.eval_source` with the classes that a model knows.

    Args:
        binary: see `open_splits`.

    Raises:
        ConfigError, DataError, PreflightError: like `open_splits`.
    """
    is_column_each = bool(config.target_columns) and (
        len(config.target_columns) > 1 or len(classes) == 1
    )  # which may have other names; else, it is one column with lists of the labels
    known = None if is_column_each else classes
    return open_images(locate_evaluation(config), config, known, binary)


def open_images(
    found: Located,
    config: DataConfig,
    classes: Sequence[str] | None = None,
    binary: bool = False,
) -> ImageSource:
    """The source that `locate` found.

    Args:
        classes: the class names to map labels to. Default: the source's own.
        binary: see `open_splits`.
    """
    classes = None if classes is None else [normalized(name) for name in classes]
    if found.kind == "files":
        column, *_ = *config.target_columns, config.label_column
        return ShardImages(found.paths, config, classes, binary, found.class_names.get(column))
    if config.target_columns:
        raise DataError(
            f"data.{'source' if found.split == 'train' else 'eval_source'} has no columns, but "
            "data.target_columns is set: give Parquet files, or a list of the images (CSV, TSV, "
            "JSON lines)."
        )
    if found.kind == "folder":
        return FolderImages(found.paths[0], classes)
    from raytrain_ddp.data.torchvision_datasets import TorchvisionImages

    train, root = found.split == "train", Path(config.root or TORCHVISION_ROOT)
    whole = config.holdout > 0
    return TorchvisionImages(found.paths[0], root, train, classes, whole, found.name)


def unused_fields(
    source: ImageSource, config: DataConfig, what: str = "the training set"
) -> Iterator[tuple[str, str]]:
    """The fields that say how these data are read and do not apply to them, each with why."""
    for name in () if isinstance(source, ShardImages) else ("image_column", "label_column"):
        if getattr(config, name) != getattr(DataConfig, name):
            yield name, f"is not used for {what}, which has no columns."
    if config.root not in (None, TORCHVISION_ROOT) and not source.uses_root:
        yield "root", f"is not used for {what}, which is not a list of images."


def _repeated(train: Sequence[str], evaluation: Sequence[str]) -> Iterator[str]:
    """Notes about images that lists name more than once."""
    sets = [
        [p if "://" in p else os.path.normpath(p) for p in each] for each in (train, evaluation)
    ]
    for paths, what in zip(sets, ("training", "evaluation"), strict=True):
        if more := len(paths) - len({*paths}):
            rows = "1 row repeats" if more == 1 else f"{more:,} rows repeat"
            yield f"{rows} the image of another row of the {what} set."
    if both := len({*sets[0]} & {*sets[1]}):
        images = "1 image is" if both == 1 else f"{both:,} images are"
        yield f"{images} in both the training set and the evaluation set."


def notes_of(source: ImageSource, what: str) -> list[str]:
    """Notes about files that are not used and labels that are mapped."""
    why = f"members of {what}: hidden, left by a system, not files, dead links, or without a suffix"
    notes = [f"{note}." for note in counted(source.left_out, why)]
    if source.mapped:
        notes.append(f"the labels of {what} are {source.mapped}.")
    return notes


class FolderImages(ImageSource):
    """Rows of (encoded image, label) from the files below one folder per class, in the order of
    torchvision's ImageFolder.

    A file that cannot be read (a broken link, no permission) is a `BadRecord`.

    Args:
        root: its folders are the classes, in alphabetical order, with images at any depth.
        classes: class names, which must include those of the folders. Default: those of the
            folders.

    Raises:
        NoLabelsError: there are images, but no class folders.
        DataError: there are no class folders, one of them has no images or is not a known class, or
            a folder cannot be read.
    """

    def __init__(self, root: str, classes: Sequence[str] | None = None) -> None:
        self._root = root
        listing = list_on_disk(root, root, classes or (), every=True)
        found: dict[str, list[str]] = {name: [] for name in listing.folders if "/" not in name}
        outside = 0
        for name in sorted(listing.files, key=os.path.split):
            top, below, _ = name.partition("/")
            path = os.path.join(root, name)
            if below and is_image(name):
                found[top].append(path)
            elif not below and not os.path.exists(path):  # its target may have been a class folder
                raise DataError(f"{path}: a broken link: repair or remove it.")
            outside += not below and is_image(name)
        if not found and outside:
            raise NoLabelsError(
                f"{root}: {outside} images, but no class folders: create one folder per class."
            )
        if not found:
            raise DataError(f"{root}: contains no class folders.")
        own = distinct_names(found, root)
        self.class_names = own if classes is None else list(classes)
        self.files: list[tuple[str, int]] = []
        for label, name in zip(numbers_in(self.class_names, own, root), found, strict=True):
            if not found[name]:
                raise DataError(
                    f"{root}/{name}: a class folder without images ({', '.join(EXTENSIONS)}): add "
                    "images or remove it."
                )
            self.files += [(path, label) for path in found[name]]
        self.blocks = runs_of(len(self.files), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[bytes | BadRecord, int]]:
        return [(content_of(path), label) for path, label in (self.files[r] for r in rows.tolist())]

    def labels(self) -> Rows:
        return np.array([label for _, label in self.files], np.int64)

    def fingerprint(self) -> str:
        """The fingerprint of names relative to the root, labels and sizes."""
        digest, sizes = sha256(), sizes_of([path for path, _ in self.files])
        for (path, label), size in zip(self.files, sizes, strict=True):
            line = f"{os.path.relpath(path, self._root)} {label} {size}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def where(self, row: int) -> str:
        return self.files[row][0]


# ------------------------------------------------------------------ --data.holdout


def _parts_of(train: ImageSource, config: DataConfig) -> tuple[HoldoutPart, HoldoutPart]:
    """The training set without the part that is held out, and that part."""
    labels = train.labels()
    strata = labels if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    held = held_out(strata, config.holdout, config.holdout_seed)
    kept = np.delete(np.arange(len(labels), dtype=np.int64), held)
    identity = f"{config.holdout!r} {config.holdout_seed}"
    return (
        HoldoutPart(train, kept, f"without {identity}"),
        HoldoutPart(train, held, f"only {identity}"),
    )


def held_out(labels: Rows, fraction: float, seed: int) -> Rows:
    """The rows to evaluate on, ascending, shape (held,): the given fraction of all rows and, up to
    rounding, of each class; each class keeps at least one row for training.

    Depends only on its arguments, with the same result in every NumPy version.

    Args:
        labels: the class of each row, shape (rows,).

    Raises:
        DataError: there are too few rows.
    """
    rows_of_class = np.bincount(labels)
    counts = _shares(rows_of_class, fraction, seed)
    if not counts.any():
        raise DataError(
            f"data.holdout = {fraction:g} holds out none of the {len(labels)} rows: each class "
            "keeps at least one row to train on. Increase it, or set it to 0."
        )
    with np.errstate(over="ignore"):
        keys = mix64(np.arange(len(labels), dtype=np.uint64) ^ np.uint64(hash64(seed, _STREAM)))
    order = np.lexsort((keys, labels))  # rows grouped by class, shuffled within each class
    starts = np.cumsum(rows_of_class) - rows_of_class
    place_in_class = np.arange(len(labels)) - np.repeat(starts, rows_of_class)
    return np.sort(order[place_in_class < np.repeat(counts, rows_of_class)]).astype(np.int64)


def _shares(rows_of_class: Rows, fraction: float, seed: int) -> Rows:
    """Rows to hold out per class: rounded down, with the remaining rows assigned to the classes
    with the largest remainders; ties are broken at random."""
    exact = rows_of_class * fraction
    counts: Rows = np.floor(exact).astype(np.int64)
    missing = round(float(fraction * rows_of_class.sum())) - int(counts.sum())
    with np.errstate(over="ignore"):
        ties = mix64(np.arange(len(counts), dtype=np.uint64) ^ np.uint64(hash64(seed, ~_STREAM)))
    remainders = np.round(exact - counts, 9)
    fitting = np.where(counts + 1 < rows_of_class, remainders, -1.0)
    for number in np.lexsort((ties, -fitting))[: max(0, missing)].tolist():
        counts[number] += fitting[number] > 0
    return counts


class HoldoutPart(ImageSource):
    """Some rows of an image source: those held out, or the others.

    Its blocks are those of the source without the other rows.

    Args:
        rows: their numbers in the source, ascending.
        identity: identifies these rows in the fingerprint.
    """

    def __init__(self, source: ImageSource, rows: Rows, identity: str) -> None:
        self._rows, self._identity = rows, identity
        ends = np.searchsorted(rows, np.cumsum(source.blocks))
        counts = np.diff(ends, prepend=0)  # rows in each block of the source
        self.blocks: Rows = counts[counts > 0]
        sizes = source.block_bytes
        self.block_bytes = None if sizes is None else sizes[counts > 0]
        # It keeps a row group until all rows of this part have been read.
        self.whole = source.part(self._used)
        self.class_names = source.class_names
        self.prefers_blocks = source.prefers_blocks

    def _used(self, start: int, stop: int) -> RowMask:
        first, last = np.searchsorted(self._rows, [start, stop])
        used = np.zeros(stop - start, bool)
        used[self._rows[first:last] - start] = True
        return used

    def rows_of_whole(self, rows: Sequence[int]) -> Rows:
        """The rows of `whole` that these rows of this part are."""
        return self._rows[np.array(rows, np.int64)]

    def read(self, rows: Rows) -> Any:
        return self.whole.read(self._rows[rows])

    def ahead(self, rows: Rows) -> None:
        self.whole.ahead(self._rows[rows])

    def close(self) -> None:
        self.whole.close()

    def labels(self) -> Rows:
        labels: Rows = self.whole.labels()
        return labels[self._rows]

    def paths(self) -> list[str]:
        every = self.whole.paths()
        return [every[row] for row in self._rows.tolist()] if every else []

    def fingerprint(self) -> str:
        return sha256(f"{self.whole.fingerprint()} {self._identity}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return self.whole.where(int(self._rows[row]))
