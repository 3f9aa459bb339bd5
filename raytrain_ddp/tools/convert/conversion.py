"""Converts any source of images to a folder of Parquet shards.

The shards depend on the source and the options only, not on who writes them, or on interruptions.
The folder is made as staging.py says; its parts are the records of complete shards, and the copies
of source_rows.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
import pyarrow as pa

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import DATASET_FILE, locate
from raytrain_ddp.data.order import sorted_permutation
from raytrain_ddp.errors import ConfigError, DataError, PreflightError, first_names
from raytrain_ddp.events import DataSummary
from raytrain_ddp.files import expanded
from raytrain_ddp.tools.convert.shard_writer import MIB, Record, ShardTask
from raytrain_ddp.tools.convert.source_rows import (
    Phase,
    SourceSplit,
    list_rows,
    open_source_splits,
)
from raytrain_ddp.tools.staging import Staging, different, read_json, require_utf8, write_json
from raytrain_ddp.uri import without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.tools.convert.__main__ import ConvertArgs

_FORMAT = {"format": "raytrain_ddp", "version": 1}
_STREAM = 0x5EED_C0DE  # separates this shuffle's random bits from training's
_FREE = {"source", "dest", "workers", "address", "root", "bad_records"}

Writer = Callable[[Iterable[ShardTask]], Iterator[Record]]
"""Writes shards, in any order."""


def convert(
    args: ConvertArgs, write: Writer, phase: Phase
) -> tuple[dict[str, Any], DataSummary | None]:
    """Converts a source, continues an earlier conversion, or finds it complete. Returns the content
    of ``dataset.json`` and a summary of the source; None: the data set was complete.

    Raises:
        ConfigError: the folder is something else, or is of another source or config.
        DataError: the source or the data set is damaged.
        PreflightError: the folder cannot be written.
        RunLockedError: another process is converting into it.
    """
    folder = _require_place(args)
    made = _made(folder)
    # A conversion that stopped at a bad record may continue with skip.
    arguments = {name: value for name, value in asdict(args).items() if name not in _FREE}
    plan = {"source": without_secrets(args.source), "arguments": arguments}
    try:
        splits, data = open_source_splits(args)
        plan["content"] = {split.name: split.source.fingerprint() for split in splits}
    except (DataError, PreflightError):
        if made is None:
            raise
        plan["content"] = made.get("content", {})  # the source may be deleted once it is converted
    if made is not None:
        if changes := different({name: made.get(name) for name in plan}, plan):
            what = f"DST {args.dest} is complete, but of other input ({'; '.join(changes)})"
            raise ConfigError(f"{what}: use another folder, or delete it.")
        return made, None
    stage = Staging(folder, "converting", f"DST {args.dest}")
    with stage.held(), stage.writing():
        versions = {"pyarrow": pa.__version__, "pillow": PIL.__version__}
        stage.begin({**plan, "written with": versions})
        stage.result.mkdir(exist_ok=True)
        names = {"class_names": splits[0].source.class_names}
        dataset = {**_FORMAT, **plan, **names, "files": [], "rows": {}, "skipped": []}
        for split in splits:
            _convert_split(split, dataset, stage, args, write, phase)
        write_json(stage.result / DATASET_FILE, dataset, stage.folder)
        stage.finish()
    return dataset, data.summary()


def _require_place(args: ConvertArgs) -> Path:
    """The folder to write, as an absolute path without links."""
    folder, source = expanded(args.dest).resolve(), Path(args.source)
    if "://" not in args.source:
        source = expanded(args.source).resolve()
    require_utf8("SRC", source)
    require_utf8("DST", folder)
    wrong = ""
    if source.is_dir() and (folder == source or source in folder.parents):
        wrong = f"is inside SRC {args.source}"
    elif folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        wrong = "is a file or a mount point"
    elif folder.exists() and not (folder / DATASET_FILE).exists() and (names := os.listdir(folder)):
        wrong = f"has other files ({first_names(sorted(names), 3)})"
    if wrong:
        raise ConfigError(f"DST {args.dest} {wrong}: use a new folder.")
    return folder


def _made(folder: Path) -> dict[str, Any] | None:
    """The content of ``dataset.json``; None: there is no such file.

    Raises:
        DataError: it is damaged, or a file that it lists is missing or has the wrong size.
    """
    if not folder.is_dir() or (content := read_json(folder / DATASET_FILE)) is None:
        return None
    locate(DataConfig(source=str(folder), eval_split="none"))
    return content


def _convert_split(
    split: SourceSplit,
    dataset: dict[str, Any],
    stage: Staging,
    args: ConvertArgs,
    write: Writer,
    phase: Phase,
) -> None:
    """Writes the shards that are missing, and adds all shards to `dataset`."""
    source, copy = split.source, stage.folder / f"{split.name}.arrow"
    rows = list_rows(split, copy, phase)
    order = np.arange(len(rows))
    if args.shuffle:
        order = sorted_permutation(len(rows), args.seed, 0, _STREAM)
    size = sum(row.size for row in rows)
    shards = max(1, min(len(rows), math.ceil(size / (args.shard_mib * MIB))))
    tasks = [
        ShardTask(
            f"{split.name}-{number:05d}-of-{shards:05d}.parquet",
            stage.folder,
            [rows[place] for place in places.tolist()],
            copy,
            source.class_names,
            args,
        )
        for number, places in enumerate(np.array_split(order, shards))
    ]
    records = {task.name: read_json(stage.folder / f"{task.name}.json") for task in tasks}
    done = [record for record in records.values() if record]
    missing = [task for task in tasks if not records[task.name]]
    tell = phase(f"{split.name}: writing", len(rows))
    bad: dict[int, str] = {}
    for record in chain(done, write(missing)):
        is_new = records[record["path"]] is None
        records[record["path"]] = record
        tell(record["rows"] + len(record["bad"]), record["bytes"] * is_new)
        bad |= dict(record.pop("bad"))
        for number in bad if args.bad_records == "error" else ():
            where, why = source.where(number), bad[number].rstrip(".")
            remedy = "Repair or remove it, or set --bad-records skip."
            raise DataError(f"{where}: not a readable image: {why}. {remedy}")
    if len(bad) == len(rows):
        raise DataError(f"split {split.name!r}: none of its {len(rows)} images can be decoded.")
    dataset["rows"][split.name] = len(rows) - len(bad)
    dataset["files"] += [{"split": split.name, **(records[task.name] or {})} for task in tasks]
    dataset["skipped"] += [
        {"split": split.name, "where": source.where(number), "why": bad[number]}
        for number in sorted(bad)
    ]
