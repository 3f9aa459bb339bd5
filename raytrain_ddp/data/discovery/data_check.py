"""Finds and checks a run's training and evaluation data before anything starts, without torch.

A source is a data set written by `convert` or `datasets`, a Hugging Face repository, or splits that
are named by files and folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.file_listing import (
    LEFT_OUT,
    FileListing,
    counted,
    fits,
    is_image,
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
    ROLE_OF,
    WHOLE,
    NoSuchConfigError,
    Role,
    Splits,
    class_folder_splits,
    refuse_split_names_as_classes,
    require_all_shards,
    splits_of_files,
)
from raytrain_ddp.data.formats.file_formats import FORMATS, format_of
from raytrain_ddp.data.formats.shard import leads_out
from raytrain_ddp.errors import ConfigError, DataError, first_names, quoted
from raytrain_ddp.uri import open_uri, without_secrets

DATASET_FILE = "dataset.json"  # written by `convert`

Kind = Literal["files", "folder", "torchvision"]
Use = Literal["train", "eval"]

_METADATA_FILE = "metadata.parquet"  # Hugging Face `datasets` stores it next to images
_ERRORS_SHOWN = 20
_NAMES_SHOWN = 5
_TO: Mapping[Use, str] = {"train": "train", "eval": "evaluate"}


@dataclass(frozen=True)
class DataSet:
    """A source and its splits.

    Args:
        named_by: the field of the config.
        shown: the field and its value, for messages.
        splits: name -> the files or the single folder of each split, relative to the root. Empty
            for a torchvision set, which checks the name when it is opened.
        uri_of: the path or URI of a file or folder.
        unusable: other splits that exist, and why they cannot be used.
        notes: sentences about other data that is not used.
        class_names: class names of each label column that README.md declares.
        check: raises a DataError if a split is incomplete or may not be a split.
    """

    named_by: str
    shown: str
    kind: Kind
    splits: Splits
    uri_of: Callable[[str], str]
    unusable: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    check: Callable[[str], None] = lambda _: None

    def paths(self, split: str) -> tuple[str, ...]:
        """The paths or URIs of a split.

        Raises:
            DataError: the split is incomplete, or may not be a split.
        """
        self.check(split)
        return tuple(map(self.uri_of, self.splits.get(split, ("",))))


def open_data_set(source: str, named_by: str, config: DataConfig) -> DataSet:
    """Finds the splits of a source.

    Raises:
        NoSuchConfigError: there is no config with the requested name.
        DataError: there is nothing, or nothing readable as images.
        ConfigError: the scheme of a URI is unknown.
        PreflightError: an object store cannot be reached.
    """
    shown = f"{named_by} = {quoted(without_secrets(source))}"
    asked = config.config
    if source.startswith("torchvision:"):
        _require_no_config(shown, asked)
        name = source.partition(":")[2]
        return DataSet(named_by, shown, "torchvision", {}, lambda _: name)
    if source.startswith(BY_NAME) and "://" not in source:
        return DataSet(named_by, shown, "files", loaded(source, shown, asked), lambda path: path)
    if source == "digits":
        source = str(Path(__file__).parents[1] / "digits")
    if source.startswith("file://"):
        source = open_uri(source)[1]
    is_uri, classes = "://" in source, config.classes or ()
    listing = list_in_store(source, shown) if is_uri else list_on_disk(source, shown, classes)
    found = DataSet(named_by, shown, "files", {}, listing.uri_of)
    written = _written_by_convert(listing)
    if written is None:
        written = saved_to_disk(listing)
    if written is not None:
        _require_no_config(shown, asked)
        return replace(found, splits=written)
    if is_repository(listing):
        return _of_repository(found, listing, asked)
    _require_no_config(shown, asked)
    images = listing.images
    by_format = [listing.named(form.ends) for form in FORMATS]  # Parquet is the first
    names = [n for n in by_format[0] if not images or PurePosixPath(n).name != _METADATA_FILE]
    if not names and not images:
        names = next(filter(None, by_format), [])
    if names:
        return _of_files(found, listing, names)
    if images and listing.is_local and not listing.pattern:
        return _of_images(found, listing, config)
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
    hint = "".join(f" ({note}.)" for note in counted(listing.left_out, LEFT_OUT))
    raise DataError(f"{shown}: {problem}.{hint}")


def _of_repository(base: DataSet, listing: FileListing, asked: str) -> DataSet:
    found = resolved(listing, asked)
    named = {split: [*filter(format_of, files)] for split, files in found.splits.items()}
    splits = {split: files for split, files in named.items() if files}
    others = [split for split in named if split not in splits]
    notes = [f"the config {name} is not used" for name in found.others]

    def check(split: str) -> None:
        require_all_shards(
            splits[split], listing.shown, lambda more: resolved(listing, asked, more).splits[split]
        )

    return replace(
        base,
        splits=splits,
        unusable=dict.fromkeys(others, f"only datasets reads its files: use {BY_NAME}FOLDER"),
        notes=notes + _unused(listing, {"": listing.files} if notes else splits),
        class_names=found.class_names,
        check=check,
    )


def _of_files(base: DataSet, listing: FileListing, names: Sequence[str]) -> DataSet:
    pattern, splits = listing.pattern, splits_of_files(names, listing.shown, bool(listing.pattern))
    notes = _unused(listing, splits)
    if listing.images:
        folders = [*dict.fromkeys(name.rpartition("/")[0] or "." for name in listing.images)]
        notes.append(f"images in {first_names(folders)} are read only if a file references them")

    def check(split: str) -> None:
        require_all_shards(
            splits[split],
            listing.shown,
            lambda more: [name for name in more if not pattern or fits(name, pattern)],
        )

    return replace(base, splits=splits, notes=notes, check=check)


def _unused(listing: FileListing, splits: Splits) -> list[str]:
    """Notes about lists and data files that are not used, and about leftovers."""
    used = {name for files in splits.values() for name in files}
    unread = sorted({*filter(format_of, listing.files)} - used)
    notes = [f"not used: {first_names(unread)}; to use one, specify it explicitly"]
    return notes * bool(unread) + counted(listing.left_out, LEFT_OUT)


def _of_images(base: DataSet, listing: FileListing, config: DataConfig) -> DataSet:
    others = [name for name in listing.files if not is_image(name) and not format_of(name)]
    notes = [*counted(others, "not images"), *_unused(listing, {})]
    if listing.left_out:
        notes[-1] += "; data.classes may name classes among them"
    unusable: dict[str, str] = {}
    splits = {WHOLE: "."}
    if (config.eval_split if base.named_by == "data.eval_source" else config.train_split) != WHOLE:
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
    if DATASET_FILE not in listing.files:
        return None
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
    sizes = listing.sizes([name for name, _, _ in files])
    for (name, split, expected), size in zip(files, sizes, strict=True):
        of_split.setdefault(split, []).append(name)
        if size is None or leads_out(name):
            wrong.append(f"{name} is missing")
        elif size != expected:
            wrong.append(f"{name} has {size} bytes, not {expected}")
    if wrong:
        listed = first_names(wrong, _ERRORS_SHOWN, ", and ")
        raise DataError(
            f"{shown}: {len(wrong)} of {len(files)} files do not match {DATASET_FILE}: {listed}. "
            "Copy them again, or rerun the conversion."
        )
    return of_split


# ------------------------------------------------------------------ the splits of a run


@dataclass(frozen=True)
class Located:
    """Where one split is: Parquet files (paths or URIs), an ImageFolder's root, or the name of a
    torchvision data set.

    Args:
        split: what it is used for.
        name: the split's name from its files or folder; "" if it has none.
        class_names: class names of each label column that README.md declares.
    """

    kind: Kind
    paths: tuple[str, ...]
    split: Use
    name: str = ""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The data of a run; deterministic on every machine and in every call.

    Args:
        eval: None if there is no evaluation split.
        eval_from: where the evaluation split comes from, such as "the validation split of
            data.source"; "" without one.
        notes: sentences about existing data that is not used.
        more: other validation and test splits of the source, if asked for.
    """

    train: Located
    eval: Located | None = None
    eval_from: str = ""
    notes: tuple[str, ...] = ()
    more: tuple[Located, ...] = ()


def locate(config: DataConfig, more: bool = False) -> Found:
    """Finds the training split and the evaluation split.

    Args:
        more: also the other validation and test splits, unless that to evaluate on is given.

    Raises:
        DataError: there is nothing, nothing readable as images, or an incomplete data set; or it is
            ambiguous which part of it to use.
        ConfigError: flags contradict each other, or the scheme of a URI is unknown.
        PreflightError: an object store cannot be reached.
    """
    source = open_data_set(config.source, "data.source", config)
    train = _chosen(source, config.train_split, "train") or ""
    other, chosen = source, None
    if config.eval_source is not None:
        if config.eval_split == "none":
            raise ConfigError(
                "data.eval_split = 'none' conflicts with data.eval_source: remove one of them."
            )
        other = _open_other(config.eval_source, config)
        chosen = _chosen(other, config.eval_split, "eval")
    elif config.eval_split != "none":
        chosen = _chosen(source, config.eval_split, "eval", train)
    used: set[str | None] = {train, chosen} if other is source else {train}
    kept: list[str] = []
    if more and config.eval_source is None and config.eval_split == "auto":
        for_it = [name for name in source.splits if role_of(name) in ("validation", "test")]
        kept = [name for name in for_it if name not in used]
    notes = [*source.notes, *_unused_splits(source, used.union(kept), False)]
    if other is not source:
        notes += [*other.notes, *_unused_splits(other, {chosen}, True)]
    to_train, evaluation, eval_from = _located(source, train, "train"), None, ""
    if chosen is not None:
        evaluation = _located(other, chosen, "eval")
        eval_from = f"the {chosen} split of {other.named_by}" if chosen else other.named_by
    if evaluation == replace(to_train, split="eval") and (train or source.splits):
        notes.append("the run is evaluated on its training data")
    sentences = tuple(f"{note}." for note in dict.fromkeys(notes))
    others = tuple(_located(source, name, "eval") for name in kept)
    return Found(to_train, evaluation, eval_from, sentences, others)


def locate_evaluation(config: DataConfig) -> Located:
    """Finds the split of `eval_source` to evaluate on; the training data need not be there.

    Raises:
        DataError, ConfigError, PreflightError: like `locate`.
    """
    assert config.eval_source is not None
    source = _open_other(config.eval_source, config)
    return _located(source, _chosen(source, config.eval_split, "eval") or "", "eval")


def role_of(split: str) -> Role | None:
    """The role of a split with this name; None: unknown."""
    return ROLE_OF.get(split.lower())


def _open_other(source: str, config: DataConfig) -> DataSet:
    """The evaluation source, with the same config if it has that config."""
    try:
        return open_data_set(source, "data.eval_source", config)
    except NoSuchConfigError:
        return open_data_set(source, "data.eval_source", replace(config, config="auto"))


def _chosen(source: DataSet, asked: str, use: Use, train: str | None = None) -> str | None:
    """The name of the split to use; None: the source has none to evaluate on.

    Args:
        train: the split that the run is trained on; None: the source is for one use only.
    """
    if source.kind == "torchvision":
        return "" if asked == "auto" else asked
    if asked != "auto":
        return _of_name(source, asked, use)
    roles: tuple[Role, ...] = ("train",)
    if use == "eval":
        roles = ("validation", "test") if train is not None else ("validation", "test", "train")
    for role in roles:
        found = [name for name in source.splits if role_of(name) == role and name != train]
        if len(found) > 1:
            raise DataError(
                f"{source.shown} has several splits to {_TO[use]} on: {first_names(found)}. Name "
                f"one with --data.{use}-split."
            )
        if found:
            return found[0]
    if train is not None:
        return None
    names = [*source.splits]
    if "" in names or (use == "eval" and len(names) == 1):
        return names[0]
    why = [f"{name}: {why}" for name, why in source.unusable.items() if role_of(name) in roles]
    problem = f"{source.shown} has no split to {_TO[use]} on{''.join(f' ({w})' for w in why)}"
    remedy = ""
    if names:
        problem += f", only {first_names(names)}"
        remedy = f" Name one of them, such as with --data.{use}-split {names[0]}."
    if source.kind == "folder":
        known = first_names(sorted({*source.splits, *source.unusable}), _NAMES_SHOWN)
        remedy += (
            f" If {known} are classes, give the folder above them, and --data.{use}-split {WHOLE}"
        )
    raise DataError(f"{problem}.{remedy}")


def _of_name(source: DataSet, asked: str, use: Use) -> str:
    """The split with that name, or the only one with a synonymous name (val, validation)."""
    flag = f"data.{use}_split = {quoted(asked)}"
    same = [name for name in source.splits if name.casefold() == asked.casefold()]
    matching = [
        name for name in source.splits if role_of(asked) and role_of(name) == role_of(asked)
    ]
    for found in (same, matching):
        if len(found) == 1:
            return found[0]
    if "" in source.splits:
        if role_of(asked) == "train":
            return ""
        raise DataError(f"{flag}: {source.shown} has no named splits.")
    for name, why in source.unusable.items():
        if name.casefold() == asked.casefold():
            raise DataError(f"{flag}: {source.shown} cannot be used: {why}.")
    raise DataError(
        f"{flag}: {source.shown} has no such split, only {first_names([*source.splits])}."
    )


def _located(source: DataSet, name: str, split: Use) -> Located:
    return Located(source.kind, source.paths(name), split, name, source.class_names)


def _unused_splits(source: DataSet, used: set[str | None], is_other: bool) -> Iterator[str]:
    """A sentence for each existing split that is not used.

    Args:
        is_other: it is not the source of the training data.
    """
    of = f" of {source.named_by}" if is_other else ""
    for name, files in source.splits.items():
        if name not in used and not (is_other and role_of(name) == "train"):
            noun = "folder" if source.kind == "folder" else "file"
            yield f"the {name} split{of} ({len(files)} {noun}{'s' * (len(files) > 1)}) is not used"
    for name, why in source.unusable.items():
        yield f"{name}{of} is not used: {why}"
