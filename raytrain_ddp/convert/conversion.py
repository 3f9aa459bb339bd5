"""From any source of images to a folder of Parquet shards: what `python -m raytrain_ddp.convert`
does. The shards do not depend on the number of processes, nor on how often it was stopped."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from raytrain_ddp.convert.dataset_file import FORMAT, read_dataset_file
from raytrain_ddp.convert.options import ConvertConfig
from raytrain_ddp.convert.pixels import PixelCounts, shrunk
from raytrain_ddp.convert.process_pool import Run
from raytrain_ddp.convert.shard_writer import (
    MIB,
    Phase,
    Record,
    ShardDone,
    ShardTask,
    finished_shard,
    read_image,
    write_shard,
)
from raytrain_ddp.convert.source_splits import SourceSplit, open_splits
from raytrain_ddp.convert.spool import SpoolListing
from raytrain_ddp.convert.staging import Stage, different
from raytrain_ddp.data.discovery import DATASET_FILE
from raytrain_ddp.data.permutation import sorted_permutation
from raytrain_ddp.data.sample_rng import Rows
from raytrain_ddp.data.sources import BadRecord
from raytrain_ddp.data.splits import Splits
from raytrain_ddp.errors import ConfigError, DataError, PreflightError
from raytrain_ddp.events import DataSummary
from raytrain_ddp.uri import without_secrets

_STREAM = 0x5EED_C0DE  # keeps this shuffle's random bits apart from those of training
_TRIED = 64  # images that are resized to foresee the size of all
_SLACK = 1.02  # what a shard has besides its images


@dataclass(frozen=True)
class Converted:
    """A complete data set.

    Args:
        dataset: the content of its ``dataset.json``.
        found: it was there already.
        told: of the source, see `Splits.summary`; None if the data set was there already.
    """

    folder: Path
    dataset: Mapping[str, Any]
    found: bool
    told: DataSummary | None = None


def convert(source: str, dest: str, config: ConvertConfig, run: Run, phase: Phase) -> Converted:
    """Converts `source` into the folder `dest`, or goes on with it, or finds it done.

    Raises:
        ConfigError: `dest` is something else, or was begun with another source or config.
        DataError: the source is missing or damaged.
        PreflightError: too little space, or `dest` cannot be written.
        RunLockedError: another process is at it.
    """
    stage = Stage(_check_dest(source, dest))
    given = {"source": without_secrets(source), "arguments": _shaping(config)}
    for place in (stage.dest, stage.folder):
        if (place / DATASET_FILE).is_file():
            dataset = read_dataset_file(place)
            _require_same(stage.dest, dataset, given)
            if place == stage.folder:  # stopped when all was done, but for the name
                with _told_of_disk(stage), stage.held():
                    stage.give_name()
            return Converted(stage.dest, dataset, found=place == stage.dest)
    splits, notes = open_splits(source, config)
    first = splits[1] if len(splits) > 1 else None
    data = Splits(
        splits[0].source,
        first.source if first else None,
        f"the {first.name} split" if first else "",
        notes,
    )
    data.begin_counting()
    with _told_of_disk(stage), stage.held():
        content = {split.name: split.fingerprint() for split in splits}
        versions = {"pyarrow": pa.__version__, "pillow": PIL.__version__}
        stage.begin({**given, "content": content, "written with": versions})
        classes = tuple(splits[0].class_names)
        done = [_convert_split(split, classes, stage, config, run, phase) for split in splits]
        dataset = _dataset(source, config, classes, done)
        stage.finish([file["path"] for file in dataset["files"]], dataset)
    return Converted(stage.dest, dataset, found=False, told=data.summary())


@dataclass(frozen=True)
class _SplitDone:
    name: str
    shards: list[ShardDone]
    skipped: list[dict[str, str]]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def _convert_split(
    split: SourceSplit,
    classes: tuple[str, ...],
    stage: Stage,
    config: ConvertConfig,
    run: Run,
    phase: Phase,
) -> _SplitDone:
    if split.kind != "folder":  # the images are there twice for a while
        _require_space(stage, 2 * split.size_bytes() - stage.size_bytes(split.name))
    listing = split.list_rows(stage, run, phase)
    if listing.bad and config.bad_records == "error":
        raise _bad_record(split, *next(iter(listing.bad.items())))
    order = np.arange(split.rows, dtype=np.int64)
    if config.shuffle:
        order = sorted_permutation(split.rows, config.seed, 0, _STREAM)
    order = order[listing.sizes[order] >= 0]
    size = _foreseen_bytes(listing, order, config)
    count = max(1, min(len(order), math.ceil(size / (config.shard_mib * MIB))))
    names = [f"{split.name}-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    found = (finished_shard(stage.folder, name, stage.part(name)) for name in names)
    done = {shard.name: shard for shard in found if shard is not None}
    _require_space(stage, int(size * _SLACK) - sum(shard.bytes for shard in done.values()))
    tell = phase(f"{split.name}: writing", len(order))
    tell(sum(shard.rows + len(shard.bad) for shard in done.values()), 0)
    sampled = _sampled(order, config) if split.name == "train" else frozenset[int]()
    tasks = (
        ShardTask(
            name=name,
            stage=str(stage.folder),
            records=records,
            sampled=sampled & {record.row for record in records},
            class_names=classes,
            config=config,
        )
        for name, records in _cut(listing, order, names)
        if name not in done
    )
    try:
        done.update({shard.name: shard for shard in run(write_shard, tasks, tell)})
    except BadRecord as bad:
        raise _bad_record(split, *bad.args) from None
    bad_rows = {**listing.bad, **{row: why for shard in done.values() for row, why in shard.bad}}
    if len(bad_rows) == split.rows:
        raise DataError(f"split {split.name!r}: none of its {split.rows} images can be decoded.")
    skipped = [
        {"split": split.name, "where": split.source.where(row), "why": why}
        for row, why in sorted(bad_rows.items())
    ]
    return _SplitDone(split.name, [done[name] for name in names], skipped)


def _cut(
    listing: SpoolListing, order: Rows, names: list[str]
) -> Iterator[tuple[str, list[Record]]]:
    """The order in runs of equal length (+-1), one per name."""
    for number, name in enumerate(names):
        start, stop = (n * len(order) // len(names) for n in (number, number + 1))
        yield name, [listing.record(row) for row in order[start:stop].tolist()]


def _sampled(order: Rows, config: ConvertConfig) -> frozenset[int]:
    """Rows evenly spaced in the order."""
    count = min(config.stats_images, len(order)) or len(order)
    return frozenset(order[np.arange(count) * len(order) // max(1, count)].tolist())


def _foreseen_bytes(listing: SpoolListing, order: Rows, config: ConvertConfig) -> int:
    """The size of all images as they will be written; if resized, judged by a few."""
    if not config.resize_short:
        return int(listing.sizes[order].sum())
    sizes = []
    for row in order[np.arange(_TRIED) * len(order) // _TRIED].tolist() if len(order) else ():
        with suppress(Exception):  # decoders raise what they like; the shard will say it
            content = read_image(listing.record(row))
            sizes.append(len(shrunk(content, config.resize_short, config.quality)))
    return int(np.mean(sizes) * len(order)) if sizes else 0


def _dataset(
    source: str, config: ConvertConfig, classes: tuple[str, ...], splits: list[_SplitDone]
) -> dict[str, Any]:
    pixels = PixelCounts.none()
    for shard in splits[0].shards:
        pixels = pixels.plus(shard.pixels)
    if not pixels.images:
        raise DataError("no image of those sampled can be decoded: give --stats-images 0 (all).")
    mean, std = pixels.mean_std()
    return {
        **FORMAT,
        "source": without_secrets(source),
        "seed": config.seed,
        "files": [
            {
                "path": shard.name,
                "split": split.name,
                "rows": shard.rows,
                "bytes": shard.bytes,
                "sha256": shard.sha256,
            }
            for split in splits
            for shard in split.shards
        ],
        "rows": {split.name: split.rows for split in splits},
        "class_names": list(classes),
        "mean": mean,
        "std": std,
        "sampled": {"images": pixels.images, "height": [*pixels.height], "width": [*pixels.width]},
        "skipped": [record for split in splits for record in split.skipped],
        "arguments": {**_shaping(config), "bad_records": config.bad_records},
    }


def _shaping(config: ConvertConfig) -> dict[str, Any]:
    """The arguments that the bytes depend on. What is done with bad records is not among them: a
    conversion that stopped at one can go on with another policy."""
    free = {"root", "bad_records"}
    given = asdict(config)
    # Left out as long as they say nothing: what was converted before they existed is the same.
    free |= {name for name in ("train_split", "eval_split", "config") if given[name] == "auto"}
    return {name: value for name, value in given.items() if name not in free}


def _check_dest(source: str, dest: str) -> Path:
    """The folder to write, as an absolute path without links."""
    if "://" in dest:
        raise ConfigError(f"DST {dest}: must be a folder that is mounted here; copy it then.")
    folder = Path(dest).expanduser().resolve()
    origin = Path(source).expanduser().resolve()
    if origin.is_dir() and (folder == origin or origin in folder.parents):
        raise ConfigError(f"DST {dest} lies in SRC {source}: give a folder outside it.")
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        kind = "a mount point" if folder.is_dir() else "a file"
        raise ConfigError(f"DST {dest} is {kind}: give a new folder.")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if names and DATASET_FILE not in names:
        raise ConfigError(
            f"DST {dest} has other files ({', '.join(names[:3])}{', ...' * (len(names) > 3)}): "
            "give a new folder."
        )
    return folder


def _require_same(dest: Path, dataset: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    made = {**dataset, "arguments": dict(dataset.get("arguments", {}))}
    made["arguments"].pop("bad_records", None)
    differences = different({name: made.get(name) for name in given}, given)
    if differences:
        raise ConfigError(
            f"{dest} is complete, but was made with other input: {'; '.join(differences)}. Give "
            "another folder, or delete it."
        )


def _bad_record(split: SourceSplit, row: int, why: str) -> DataError:
    return DataError(
        f"{split.source.where(row)}: not a readable image: {why.rstrip('.')}. Repair or remove it, "
        "or set --bad-records skip."
    )


def _require_space(stage: Stage, need: int) -> None:
    free = shutil.disk_usage(stage.folder).free
    if need > free:
        raise PreflightError(
            f"{stage.dest}: about {need / MIB:,.0f} MiB are needed, {free / MIB:,.0f} MiB are free."
        )


@contextmanager
def _told_of_disk(stage: Stage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PreflightError(
            f"{stage.dest}: cannot be written: {error}. What is done is kept in {stage.folder}: "
            "the same command goes on."
        ) from error
