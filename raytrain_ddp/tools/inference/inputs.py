"""What a model is used on: images by path or URI, tables of images, or the data of its run."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from raytrain_ddp.data.discovery.file_listing import counted
from raytrain_ddp.data.discovery.store_listing import list_in_store
from raytrain_ddp.data.formats.image_folder import (
    LEFT_OUT,
    content_of,
    files_below,
    is_image,
    stats_of,
)
from raytrain_ddp.data.formats.labels import were_numbers
from raytrain_ddp.data.formats.shard import read_file, with_retries
from raytrain_ddp.data.formats.shard_formats import format_of
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.holdout import HoldoutPart
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.data.splits import ImageSource, open_evaluation, open_splits
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.task_check import eval_data_of
from raytrain_ddp.uri import open_uri, reason_of, without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.pixels.image_batches import OnBad
    from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_ROWS_PER_BLOCK = 256
TARGET = "target"  # a column of lists, with a number for each of the targets

Columns = dict[str, list[Any]]


class GivenImages:
    """A source of (encoded image or PIL image, 0); there are no labels.

    Args:
        images: each a path, a URI, encoded bytes, a PIL image, or a uint8 array of (height, width),
            (height, width, 3) or (height, width, 4).
    """

    class_names: list[str] = []  # noqa: RUF012  (part of ImageSource; there are none)

    def __init__(self, images: Sequence[Any]) -> None:
        self._images = images
        self.blocks = runs_of(len(images), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[Any, int]]:
        return [(_opened(self._images[row]), 0) for row in rows.tolist()]

    def labels(self) -> Rows:
        return np.zeros(len(self._images), np.int64)

    def where(self, row: int) -> str:
        image = self._images[row]
        named = isinstance(image, str | os.PathLike)
        return without_secrets(os.fspath(image)) if named else f"image {row}"

    def fingerprint(self) -> str:
        """Of the paths, and the sizes and modification times of local files."""
        paths = [self.where(row) for row in range(len(self._images))]
        digest = sha256()
        for path, seen in zip(paths, stats_of(paths), strict=True):
            of_file = None if isinstance(seen, OSError) else (seen.st_size, seen.st_mtime_ns)
            digest.update(f"{path} {of_file}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def _opened(image: Any) -> Any:
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        if "://" in path:
            return _in_store(path)
        exists = "\0" not in path and os.path.exists(path)
        return content_of(path) if exists else BadRecord("no such file")
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, Image.Image) and all(image.size):
        return image
    array = np.asarray(image)
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not fits or not array.size:
        found = f"an array of {array.dtype} {array.shape}"
        return BadRecord(f"{found}; expected uint8 (height, width, 3)")
    return Image.fromarray(array)


def _in_store(uri: str) -> bytes | BadRecord:
    def ask() -> bytes:
        fs, path = open_uri(uri)
        return read_file(fs, path)

    outcome = with_retries(ask, is_local=False)
    if isinstance(outcome, FileNotFoundError):
        return BadRecord("no such file")
    if isinstance(outcome, Exception):
        raise DataError(f"{without_secrets(uri)}: cannot be read: {reason_of(uri, outcome)}.")
    return outcome


@dataclass(frozen=True)
class Input:
    """The rows to predict.

    Args:
        data: batches of them; rows of bad records are omitted.
        places: columns that say which rows these are, and their labels if they are known.
        notes: sentences about files that are not used.
    """

    data: Data
    places: Callable[[Sequence[int]], Columns]
    notes: Sequence[str] = ()


def open_input(
    words: Sequence[str],
    model: LoadedModel,
    on_bad: OnBad,
    image_column: str | None = None,
    image_size: int = 0,
) -> Input:
    """The rows that the words of a command line name; without any, the run's evaluation data.

    Args:
        on_bad: see `image_data`.
        image_column: of tables. Default: that of the run.
        image_size: of the model's input. Default: that of the evaluation, or, if images are used
            as they are stored, that of the training images.

    Raises:
        DataError: there is nothing, or nothing that can be read.
        ConfigError: the task has only its own data, a table is named beside images, or an
            image column for images.
    """
    if not words:
        return _own(model, on_bad, image_size)
    if not model.takes_images:
        raise ConfigError(
            f"task = {model.config.task!r} predicts its own evaluation data only: give no INPUT."
        )
    images, tables, notes = _files(words)
    size = image_size or model.image_size
    if images:
        if image_column is not None:
            raise ConfigError("--image-column has no effect, as INPUT is images: remove it.")
        given = GivenImages(images)
        data = model.data_of(given, on_bad, size)
        return Input(data, lambda rows: {"path": [*map(given.where, rows)]}, notes)
    config = replace(model.config.data, bad_records="skip", target_columns=(), root=None)
    if image_column is not None:
        config = replace(config, image_column=image_column)
    table = ShardImages(tables, config, labeled=False)
    return Input(model.data_of(table, on_bad, size), _places_of(table), notes)


def _places_of(table: ShardImages) -> Callable[[Sequence[int]], Columns]:
    paths = table.paths()

    def places(rows: Sequence[int]) -> Columns:
        files, numbers = zip(*map(table.place, rows), strict=True)
        own = {"path": [paths[row] for row in rows]} if paths else {}
        return {**own, "file": [*files], "row": [*numbers]}

    return places


def _own(model: LoadedModel, on_bad: OnBad, image_size: int) -> Input:
    """The evaluation data of the run, with their labels where they are known."""
    if not model.takes_images:
        data = eval_data_of(model.task, model.config.seed)
        if data is None:
            raise ConfigError("the task has no evaluation data.")
        return Input(data, lambda rows: {"row": [*rows]})
    source = _evaluation(model)
    whole = source.whole if isinstance(source, HoldoutPart) else source
    of_table = _places_of(whole) if isinstance(whole, ShardImages) else None
    files, labels = getattr(whole, "files", None), source.labels().tolist()

    def places(rows: Sequence[int]) -> Columns:
        theirs = [*rows]
        if isinstance(source, HoldoutPart):
            theirs = source.rows_of_whole(rows).tolist()
        named = of_table(theirs) if of_table else {"row": theirs}
        if files:
            named["path"] = [files[row][0] for row in theirs]
        if model.config.data.target_columns:
            return {**named, TARGET: [labels[row] for row in rows]}
        return {**named, "label": [model.class_names[labels[row]] for row in rows]}

    return Input(model.data_of(source, on_bad, image_size), places)


def _evaluation(model: LoadedModel) -> ImageSource:
    """The evaluation data of the run; its training data need not be there if these are others."""
    config, binary = model.config.data, model.config.loss.name == "bce"
    if config.eval_source is not None and not config.holdout:
        return open_evaluation(config, model.class_names, binary)
    splits = open_splits(config, binary=binary)
    if splits.eval is None:
        raise ConfigError("the run has no evaluation data: give INPUT.")
    names = splits.class_names
    if names != model.class_names and not were_numbers(model.class_names, names):
        raise DataError("the data of the run have other classes now: give INPUT.")
    return splits.eval


def _files(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The images and the tables that the words name, and notes about other files."""
    found: dict[str, str] = {}  # by absolute path
    left_out: list[str] = []
    named = {_place(word) for word in words}  # files by their own names may be of any kind
    repeated = 0
    for place in map(_place, words):
        own = _listed(place, left_out)
        if not any(name in named or is_image(name) or format_of(name) for name in own):
            shown = without_secrets(place)
            raise DataError(f"{shown}: contains no images and no tables of images.")
        full = {name if "://" in name else os.path.abspath(name): name for name in own}
        repeated += len(full.keys() & found)
        found |= full
    tables = [name for name in found.values() if format_of(name)]
    images = [n for n in found.values() if is_image(n) or (n in named and n not in tables)]
    if images and not named.isdisjoint(tables):
        raise ConfigError("INPUT is images and tables: predict them separately.")
    others = sorted({*found.values()} - {*images, *tables})
    unused = {"not images": others, LEFT_OUT: left_out}
    if images:
        unused["tables next to the images"] = tables
    notes = [f"{note}." for why, names in unused.items() for note in counted(names, why)]
    if repeated:
        notes.append(f"files named again, and used once: {repeated:,}.")
    return images, tables, notes


def _place(word: str) -> str:
    """The path of a local file or folder; URIs are returned as they are."""
    if word.startswith("file://"):
        return open_uri(word)[1]
    return word if "://" in word else os.path.expanduser(word)


def _listed(place: str, left_out: list[str]) -> list[str]:
    """The file, or those in the folders or matches; leftovers are added to `left_out` instead."""
    if "://" in place:
        listing = list_in_store(place, without_secrets(place))
        left_out += listing.left_out
        return [*map(listing.uri_of, listing.files)]
    found = [place] if os.path.exists(place) else sorted(glob.glob(place, recursive=True))
    if not found:
        raise DataError(f"{place}: no such file or folder, and no file matches it.")
    files = []
    for each in found:
        below = [] if os.path.isdir(each) else [each]
        for folder, names, left in files_below(each) if os.path.isdir(each) else ():
            below += [os.path.join(folder, name) for name in names]
            left_out += [os.path.join(folder, name) for name in left]
        files += sorted(below)
    return files
