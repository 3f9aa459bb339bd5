"""Hugging Face data sets: what a README.md declares, and what `save_to_disk` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raytrain_ddp.data.discovery.file_listing import FileListing, fits
from raytrain_ddp.data.discovery.split_names import NoSuchConfigError
from raytrain_ddp.data.formats.labels import names_in
from raytrain_ddp.data.formats.shard import leads_out
from raytrain_ddp.errors import DataError, first_names, quoted

_README = "README.md"
_RULE = "---"
_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"  # of save_to_disk


@dataclass(frozen=True)
class RepoConfig:
    """One of the `configs` of a README.md.

    Args:
        patterns: file patterns of each split; None: use the names of files and folders.
        folder: the base of all other paths; "" is the root.
        others: the names of the other configs.
    """

    patterns: Mapping[str, tuple[str, ...]] | None
    folder: str
    others: tuple[str, ...]


def repo_config(listing: FileListing, asked: str) -> RepoConfig | None:
    """The config to use, chosen as `datasets` does; None: README.md declares none.

    Args:
        asked: its name; "auto": the only one, the one named default, or the one marked as default.

    Raises:
        NoSuchConfigError: there is no config with that name.
        DataError: there are several and none is the default, or README.md is invalid.
    """
    entries = _entries(listing)
    if not entries:
        return None
    configs = {str(entry["config_name"]): entry for entry in entries}
    if asked != "auto" and asked not in configs:
        raise NoSuchConfigError(
            f"{listing.shown} has no config {quoted(asked)}, only {first_names(list(configs))}."
        )
    chosen = [
        name
        for name, entry in configs.items()
        if (name == asked)
        or (asked == "auto" and (len(configs) == 1 or name == "default" or entry.get("default")))
    ]
    if len(chosen) != 1:
        raise DataError(
            f"{listing.shown} has several configs: {first_names(list(configs))}. Name one with "
            "--data.config."
        )
    entry = configs[chosen[0]]
    folder = _below(listing, str(entry.get("data_dir") or ""))
    files = entry.get("data_files")
    patterns = None if files is None else _patterns(listing, files)
    others = tuple(name for name in configs if name != chosen[0])
    return RepoConfig(patterns, folder, others)


def class_names_of(listing: FileListing, asked: str) -> dict[str, list[str]]:
    """Returns the class names of each label column that the `dataset_info` of README.md declares.

    Args:
        asked: the name of a config, see `repo_config`.
    """
    infos = _card(listing).get("dataset_info") or []
    try:
        infos = infos if isinstance(infos, list) else [infos]
        chosen = [i for i in infos if len(infos) < 2 or i["config_name"] in (asked, "default")]
        features = chosen[0].get("features") or [] if chosen else []
        return {each["name"]: names for each in features if (names := names_in(each))}
    except (AttributeError, TypeError, KeyError):
        raise _nonsense(listing, "dataset_info must have features, each with a name") from None


def files_of(patterns: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """The listed files that belong to each split."""
    return {split: [name for name in names if is_of(p, name)] for split, p in patterns.items()}


def is_of(patterns: Sequence[str], name: str) -> bool:
    """Whether a file of this name belongs to the split."""
    return any(fits(name, pattern) for pattern in patterns)


def saved_to_disk(listing: FileListing) -> dict[str, list[str]] | None:
    """The files of each split, if this is what `save_to_disk` of `datasets` writes, a Dataset or a
    DatasetDict; otherwise None.

    Raises:
        DataError: a file of it is missing or damaged, or it lies in a subfolder.
    """
    if {_STATE, _INFO} <= {*listing.files}:
        return {"": _data_files(listing, "")}
    if _SPLITS in listing.files:
        names = _json(listing, _SPLITS, "splits")
        return {str(name): _data_files(listing, f"{name}/") for name in names}
    below = [n for n in listing.files if PurePosixPath(n).name in (_STATE, _SPLITS)]
    if below and not listing.pattern and any(name.endswith(".arrow") for name in listing.files):
        folders = [str(PurePosixPath(name).parent) for name in below]
        raise DataError(
            f"{listing.shown}: what save_to_disk wrote is in {first_names(folders)}: specify that "
            "folder."
        )
    return None


def _data_files(listing: FileListing, folder: str) -> list[str]:
    files = _json(listing, f"{folder}{_STATE}", "_data_files")
    try:
        return [f"{folder}{file['filename']}" for file in files]
    except (TypeError, KeyError):
        raise _damaged(listing, f"{folder}{_STATE}") from None


def _json(listing: FileListing, name: str, key: str) -> list[Any]:
    if name not in listing.files:
        raise DataError(f"{listing.shown}: {name} is missing: copy it again.")
    try:
        found = json.loads(listing.content(name))[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(listing, name) from None
    if not isinstance(found, list):
        raise _damaged(listing, name)
    return found


def _damaged(listing: FileListing, name: str) -> DataError:
    return DataError(f"{listing.shown}: {name} is damaged: copy it again.")


def _card(listing: FileListing) -> dict[str, Any]:
    """Returns the YAML of README.md; empty if there is none."""
    if _README not in listing.files:
        return {}
    lines = listing.content(_README).decode("utf-8", "replace").lstrip("\ufeff\r\n ").splitlines()
    if not lines or lines[0].rstrip() != _RULE or _RULE not in map(str.rstrip, lines[1:]):
        return {}
    import yaml  # few data sets need it

    end = [line.rstrip() for line in lines[1:]].index(_RULE) + 1
    try:
        card = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{listing.shown}: the YAML of {_README} is damaged: {reason}.") from None
    return card if isinstance(card, dict) else {}


def _entries(listing: FileListing) -> list[dict[str, Any]]:
    entries = _card(listing).get("configs")
    if not entries:
        return []
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "config_name" in entry for entry in entries
    ):
        raise _nonsense(listing, "configs must be a list, each with a config_name")
    return entries


def _patterns(listing: FileListing, files: Any) -> dict[str, tuple[str, ...]]:
    """`data_files` in any of its forms."""
    if isinstance(files, str) or (
        isinstance(files, list) and all(isinstance(entry, str) for entry in files)
    ):
        files = [{"split": "train", "path": files}]
    found: dict[str, tuple[str, ...]] = {}
    for entry in files if isinstance(files, list) else [None]:
        if not isinstance(entry, dict) or {*entry} != {"split", "path"}:
            raise _nonsense(listing, "each entry of data_files must have a split and a path")
        paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        split = str(entry["split"])
        if split in found:
            raise _nonsense(listing, f"data_files has split {split} twice")
        found[split] = tuple(_below(listing, str(path)) for path in paths)
    return found


def _below(listing: FileListing, path: str) -> str:
    """A path or pattern below the root."""
    if leads_out(path):
        raise _nonsense(listing, f"{quoted(path)} is outside the data set's folder")
    return "" if path in ("", ".", "./") else str(PurePosixPath(path))


def _nonsense(listing: FileListing, reason: str) -> DataError:
    return DataError(f"{listing.shown}: {_README} is invalid: {reason}.")
