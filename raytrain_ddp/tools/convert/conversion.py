"""Converts any source of images to a folder of Parquet shards.

The shards depend on the source and the options only, not on who writes them, or on interruptions.
The folder is made as staging.py says; its parts are the records of complete shards, and the copies
of source_rows.py."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.data.order.permutation import sorted_permutation
from raytrain_ddp.errors import ConfigError, DataError, PreflightError, first_names
from raytrain_ddp.events import DataSummary
from raytrain_ddp.files import different, expanded, read_json, require_utf8, sha256_of, write_json
from raytrain_ddp.tools.convert.options import ConvertArgs
from raytrain_ddp.tools.convert.pixels import described, shrink_image
from raytrain_ddp.tools.convert.shard_writer import MIB, Record, ShardTask, images_of
from raytrain_ddp.tools.convert.source_rows import (
    Phase,
    Row,
    SourceSplit,
    Tell,
    list_rows,
    open_source_splits,
)
from raytrain_ddp.tools.staging import Staging
from raytrain_ddp.uri import without_secrets

_FORMAT = {"format": "raytrain_ddp", "version": 1}
_FIELDS = {"source", "arguments", "content", "files", "rows", "class_names", "mean", "std"}
_STREAM = 0x5EED_C0DE  # separates this shuffle's random bits from training's
_SAMPLED = 2000  # images of which mean and standard deviation are computed
_TRIED = 64  # images resized to estimate the total size
_FREE = {"source", "dest", "verify", "workers", "address", "root", "bad_records"}

Writer = Callable[[Iterable[ShardTask], Tell], Iterator[Record]]
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
    made = _made(folder, args.verify, phase)
    # A conversion that stopped at a bad record may continue with skip.
    arguments = {name: value for name, value in asdict(args).items() if name not in _FREE}
    plan = {"source": without_secrets(args.source), "arguments": arguments}
    try:
        splits, data = open_source_splits(args)
        plan["content"] = {split.name: split.source.fingerprint() for split in splits}
    except (DataError, PreflightError):
        if made is None:
            raise
        plan["content"] = made["content"]  # the source may be deleted once it is converted
    if made is not None:
        if changes := different({name: made[name] for name in plan}, plan):
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
        sums: list[list[int]] = []
        for split in splits:
            sums += _convert_split(split, dataset, stage, args, write, phase)
        dataset |= described(sums)
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


def _made(folder: Path, verify: bool, phase: Phase) -> dict[str, Any] | None:
    """The content of ``dataset.json``; None: there is no such file.

    Args:
        verify: every byte of the files is read.

    Raises:
        DataError: it is damaged; or a file that it lists is missing, or not as it was written.
    """
    if not folder.is_dir() or (content := read_json(folder / DATASET_FILE)) is None:
        return None
    if not _FORMAT.items() <= content.items() or _FIELDS - content.keys():
        raise DataError(f"{folder / DATASET_FILE}: is damaged: delete {folder}, and convert again.")
    files, wrong = content["files"], []
    tell = phase("verifying", sum(file["rows"] for file in files)) if verify else lambda *_: None
    with ThreadPoolExecutor() as pool:
        whole = pool.map(lambda file: _is_in(folder, file, verify), files)
        for file, is_whole in zip(files, whole, strict=True):
            wrong += [] if is_whole else [file["path"]]
            tell(file["rows"], file["bytes"])
    if wrong:
        names = first_names(wrong)
        raise DataError(f"{folder}: not as written: {names}. Delete {folder}, and convert again.")
    return content


def _is_in(folder: Path, file: dict[str, Any], verify: bool = False) -> bool:
    """Whether a file is there, and has its size, or even the content that was written."""
    path = folder / file["path"]
    is_in = path.is_file() and path.stat().st_size == file["bytes"]
    return bool(is_in and not (verify and sha256_of(path) != file["sha256"]))


def _convert_split(
    split: SourceSplit,
    dataset: dict[str, Any],
    stage: Staging,
    args: ConvertArgs,
    write: Writer,
    phase: Phase,
) -> list[list[int]]:
    """Writes the shards that are missing, and adds all to `dataset`. Returns `sums_of` the sampled
    images."""
    copy = stage.folder / f"{split.name}.arrow"
    listed = list_rows(split, copy, phase)
    bad: dict[int, str] = {}

    def require_good(more: Iterable[tuple[int, str]]) -> None:
        bad.update(more)
        for number in bad if args.bad_records == "error" else ():
            where, why = split.source.where(number), bad[number].rstrip(".")
            remedy = "Repair or remove it, or set --bad-records skip."
            raise DataError(f"{where}: not a readable image: {why}. {remedy}")

    require_good((row.number, row.why) for row in listed if row.why)
    order = range(len(listed))
    if args.shuffle:
        order = sorted_permutation(len(listed), args.seed, 0, _STREAM).tolist()
    rows = [listed[number] for number in order if not listed[number].why]
    if split.name == "train":  # at equal distances in the order
        images = min(_SAMPLED, len(rows))
        places = {place * len(rows) // images for place in range(images)}
        rows = [row._replace(is_sampled=place in places) for place, row in enumerate(rows)]
    shards = math.ceil(_foreseen_bytes(rows, copy, args) / (args.shard_mib * MIB))
    shards = max(1, min(len(rows), shards))
    bounds = [number * len(rows) // shards for number in range(shards + 1)]
    fixed = (copy, split.source.class_names, args)
    tasks = [
        ShardTask(
            f"{split.name}-{number:05d}-of-{shards:05d}.parquet",
            stage.folder,
            rows[bounds[number] : bounds[number + 1]],
            *fixed,
        )
        for number in range(shards)
    ]
    found = {task.name: read_json(stage.folder / f"{task.name}.json") for task in tasks}
    done = {name: each for name, each in found.items() if each and _is_in(stage.result, each)}
    require_good(each for record in done.values() for each in record["bad"])
    missing = [task for task in tasks if task.name not in done]
    tell = phase(f"{split.name}: writing", len(rows))
    tell(len(rows) - sum(len(task.rows) for task in missing), 0)
    for record in write(missing, tell):
        done[record["path"]] = record
        require_good(record["bad"])
    records = [done[task.name] for task in tasks]
    kept = sum(record["rows"] for record in records)
    if not kept:
        raise DataError(f"split {split.name!r}: none of its {len(listed)} images can be decoded.")
    dataset["rows"][split.name] = kept
    for record in records:
        about = {name: record[name] for name in ("path", "rows", "bytes", "sha256")}
        dataset["files"].append({"split": split.name, **about})
    for number, why in sorted(bad.items()):
        where = split.source.where(number)
        dataset["skipped"].append({"split": split.name, "where": where, "why": why})
    return [each for record in records for each in record["sums"]]


def _foreseen_bytes(rows: list[Row], copy: Path, args: ConvertArgs) -> int:
    """The size of all images; if resized, extrapolated from a sample."""
    if not args.resize_short:
        return sum(row.size for row in rows)
    sizes = []
    tried = [rows[place * len(rows) // _TRIED] for place in range(_TRIED if rows else 0)]
    for _, content in images_of(tried, copy):
        with suppress(Exception):  # decoders raise any type; writing the shard reports it
            assert isinstance(content, bytes)
            sizes.append(len(shrink_image(content, args.resize_short, args.quality)))
    return int(np.mean(sizes) * len(rows)) if sizes else 0
