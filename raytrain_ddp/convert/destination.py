"""Whether a folder is, or may become, what a conversion makes: its source, options and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_ddp.convert.options import ConvertConfig
from raytrain_ddp.convert.source_splits import SourceSplit, open_source_splits
from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.errors import ConfigError, DataError, PreflightError
from raytrain_ddp.files import different, expanded


def shaping(config: ConvertConfig) -> dict[str, Any]:
    """The options that the bytes depend on. The policy for bad records is not among them: a
    conversion that stopped at a bad record can be resumed with another policy."""
    free = {"root", "bad_records"}
    given = asdict(config)
    # Omitted at their defaults: data sets converted before these options existed are the same.
    free |= {name for name in ("train_split", "eval_split", "config") if given[name] == "auto"}
    return {name: value for name, value in given.items() if name not in free}


def check_dest(source: str, dest: str) -> Path:
    """The folder to write, as an absolute path without links."""
    if "://" in dest:
        raise ConfigError(f"DST {dest}: must be a folder on this machine; copy it afterward.")
    folder = expanded(dest).resolve()
    origin = expanded(source).resolve()
    if origin.is_dir() and (folder == origin or origin in folder.parents):
        raise ConfigError(f"DST {dest} is inside SRC {source}: use a folder outside it.")
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        kind = "a mount point" if folder.is_dir() else "a file"
        raise ConfigError(f"DST {dest} is {kind}: use a new folder.")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if names and DATASET_FILE not in names:
        raise ConfigError(
            f"DST {dest}: has other files ({', '.join(names[:3])}{', ...' * (len(names) > 3)}): "
            "use a new folder."
        )
    return folder


def require_same(dest: Path, dataset: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    made = {**dataset, "arguments": dict(dataset.get("arguments", {}))}
    made["arguments"].pop("bad_records", None)
    differences = different({name: made.get(name) for name in given}, given)
    if differences:
        raise ConfigError(
            f"{dest} is complete, but was made with other input: {'; '.join(differences)}. Use "
            "another folder, or delete it."
        )


def content_of(splits: Sequence[SourceSplit]) -> dict[str, str]:
    """What the splits are, by name."""
    return {split.name: split.content for split in splits}


def require_up_to_date(
    place: Path, dataset: Mapping[str, Any], source: str, config: ConvertConfig
) -> None:
    """Raises DataError if files are missing, or if the source is there and has changed since."""
    for file in dataset["files"]:
        path = place / file["path"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            what = "is missing" if not path.is_file() else "has another size"
            raise DataError(f"{path} {what}: delete {place}, and convert again.")
    if "content" not in dataset:  # an earlier version wrote it
        return
    try:
        splits, _ = open_source_splits(source, config)
    except (DataError, PreflightError):
        return  # a source may be deleted once it is converted
    content = content_of(splits)
    changed = [name for name in content if content[name] != dataset["content"].get(name)]
    if changed or len(content) != len(dataset["content"]):
        raise DataError(
            f"{source} has changed since it was converted into {place} "
            f"({', '.join(changed) or 'other splits'}): use another folder, or delete it."
        )
