"""Opens and lists the splits of a source for conversion, and computes their fingerprint. Imports
torch only for torchvision's own data sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.discovery.data_check import Located, locate, role_of
from raytrain_ddp.data.discovery.discovery import Kind
from raytrain_ddp.data.formats.image_folder import stats_of
from raytrain_ddp.data.formats.labels import NoLabelsError
from raytrain_ddp.data.splits import open_images, unused_fields
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.convert.shard_writer import Phase
from raytrain_ddp.tools.convert.spool import (
    SpoolListing,
    listing_of_files,
    listing_of_spool,
    parquet_chunks,
    spool_chunk,
    spool_images,
)
from raytrain_ddp.tools.convert.task_runners import TaskRunner

if TYPE_CHECKING:  # it opens splits
    from raytrain_ddp.tools.convert.destination import Stage


@dataclass(frozen=True)
class SourceSplit:
    """A split, with the name that its shards get."""

    name: str
    kind: Kind
    paths: tuple[str, ...]
    source: Any  # a FolderImages, ShardImages or TorchvisionImages
    data: DataConfig

    @property
    def rows(self) -> int:
        return int(self.source.blocks.sum())

    @property
    def class_names(self) -> list[str]:
        return list(self.source.class_names)

    @property
    def files(self) -> list[tuple[str, int]] | None:
        """(path, label) of each row, if each image is a file on this machine."""
        files: list[tuple[str, int]] | None = getattr(self.source, "files", None)
        return files

    def size_bytes(self) -> int:
        """Total size of its files of rows, as far as they are on this machine."""
        return sum(os.path.getsize(path) for path in self.paths if os.path.isfile(path))

    @cached_property
    def content(self) -> str:
        """What it is, as training compares it: without the times of files."""
        return str(self.source.fingerprint())

    def fingerprint(self) -> str:
        """Changes when rows, file sizes or modification times change."""
        kind = "parquet" if self.kind == "files" else self.kind  # as earlier versions wrote it
        digest = sha256(f"{kind} {self.content}".encode())
        files = self.paths if self.files is None else [path for path, _ in self.files]
        for seen in stats_of(files):  # a URI's files are identified by their footers
            known = None if isinstance(seen, OSError) else (seen.st_size, seen.st_mtime_ns)
            digest.update(f"{known}\n".encode())
        return digest.hexdigest()

    def list_rows(self, stage: Stage, run: TaskRunner, phase: Phase) -> SpoolListing:
        """Where each row's image can be read; all but files of their own are spooled first."""
        if self.files is not None:
            root = self.paths[0] if self.kind == "folder" else self.source.image_root
            return listing_of_files(self.files, root)
        tell = phase(f"{self.name}: reading", self.rows)
        if self.kind == "torchvision":
            names = list(spool_images(self.source, self.name, stage.folder, tell))
        else:
            chunks = parquet_chunks(self.name, stage.folder, self.paths, self.source, self.data)
            names = sorted(run(spool_chunk, chunks, tell))
        return listing_of_spool(stage.spool, names)


def open_source_splits(
    source: str, config: ConvertConfig
) -> tuple[list[SourceSplit], tuple[str, ...]]:
    """The splits that training on `source` would read, the train split first.

    Also returns sentences about data that is not converted.

    Raises:
        DataError: there is nothing to convert, or a split has a class that the train split lacks.
    """
    data = DataConfig(
        source=source,
        eval_source=config.eval_source,
        train_split=config.train_split,
        eval_split=config.eval_split,
        config=config.config,
        root=config.root,
        image_column=config.image_column,
        label_column=config.label_column,
        bad_records=config.bad_records,
    )
    found = locate(data, more=True)
    splits = [_open("train", found.train, data, None)]
    unused = unused_fields(splits[0].source, data)
    notes = [*found.notes, *(f"--{name.replace('_', '-')} {why}" for name, why in unused)]
    for part in (found.eval, *found.more):
        if part is not None:
            try:
                splits.append(_open(_name_of_shards(part), part, data, splits[0].class_names))
            except NoLabelsError as error:
                if config.eval_source is not None or config.eval_split != "auto":
                    raise
                notes.append(f"not converted: {error}")
    return splits, tuple(notes)


def _open(
    name: str, found: Located, data: DataConfig, classes: Sequence[str] | None
) -> SourceSplit:
    if found.kind != "torchvision":
        paths = (path if "://" in path else os.path.abspath(path) for path in found.paths)
        found = replace(found, paths=tuple(paths))
    return SourceSplit(name, found.kind, found.paths, open_images(found, data, classes), data)


def _name_of_shards(part: Located) -> str:
    """The split's name if it is for evaluation; else test."""
    name = part.name.lower()
    return name if role_of(name) in ("validation", "test") else "test"
