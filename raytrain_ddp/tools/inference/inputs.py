"""The inputs of a model: images by path or URI, tables of images, or the data of its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from raytrain_ddp.data.discovery.file_listing import (
    LEFT_OUT,
    counted,
    is_image,
    list_in_store,
    list_on_disk,
)
from raytrain_ddp.data.formats.file_formats import format_of
from raytrain_ddp.data.formats.labels import were_numbers
from raytrain_ddp.data.formats.shard import (
    content_of,
    read_file,
    sizes_of,
    unless_failed,
    with_retries,
)
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order import Rows, runs_of
from raytrain_ddp.data.splits import FolderImages, HoldoutPart, open_evaluation, open_splits
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.task_check import eval_data_of
from raytrain_ddp.uri import open_uri, without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.pixels.image_batches import OnBad
    from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_ROWS_PER_BLOCK = 256

Column = tuple[str, Any, Sequence[str]]
"""The name of a column, its value for each row, and the names of the numbers in a value."""
Places = Callable[[Sequence[int]], list[Column]]
"""Returns the columns that identify the images of these rows."""


class GivenImages(ImageSource):
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
        """A hash of the paths, and of the sizes of local files."""
        paths = [self.where(row) for row in range(len(self._images))]
        lines = [f"{path} {size}" for path, size in zip(paths, sizes_of(paths), strict=True)]
        return sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _opened(image: Any) -> Any:
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        return _in_store(path) if "://" in path else content_of(path)
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, Image.Image) and all(image.size):
        return image
    array = np.asarray(image)
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not fits or not array.size:
        wanted = "expected uint8 (height, width, 3)"
        return BadRecord(f"an array of {array.dtype} {array.shape}; {wanted}")
    return Image.fromarray(array)


def _in_store(uri: str) -> bytes:
    fs, path = open_uri(uri)
    outcome = with_retries(lambda: read_file(fs, path), is_local=False)
    return unless_failed(outcome, uri, f"{without_secrets(uri)}: cannot be read")


@dataclass(frozen=True)
class Input:
    """The rows to predict.

    Args:
        data: batches of the rows, without those of bad records.
        places: also returns the labels of rows, if they are known.
        notes: sentences about files that are not used.
    """

    data: Data
    places: Places
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
    if not model.takes_images:
        return _of_task(words, model)
    images, tables, notes = _files(words)
    if image_column is not None and not tables:
        raise ConfigError("--image-column has no effect, as INPUT has no tables: remove it.")
    if not words:
        return _own(model, on_bad, image_size)
    source: GivenImages | ShardImages = GivenImages(images)
    if not images:
        own = model.config.data
        column = own.image_column if image_column is None else image_column
        bare = replace(own, label_column="", target_columns=(), root=None, bad_records="skip")
        source = ShardImages(tables, replace(bare, image_column=column))
    data = model.data_of(source, on_bad, image_size or model.image_size)
    return Input(data, _places_of(source), notes)


def _of_task(words: Sequence[str], model: LoadedModel) -> Input:
    if words:
        raise ConfigError(
            f"task = {model.config.task!r} predicts its own evaluation data only: give no INPUT."
        )
    data = eval_data_of(model.task, model.config.seed)
    if data is None:
        raise ConfigError("the task has no evaluation data.")
    return Input(data, _places_of(data.source))


def _own(model: LoadedModel, on_bad: OnBad, image_size: int) -> Input:
    """The evaluation data of the run, with their labels."""
    source = evaluation_of_run(model.config, model.class_names)
    if source is None:
        raise ConfigError("the run has no evaluation data: give INPUT.")
    names, of_rows, labels = model.class_names, _places_of(source), source.labels().tolist()
    title, parts = "target", names
    if not model.config.data.target_columns:
        title, parts, labels = "label", [], [names[number] for number in labels]
    data = model.data_of(source, on_bad, image_size)
    return Input(data, lambda rows: [*of_rows(rows), (title, [labels[row] for row in rows], parts)])


def evaluation_of_run(config: TrainConfig, class_names: list[str]) -> ImageSource | None:
    """The evaluation data of a run, with the classes that its model knows; its training data need
    not be available if the evaluation data are separate."""
    data, binary = config.data, config.loss.name == "bce"
    if data.eval_source is not None and not data.holdout:
        return open_evaluation(data, class_names, binary)
    splits = open_splits(data, binary=binary)
    if splits.class_names != class_names and not were_numbers(class_names, splits.class_names):
        raise DataError("the classes in the run's data have changed.")
    return splits.eval


def _places_of(source: Any) -> Places:
    if isinstance(source, HoldoutPart):
        whole = _places_of(source.whole)
        return lambda rows: whole(source.rows_of_whole(rows).tolist())
    if isinstance(source, GivenImages | FolderImages):
        return lambda rows: [("path", [*map(source.where, rows)], ())]
    if not isinstance(source, ShardImages):
        return lambda rows: [("row", [*rows], ())]
    paths = source.paths()

    def places(rows: Sequence[int]) -> list[Column]:
        files, numbers = zip(*map(source.place, rows), strict=True)
        own: list[Column] = [("path", [paths[row] for row in rows], ())] if paths else []
        return [*own, ("file", [*files], ()), ("row", [*numbers], ())]

    return places


def _files(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The images and tables that the words name, without duplicates; notes about other files."""
    found: dict[str, None] = {}
    left_out: list[str] = []
    for word in words:
        place = open_uri(word)[1] if word.startswith("file://") else word
        shown = without_secrets(place)
        is_uri = "://" in place
        files = list_in_store(place, shown) if is_uri else list_on_disk(place, shown, every=True)
        names = [*map(files.uri_of, files.files)]
        if not any(is_image(name) or format_of(name) for name in names):
            raise DataError(f"{shown}: contains no images and no tables of images.")
        found |= dict.fromkeys(names)
        left_out += files.left_out
    images = [name for name in found if is_image(name)]
    tables = [] if images else [name for name in found if format_of(name)]
    others = sorted(found.keys() - {*images, *tables})
    unused = [*counted(others, "not images"), *counted(left_out, LEFT_OUT)]
    return images, tables, [f"{note}." for note in unused]
