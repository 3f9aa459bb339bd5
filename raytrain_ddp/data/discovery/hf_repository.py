"""Hugging Face data sets: repositories, data sets by name, and what `save_to_disk` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from raytrain_ddp.data.discovery.file_listing import FileListing
from raytrain_ddp.data.discovery.split_names import NoSuchConfigError, Splits
from raytrain_ddp.data.formats.file_formats import format_of
from raytrain_ddp.data.formats.labels import names_in
from raytrain_ddp.data.formats.shard import leads_out
from raytrain_ddp.errors import (
    DataError,
    PreflightError,
    RaytrainError,
    first_names,
    in_one_line,
    quoted,
)

T = TypeVar("T")

BY_NAME = "hf:"
"""The prefix of a data set that `datasets` loads: of its name on the Hub, or of its folder."""

_README = "README.md"
_DECLARED = re.compile(rb"^(configs|dataset_info)[ \t]*:", re.MULTILINE)
_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"  # of save_to_disk


@dataclass(frozen=True)
class Repository:
    """One config of a repository, as `datasets` resolves it.

    Args:
        splits: the files of each split, sorted.
        class_names: class names of each label column that README.md declares.
        others: the names of the other configs.
    """

    splits: Splits
    class_names: Mapping[str, Sequence[str]]
    others: tuple[str, ...]


def is_repository(listing: FileListing) -> bool:
    """Whether README.md declares configs, or the features of rows in files."""
    if listing.pattern or _README not in listing.files:
        return False
    front = listing.content(_README).lstrip(b"\xef\xbb\xbf\r\n ")
    if not front.startswith(b"---"):
        return False
    declared = _DECLARED.findall(front.partition(b"\n---")[0])
    has_rows = any(format_of(n) and PurePosixPath(n).stem != "metadata" for n in listing.files)
    return b"configs" in declared or (b"dataset_info" in declared and has_rows)


def resolved(listing: FileListing, asked: str, more: Sequence[str] = ()) -> Repository:
    """Lets `datasets` resolve the files of a config. It sees empty files of the same names, so all
    stores are the same to it, and their files are not read.

    Args:
        asked: the name of the config; "auto": the default one.
        more: names of missing files, resolved as if they existed.

    Raises:
        NoSuchConfigError: there is no config with that name.
        DataError: there are several and none is the default, or `datasets` reports an error.
    """
    with TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "data"
        for name in (name for name in (*listing.files, *more) if not leads_out(name)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        (root / _README).write_bytes(listing.content(_README))
        with _reported(
            f"{listing.shown}: datasets cannot resolve its {_README}",
            " Correct it, copy missing files, or specify the files of a split by a glob.",
            str(root),
        ):
            builder = _builder(str(root), f"{folder}/cache", listing.shown, asked)
            found = dict(builder.config.data_files)
            features = builder.info.features.to_dict() if builder.info.features else {}
        outside = [p for paths in found.values() for p in paths if not Path(p).is_relative_to(root)]
        if outside:
            raise DataError(
                f"{listing.shown}: its {_README} names files outside the data set's folder, such "
                f"as {quoted(outside[0])}."
            )
    return Repository(
        splits={
            str(split): sorted({str(PurePosixPath(path).relative_to(root)) for path in paths})
            for split, paths in found.items()
        },
        class_names={k: names for k, v in features.items() if (names := names_in(v))},
        others=tuple(name for name in builder.builder_configs if name != builder.config.name),
    )


def loaded(source: str, shown: str, asked: str) -> Splits:
    """Lets `datasets` download and prepare ``hf:NAME`` in its cache on this machine. Returns the
    Arrow files of each split.

    Raises:
        NoSuchConfigError, DataError: as `resolved`.
        PreflightError: the Hub cannot be reached.
    """
    with _reported(f"{shown}: datasets cannot load it"):
        builder = _builder(source.removeprefix(BY_NAME), None, shown, asked)
        builder.download_and_prepare()
        tables = builder.as_dataset()
    return {
        str(split): [str(file["filename"]) for file in table.cache_files]
        for split, table in tables.items()
    }


def _builder(path: str, cache: str | None, shown: str, asked: str) -> Any:
    import datasets  # takes a second, and few data sets need it

    try:
        name = None if asked == "auto" else asked
        return datasets.load_dataset_builder(path, name, cache_dir=cache)
    except ValueError:
        names = datasets.get_dataset_config_names(path)
        if asked not in ("auto", *names):
            raise NoSuchConfigError(
                f"{shown} has no config {quoted(asked)}, only {first_names(names)}."
            ) from None
        if asked != "auto":
            raise
        if len(names) > 1:
            raise DataError(
                f"{shown} has several configs: {first_names(names)}. Name one with --data.config."
            ) from None
        return datasets.load_dataset_builder(path, names[0], cache_dir=cache)


@contextmanager
def _reported(what: str, remedy: str = "", folder: str = "\0") -> Iterator[None]:
    """Turns errors of `datasets` into ours, without the name of a temporary folder."""
    try:
        yield
    except RaytrainError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        text = str(cause).replace(f"{folder}/", "").replace(folder, "its folder")
        reason = in_one_line(" ".join(text.split()).rstrip("."), 500) or type(cause).__name__
        kind = PreflightError if isinstance(error, ConnectionError) else DataError
        raise kind(f"{what}: {reason}.{remedy}") from None


def saved_to_disk(listing: FileListing) -> Splits | None:
    """The files of each split, if this is what `save_to_disk` of `datasets` writes, a Dataset or a
    DatasetDict; otherwise None.

    Raises:
        DataError: a file of it is missing or damaged.
    """
    folders = {"": ""} if {_STATE, _INFO} <= {*listing.files} else {}
    if _SPLITS in listing.files:
        names = _content(listing, _SPLITS, lambda found: [*map(str, found["splits"])])
        folders = {name: f"{name}/" for name in names}
    found = {
        split: _content(listing, f"{folder}{_STATE}", _file_names)
        for split, folder in folders.items()
    }
    return {split: [folders[split] + n for n in names] for split, names in found.items()} or None


def _file_names(state: Any) -> list[str]:
    return [str(file["filename"]) for file in state["_data_files"]]


def _content(listing: FileListing, name: str, part: Callable[[Any], T]) -> T:
    """A part of a JSON file."""
    if name not in listing.files:
        raise DataError(f"{listing.shown}: {name} is missing: copy it again.")
    try:
        return part(json.loads(listing.content(name)))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{listing.shown}: {name} is damaged: copy it again.") from None
