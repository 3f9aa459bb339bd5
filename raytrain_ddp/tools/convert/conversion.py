"""Converts any source of images to a folder of Parquet shards.

The shards do not depend on the number of processes or on interruptions."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.permutation import sorted_permutation
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.data.splits import Splits, notes_of
from raytrain_ddp.errors import DataError, PreflightError
from raytrain_ddp.events import DataSummary
from raytrain_ddp.tools.convert.destination import (
    FORMAT,
    Stage,
    check_dest,
    content_of,
    read_dataset_file,
    require_same,
    require_up_to_date,
    seen_of,
    shaping,
)
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.convert.pixels import PixelCounts, shrink_image
from raytrain_ddp.tools.convert.shard_writer import (
    MIB,
    Phase,
    Record,
    ShardDone,
    ShardTask,
    finished_shard,
    read_image,
    write_shard,
)
from raytrain_ddp.tools.convert.source_splits import SourceSplit, open_source_splits
from raytrain_ddp.tools.convert.spool import SpoolListing
from raytrain_ddp.tools.convert.task_runners import TaskRunner
from raytrain_ddp.uri import without_secrets

_STREAM = 0x5EED_C0DE  # separates this shuffle's random bits from training's
_TRIED = 64  # images resized to estimate the total size
_SLACK = 1.02  # overhead of a shard over its images


@dataclass(frozen=True)
class Converted:
    """A complete data set.

    Args:
        dataset: the content of its ``dataset.json``.
        found: it existed already.
        summary: of the source, see `Splits.summary`; None if the data set existed.
        note: about the source, if the data set existed.
    """

    dataset: Mapping[str, Any]
    found: bool
    summary: DataSummary | None = None
    note: str = ""


def convert(
    source: str, dest: str, config: ConvertConfig, run: TaskRunner, phase: Phase
) -> Converted:
    """Converts `source` into the folder `dest`, resumes an earlier conversion, or finds it
    complete.

    Raises:
        ConfigError: `dest` is something else, or was started with another source or config.
        DataError: the source is missing or damaged.
        PreflightError: too little disk space, or `dest` cannot be written.
        RunLockedError: another process is converting into `dest`.
    """
    stage = Stage(check_dest(source, dest))
    given = {"source": without_secrets(source), "arguments": shaping(config)}
    for place in (stage.dest, stage.folder):
        if (place / DATASET_FILE).is_file():
            dataset = read_dataset_file(place)
            require_same(stage.dest, dataset, given)
            note = require_up_to_date(place, dataset, source, config)
            if place == stage.folder:  # stopped when only the final rename was missing
                with _reporting_disk_errors(stage), stage.held():
                    stage.give_name()
            return Converted(dataset, found=place == stage.dest, note=note)
    splits, notes = open_source_splits(source, config)
    first = splits[1] if len(splits) > 1 else None
    notes += tuple(notes_of(splits[0].source, "the training set"))
    for split in splits[1:]:
        notes += tuple(notes_of(split.source, f"the {split.name} split"))
    named = f"the {first.name} split" if first else ""
    data = Splits(splits[0].source, first.source if first else None, named, notes)
    data.begin_counting()
    with _reporting_disk_errors(stage), stage.held():
        content = seen_of(splits)
        versions = {"pyarrow": pa.__version__, "pillow": PIL.__version__}
        stage.begin({**given, "content": content, "written with": versions})
        classes = tuple(splits[0].class_names)
        done = [_convert_split(split, classes, stage, config, run, phase) for split in splits]
        dataset = _dataset(source, config, classes, done)
        dataset |= {"content": content_of(splits), "seen": content}
        stage.finish([file["path"] for file in dataset["files"]], dataset)
    return Converted(dataset, found=False, summary=data.summary())


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
    run: TaskRunner,
    phase: Phase,
) -> _SplitDone:
    if split.files is None:  # the images are temporarily stored twice
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
    """Divides the order into runs of equal length (+-1), one per name."""
    for number, name in enumerate(names):
        start, stop = (n * len(order) // len(names) for n in (number, number + 1))
        yield name, [listing.record(row) for row in order[start:stop].tolist()]


def _sampled(order: Rows, config: ConvertConfig) -> frozenset[int]:
    """Rows at equal distances in the order."""
    count = min(config.stats_images, len(order)) or len(order)
    return frozenset(order[np.arange(count) * len(order) // max(1, count)].tolist())


def _foreseen_bytes(listing: SpoolListing, order: Rows, config: ConvertConfig) -> int:
    """The estimated size of all images as written; if resized, extrapolated from a sample."""
    if not config.resize_short:
        return int(listing.sizes[order].sum())
    sizes = []
    for row in order[np.arange(_TRIED) * len(order) // _TRIED].tolist() if len(order) else ():
        with suppress(Exception):  # decoders raise any type; writing the shard reports it
            content = read_image(listing.record(row))
            sizes.append(len(shrink_image(content, config.resize_short, config.quality)))
    return int(np.mean(sizes) * len(order)) if sizes else 0


def _dataset(
    source: str, config: ConvertConfig, classes: tuple[str, ...], splits: list[_SplitDone]
) -> dict[str, Any]:
    pixels = PixelCounts.none()
    for shard in splits[0].shards:
        pixels = pixels.plus(shard.pixels)
    if not pixels.images:
        raise DataError("none of the sampled images can be decoded: set --stats-images 0 (all).")
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
        "arguments": {**shaping(config), "bad_records": config.bad_records},
    }


def _bad_record(split: SourceSplit, row: int, why: str) -> DataError:
    return DataError(
        f"{split.source.where(row)}: not a readable image: {why.rstrip('.')}. Repair or remove it, "
        "or set --bad-records skip."
    )


def _size(count: int) -> str:
    return f"{count / MIB:,.0f} MiB" if count >= 10 * MIB else f"{count / 1024:,.0f} KiB"


def _require_space(stage: Stage, need: int) -> None:
    free = shutil.disk_usage(stage.folder).free
    if need > free:
        raise PreflightError(
            f"{stage.dest}: about {_size(need)} is needed, but only {_size(free)} is free."
        )


@contextmanager
def _reporting_disk_errors(stage: Stage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = f" Finished work is kept in {stage.folder}: run the same command again to continue."
        raise PreflightError(
            f"{stage.dest}: cannot be written: {error}.{kept if stage.has_work() else ''}"
        ) from error
