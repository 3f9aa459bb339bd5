"""Finds the splits of a source: a data set written by `convert`, a Hugging Face repository, or
splits named by files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as defaults
from os.path import isdir
from pathlib import Path, PurePosixPath
from typing import Literal

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.discovery.class_folders import (
    class_folder_splits,
    folder_of_patterns,
    refuse_split_names_as_classes,
)
from raytrain_ddp.data.discovery.file_listing import (
    FileListing,
    counted,
    fits,
    list_on_disk,
)
from raytrain_ddp.data.discovery.hf_repository import (
    RepoConfig,
    class_names_of,
    files_of,
    is_of,
    repo_config,
    saved_to_disk,
)
from raytrain_ddp.data.discovery.split_names import (
    WHOLE,
    NoSuchConfigError,
    Splits,
    configs_of,
    merged,
    require_all_shards,
    role_in,
)
from raytrain_ddp.data.discovery.store_listing import list_in_store
from raytrain_ddp.data.formats.image_folder import LEFT_OUT, is_image
from raytrain_ddp.data.formats.shard import leads_out
from raytrain_ddp.data.formats.shard_formats import FORMATS, LIST, format_of
from raytrain_ddp.errors import DataError, first_names, quoted
from raytrain_ddp.uri import open_uri, without_secrets

DATASET_FILE = "dataset.json"  # written by `convert`

Kind = Literal["files", "folder", "torchvision"]

_METADATA_FILE = "metadata.parquet"  # Hugging Face `datasets` stores it next to images
_ERRORS_SHOWN = 20
_LOST = "none of its files exists"


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
    notes: tuple[str, ...] = ()
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
    if source == "digits":
        source = str(Path(__file__).parents[1] / "digits")
    if source.startswith("file://"):
        source = open_uri(source)[1]
    if "://" in source:
        listing = list_in_store(source, shown)
    else:
        listing = list_on_disk(source, shown, config.classes or ())
    of_dataset: Splits | None = saved_to_disk(listing)
    if DATASET_FILE in listing.files:
        of_dataset = _written_by_convert(listing)
    if of_dataset is not None:
        _require_no_config(shown, asked)
        return DataSet(field, shown, "files", of_dataset, listing.uri_of)
    card = None if listing.pattern else repo_config(listing, asked)
    class_names = {} if listing.pattern else class_names_of(listing, asked)
    if card is not None:
        listing, asked = listing.inside(card.folder), "auto"
    images = listing.images
    by_format = [listing.named(form.ends) for form in FORMATS]  # Parquet is the first
    names = [n for n in by_format[0] if not images or PurePosixPath(n).name != _METADATA_FILE]
    patterns = None if card is None else card.patterns
    if patterns and not any(files_of(patterns, names).values()):  # it may name other files
        names = next((n for n in by_format if any(files_of(patterns, n).values())), names)
    if not names and not images:
        names = next((each for each in by_format if each), [])
    if names:
        of_files = _of_files(field, listing, names, card, asked)
        return replace(of_files, class_names=class_names)
    if images and listing.is_local and not listing.pattern:
        return _of_images(field, listing, card, asked, config)
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


def _of_files(
    field: str, listing: FileListing, names: Sequence[str], card: RepoConfig | None, asked: str
) -> DataSet:
    notes = _unread(listing, names, card)
    unusable: dict[str, str] = {}
    if card is not None and card.patterns is not None:
        found = files_of(card.patterns, names)
        splits: Splits = {split: files for split, files in found.items() if files}
        unusable = {split: _LOST for split in found if not found[split]}
        rest = len(set(names).difference(*splits.values()))
        if rest and not card.others:
            notes.append(f"not used: {rest} file{'s' * (rest > 1)} that README.md does not list")
    else:
        splits, others = _by_name(listing, names, asked)
        notes += [f"the config {name} is not used" for name in others]

    if listing.images:
        folders = [*dict.fromkeys(name.rpartition("/")[0] or "." for name in listing.images)]
        notes.append(f"images in {first_names(folders)} are read only if a file references them")

    def check(split: str) -> None:
        def is_wanted(name: str) -> bool:
            of_card = not card or not card.patterns or is_of(card.patterns[split], name)
            return of_card and (not listing.pattern or fits(name, listing.pattern))

        require_all_shards(splits[split], listing.shown, is_wanted)

    shown, uri_of = listing.shown, listing.uri_of
    return DataSet(field, shown, "files", splits, uri_of, unusable, tuple(notes), check=check)


def _unread(listing: FileListing, used: Sequence[str], card: RepoConfig | None) -> list[str]:
    """Returns notes about unused configs, lists and data files, and about leftovers."""
    notes = [f"the config {name} is not used" for name in card.others] if card else []
    if unread := sorted({name for name in listing.files if format_of(name)} - {*used}):
        notes.append(f"not used: {first_names(unread)}; to use one, specify it explicitly")
    return notes + counted(listing.left_out, LEFT_OUT)


def _by_name(listing: FileListing, names: Sequence[str], asked: str) -> tuple[Splits, list[str]]:
    """The splits of the requested config, and the names of the other configs."""
    configs = configs_of(names, listing.shown)
    if asked == "auto" and (len(configs) == 1 or listing.pattern):
        return merged(configs), []  # a glob selects the files explicitly
    if asked == "auto":
        raise DataError(
            f"{listing.shown} has several configs: {first_names([*configs])}. Name one with "
            "--data.config."
        )
    if len(configs) == 1 and asked == "default":
        return merged(configs), []
    folders = configs
    if len(configs) == 1:  # its folder may still be requested by name
        folders = {
            str(above): {} for name in names for above in PurePosixPath(name).parents if above.name
        }
    wanted = asked.casefold()
    chosen = [
        name for name in folders if wanted in (name.casefold(), PurePosixPath(name).name.casefold())
    ]
    if len(chosen) != 1:
        has = (
            f"only {first_names([*configs])}"
            if len(configs) > 1
            else "or any other: remove --data.config"
        )
        raise NoSuchConfigError(f"{listing.shown} has no config {quoted(asked)}, {has}.")
    others = [name for name in configs if len(configs) > 1 and name != chosen[0]]
    if len(configs) == 1:
        inside = [name for name in names if name.startswith(f"{chosen[0]}/")]
        return merged(configs_of(inside, listing.shown)), others
    return configs[chosen[0]], others


def _of_images(
    field: str, listing: FileListing, card: RepoConfig | None, asked: str, config: DataConfig
) -> DataSet:
    others = [name for name in listing.files if not is_image(name) and not format_of(name)]
    notes = [*counted(others, "not images"), *_unread(listing, (), card)]
    if listing.left_out:
        notes[-1] += "; data.classes may name classes among them"
    unusable: dict[str, str] = {}
    chosen = config.eval_split if field == "data.eval_source" else config.train_split
    if card is not None and card.patterns is not None:
        folders = {split: folder_of_patterns(each) for split, each in card.patterns.items()}
        unusable = {
            split: "README.md's data_files must be FOLDER/** for images in class folders"
            for split, folder in folders.items()
            if folder is None
        }
        splits = {split: folder for split, folder in folders.items() if folder is not None}
        for split in [each for each, name in splits.items() if not isdir(listing.uri_of(name))]:
            unusable[split] = _LOST
            del splits[split]
    elif chosen == WHOLE:
        splits = {WHOLE: "."}
    else:
        named = {config.train_split, config.eval_split} - {"auto", "none"}
        splits, reasons = class_folder_splits(listing, asked, named)
        for split, why in reasons.items():
            fitting = (None, role_in(f"{split}/"))  # never the list of another split
            own = [name for name in listing.named(LIST.ends) if role_in(name) in fitting]
            hint = f"; if {own[-1]} lists the labels, specify it explicitly" if own else ""
            unusable[split] = why + hint

    def check(split: str) -> None:
        if config.train_split == "auto" and split != WHOLE:
            refuse_split_names_as_classes(listing, split, splits[split])

    beside = {str(PurePosixPath(name).parent) for name in listing.images}
    for folder in sorted(beside.intersection(splits.values())):
        notes.append(f"not used: the images in {folder} that are in none of its class folders")
    found = {split: (folder,) for split, folder in splits.items()}
    shown, uri_of = listing.shown, listing.uri_of
    return DataSet(field, shown, "folder", found, uri_of, unusable, tuple(notes), check=check)


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
