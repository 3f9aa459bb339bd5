"""What a model is used on: images by path or URI, tables of images, or the data of its run."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raytrain_ddp.data.discovery.file_listing import counted
from raytrain_ddp.data.discovery.store_listing import list_in_store
from raytrain_ddp.data.formats.image_folder import LEFT_OUT, files_below, is_image
from raytrain_ddp.data.formats.labels import were_numbers
from raytrain_ddp.data.formats.shard_formats import format_of
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.holdout import HoldoutPart
from raytrain_ddp.data.splits import ImageSource, open_evaluation, open_splits
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.task_check import eval_data_of
from raytrain_ddp.tools.inference.given_images import GivenImages
from raytrain_ddp.uri import open_uri, without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.pixels.image_batches import OnBad
    from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
_FRAMES = "Extract its frames: ffmpeg -i {0} frames/%06d.jpg"
TARGET = "target"  # a column of lists, with a number for each of the targets

Columns = dict[str, list[Any]]


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
    notes: tuple[str, ...] = ()


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
    found, notes = _files(words)
    images = [name for name in found if format_of(name) is None]
    named = [word for word in words if word in found and format_of(word) is not None]
    if images and named:
        raise ConfigError(f"{named[0]} is a table, and others are images: predict them separately.")
    if images and image_column is not None:
        raise ConfigError(
            "--image-column has no effect, as INPUT is images, not tables: remove it."
        )
    if images:
        source = GivenImages(images, [*map(_place, words)])
        data = model.data_of(source, on_bad, image_size or model.image_size)
        return Input(data, lambda rows: {"path": [source.where(row) for row in rows]}, notes)
    config = replace(model.config.data, bad_records="skip", target_columns=(), root=None)
    if image_column is not None:
        config = replace(config, image_column=image_column)
    table = ShardImages(found, config, labeled=False)
    data = model.data_of(table, on_bad, image_size or model.image_size)
    return Input(data, _places_of(table), notes)


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
    labels = source.labels().tolist()
    whole = source.whole if isinstance(source, HoldoutPart) else source
    files = getattr(whole, "files", None)
    of_table = _places_of(whole) if isinstance(whole, ShardImages) else None

    def places(rows: Sequence[int]) -> Columns:
        theirs = [*rows]
        if isinstance(source, HoldoutPart):
            theirs = source.rows_of_whole(rows).tolist()
        named: Columns = dict(of_table(theirs)) if of_table else {"row": theirs}
        if files:
            named["path"] = [files[row][0] for row in theirs]
        if model.config.data.target_columns:
            named[TARGET] = [labels[row] for row in rows]
        else:
            named["label"] = [model.class_names[labels[row]] for row in rows]
        return named

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


def _files(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The images, or else the tables, that the words name; and notes about other files."""
    found: list[str] = []
    others: list[str] = []
    left_out: list[str] = []
    for word in words:
        in_store = "://" in word and not word.startswith("file://")
        place = _place(word)
        own = _in_store(word, left_out) if in_store else _on_disk(place, left_out)
        named = own == [place]  # a file by its own name may be of any kind
        kept = [name for name in own if named or is_image(name) or format_of(name)]
        if not kept or kept[0].lower().endswith(_VIDEOS):
            raise _nothing(word, own)
        found += kept
        others += sorted({*own} - {*kept})
    unique = {name if "://" in name else os.path.abspath(name): name for name in found}
    images = [name for name in unique.values() if format_of(name) is None]
    tables = [name for name in unique.values() if images and format_of(name)]
    unused = {"tables next to the images": tables, "not images": others, LEFT_OUT: left_out}
    notes = [f"{note}." for why, names in unused.items() for note in counted(names, why)]
    repeated = len(found) - len(unique)
    if repeated:
        noun = "files are" if repeated > 1 else "file is"
        notes.append(f"{repeated:,} {noun} named again, and used once.")
    return (images if images and len(words) == 1 else [*unique.values()]), tuple(notes)


def _in_store(uri: str, left_out: list[str]) -> list[str]:
    listing = list_in_store(uri, without_secrets(uri))
    left_out += listing.left_out
    return [listing.uri_of(name) for name in listing.files]


def _place(word: str) -> str:
    """The path of a local file or folder; other words are returned as they are."""
    return open_uri(word)[1] if word.startswith("file://") else os.path.expanduser(word)


def _on_disk(path: str, left_out: list[str]) -> list[str]:
    if os.path.isdir(path):
        return _below(path, left_out)
    if os.path.exists(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise DataError(f"{path}: no such file or folder, and no file matches it.")
    return [name for m in matches for name in (_below(m, left_out) if os.path.isdir(m) else [m])]


def _below(folder: str, left_out: list[str]) -> list[str]:
    """Files at any depth, sorted; leftovers are omitted, and added to `left_out`."""
    found = []
    for place, names, left in files_below(folder):
        found += [os.path.join(place, name) for name in names]
        left_out += [os.path.join(place, name) for name in left]
    return sorted(found)


def _nothing(word: str, files: Sequence[str]) -> DataError:
    shown = without_secrets(word)
    videos = [name for name in files if name.lower().endswith(_VIDEOS)]
    if videos:
        what = "is a video" if videos == [word] else f"has videos, such as {videos[0]}"
        return DataError(f"{shown} {what}, no images. {_FRAMES.format(videos[0])}.")
    return DataError(f"{shown}: contains no images and no tables of images.")
