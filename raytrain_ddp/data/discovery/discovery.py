"""Finds the splits of a source: a data set written by `convert`, a Hugging Face repository, or
splits named by files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as defaults
from pathlib import Path, PurePosixPath
from typing import Literal

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.discovery.file_listing import (
    FileListing,
    counted,
    fits,
    list_in_store,
    list_on_disk,
)
from raytrain_ddp.data.discovery.hf_repository import (
    BY_NAME,
    is_repository,
    loaded,
    resolved,
    saved_to_disk,
)
from raytrain_ddp.data.discovery.split_names import (
    WHOLE,
    NoSuchConfigError,
    Splits,
    class_folder_splits,
    refuse_split_names_as_classes,
    require_all_shards,
    splits_of_files,
)
from raytrain_ddp.data.formats.image_folder import LEFT_OUT, is_image
from raytrain_ddp.data.formats.shard import leads_out
from raytrain_ddp.data.formats.shard_images import FORMATS, format_of
from raytrain_ddp.errors import DataError, first_names, quoted
from raytrain_ddp.uri import open_uri, without_secrets

DATASET_FILE = "dataset.json"  # written by `convert`

Kind = Literal["files", "folder", "torchvision"]

_METADATA_FILE = "metadata.parquet"  # Hugging Face `datasets` stores it next to images
_ERRORS_SHOWN = 20


@dataclass(frozen=True)
class DataSet:
    """A source and its splits.

    Args:
        shown: the field and its value, for messages.
        splits: name -> the files or the single folder of each split, relative to the root. Empty
            for a torchvision set, which checks the name when it is opened.
        uri_of: the path or URI of a file or folder.
        unusable: other splits that exist, and why they cannot be used.
        notes: sentences about other data that is not used.
        class_names: class names of each label column that README.md declares.
        check: raises a DataError if a split is incomplete or may not be a split.
    """

    field: str
    shown: str
    kind: Kind
    splits: Splits
    uri_of: Callable[[str], str]
    unusable: Mapping[str, str] = defaults(default_factory=dict)
    notes: Sequence[str] = ()
    class_names: Mapping[str, Sequence[str]] = defaults(default_factory=dict)
    check: Callable[[str], None] = lambda _: None

    def paths(self, split: str) -> tuple[str, ...]:
        """The paths or URIs of a split.

        Raises:
            DataError: the split is incomplete, or may not be a split.
        """
        self.check(split)
        return tuple(map(self.uri_of, self.splits.get(split, ("",))))


def open_data_set(source: str, field: str, config: DataConfig) -> DataSet:
    """Finds the splits of a source.

    Raises:
        NoSuchConfigError: there is no config with the requested name.
        DataError: there is nothing, or nothing readable as images.
        ConfigError: the scheme of a URI is unknown.
        PreflightError: an object store cannot be reached.
    """
    shown = f"{field} = {quoted(without_secrets(source))}"
    asked = config.config
    if source.startswith("torchvision:"):
        _require_no_config(shown, asked)
        name = source.partition(":")[2]
        return DataSet(field, shown, "torchvision", {}, lambda _: name)
    if source.startswith(BY_NAME) and "://" not in source:
        return DataSet(field, shown, "files", loaded(source, shown, asked), lambda path: path)
    if source == "digits":
        source = str(Path(__file__).parents[1] / "digits")
    if source.startswith("file://"):
        source = open_uri(source)[1]
    if "://" in source:
        listing = list_in_store(source, shown)
    else:
        listing = list_on_disk(source, shown, config.classes or ())
    found = DataSet(field, shown, "files", {}, listing.uri_of)
    of_dataset: Splits | None = saved_to_disk(listing)
    if DATASET_FILE in listing.files:
        of_dataset = _written_by_convert(listing)
    if of_dataset is not None:
        _require_no_config(shown, asked)
        return replace(found, splits=of_dataset)
    if is_repository(listing):
        return _of_repository(found, listing, asked)
    images = listing.images
    by_format = [listing.named(form.ends) for form in FORMATS]  # Parquet is the first
    names = [n for n in by_format[0] if not images or PurePosixPath(n).name != _METADATA_FILE]
    if not names and not images:
        names = next((each for each in by_format if each), [])
    _require_no_config(shown, asked)
    if names:
        return _of_files(found, listing, names)
    if images and listing.is_local and not listing.pattern:
        return _of_images(found, listing, config)
    raise _nothing(listing)


def _nothing(listing: FileListing) -> DataError:
    hint = "".join(f" ({note}.)" for note in counted(listing.left_out, LEFT_OUT))
    problem = "contains neither Parquet files nor class folders, tar files or lists of images"
    if not listing.is_local:
        problem = (
            "contains no Parquet files and no lists of images (class folders and tar files are "
            "read only from local disks: convert them there and upload the result)"
        )
    elif listing.pattern:
        problem = (
            "no match is a Parquet file, a tar file or a list of images; for images, specify the "
            "folder"
        )
    return DataError(f"{listing.shown}: {problem}.{hint}")


def _of_repository(base: DataSet, listing: FileListing, asked: str) -> DataSet:
    found = resolved(listing, asked)
    named = {split: [*filter(format_of, files)] for split, files in found.splits.items()}
    splits = {split: files for split, files in named.items() if files}
    others = [split for split in named if split not in splits]

    def wanted(split: str, missing: Sequence[str]) -> Sequence[str]:
        files = {*resolved(listing, asked, missing).splits[split]}
        return [name for name in missing if name in files]

    return replace(
        base,
        splits=splits,
        unusable=dict.fromkeys(others, f"only datasets reads its files: use {BY_NAME}FOLDER"),
        notes=_unused(listing, {"": [*listing.files]} if found.others else splits, found.others),
        class_names=found.class_names,
        check=_shard_check(listing, splits, wanted),
    )


def _of_files(base: DataSet, listing: FileListing, names: Sequence[str]) -> DataSet:
    splits = splits_of_files(names, listing.shown, bool(listing.pattern))
    notes = _unused(listing, splits)
    if listing.images:
        folders = [*dict.fromkeys(name.rpartition("/")[0] or "." for name in listing.images)]
        notes.append(f"images in {first_names(folders)} are read only if a file references them")

    def wanted(_: str, missing: Sequence[str]) -> Sequence[str]:
        return [n for n in missing if not listing.pattern or fits(n, listing.pattern)]

    return replace(base, splits=splits, notes=notes, check=_shard_check(listing, splits, wanted))


def _shard_check(
    listing: FileListing, splits: Splits, wanted: Callable[[str, Sequence[str]], Sequence[str]]
) -> Callable[[str], None]:
    return lambda split: require_all_shards(
        splits.get(split, ()), listing.shown, lambda missing: wanted(split, missing)
    )


def _unused(listing: FileListing, splits: Splits, configs: Sequence[str] = ()) -> list[str]:
    """Notes about configs, lists and data files that are not used, and about leftovers."""
    notes = [f"the config {name} is not used" for name in configs]
    used = {name for files in splits.values() for name in files}
    if unread := sorted({name for name in listing.files if format_of(name)} - used):
        notes.append(f"not used: {first_names(unread)}; to use one, specify it explicitly")
    return notes + counted(listing.left_out, LEFT_OUT)


def _of_images(base: DataSet, listing: FileListing, config: DataConfig) -> DataSet:
    others = [name for name in listing.files if not is_image(name) and not format_of(name)]
    notes = [*counted(others, "not images"), *_unused(listing, {})]
    if listing.left_out:
        notes[-1] += "; data.classes may name classes among them"
    unusable: dict[str, str] = {}
    splits = {WHOLE: "."}
    if (config.eval_split if base.field == "data.eval_source" else config.train_split) != WHOLE:
        named = {config.train_split, config.eval_split} - {"auto", "none"}
        splits, unusable = class_folder_splits(listing, named)

    def check(split: str) -> None:
        if config.train_split == "auto" and split != WHOLE:
            refuse_split_names_as_classes(listing, split, splits[split])

    beside = {str(PurePosixPath(name).parent) for name in listing.images}
    for folder in sorted(beside.intersection(splits.values())):
        notes.append(f"not used: the images in {folder} that are in none of its class folders")
    found = {split: (folder,) for split, folder in splits.items()}
    return replace(base, kind="folder", splits=found, unusable=unusable, notes=notes, check=check)


def _require_no_config(shown: str, asked: str) -> None:
    if asked != "auto":
        raise NoSuchConfigError(f"{shown} has no config {quoted(asked)}: remove --data.config.")


def _written_by_convert(listing: FileListing) -> Splits | None:
    """The files of each split, if `convert` wrote the data set; otherwise None.

    Raises:
        DataError: files are missing or have a different size; the message lists them.
    """
    shown = listing.shown
    try:
        dataset = json.loads(listing.content(DATASET_FILE))
        if not isinstance(dataset, dict) or dataset.get("format") != "raytrain_ddp":
            return None
        if dataset["version"] != 1:
            raise DataError(
                f"{shown}: {DATASET_FILE} has version {dataset['version']}, but this version of "
                "raytrain_ddp reads only version 1."
            )
        files = [(str(f["path"]), str(f["split"]), int(f["bytes"])) for f in dataset["files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{shown}: {DATASET_FILE} is damaged: convert the data again.") from None
    wrong = []
    of_split: dict[str, list[str]] = {}
    for name, split, expected in files:
        size = None if leads_out(name) else listing.size_of(name)
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes, not {expected}"
            wrong.append(f"{name} {found}")
        of_split.setdefault(split, []).append(name)
    if wrong:
        listed = first_names(wrong, _ERRORS_SHOWN, ", and ")
        raise DataError(
            f"{shown}: {len(wrong)} of {len(files)} files do not match {DATASET_FILE}: {listed}. "
            "Copy them again, or rerun the conversion."
        )
    return of_split
