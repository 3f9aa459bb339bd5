"""Tar files of images and labels, as WebDataset has them, read at any row through an index.

The index of a file is made once per machine, and kept in ``~/.cache/raytrain_ddp`` (or below
``XDG_CACHE_HOME``). Samples are grouped as by webdataset 1.0, `tariterators.group_by_keys`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.file_listing import EXTENSIONS, leftover_in
from raytrain_ddp.data.formats.shard import (
    Opened,
    RowGroup,
    Shard,
    column_of,
    columns_of_images,
    rows_in,
    shard_of,
)
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import replace_with

_log = logging.getLogger("raytrain_ddp")
_GROUP_ROWS = 256
_GROUP_BYTES = 8 * 2**20
_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")  # key and suffix
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_META = re.compile(r"__[^/]*__($|/)")
_HIDDEN = (".*",)  # are data, as the folders of a tar file are no classes
_NAMES, *_SPAN = "__name__", "__offset__", "__size__"  # columns: the members' names and places
_VERSION = 5  # of the index
_DIGEST_BYTES = 32

Members = Mapping[str, tarfile.TarInfo]  # of a sample, by suffix


def open_tar(at: Opened, config: DataConfig, binary: bool) -> Shard:
    """Opens a tar file by its index, which is made if there is none; the digest is the index's.

    The image of a sample is its member `image_column`, by default the only one with the suffix of
    an image. Its label is the text of its member `label_column`, by default "cls"; or else the
    value of that name in its member "json".
    """
    at.require_local("tar")
    if not at.name.lower().endswith(".tar"):
        raise DataError(f"{at.name}: compressed, so single rows cannot be read: decompress it.")
    if config.target_columns:
        raise DataError(
            f"{at.name}: data.target_columns are read from Parquet, Arrow and lists only: write "
            "the targets into a list of the images."
        )
    status = os.stat(at.path)
    index = _index_of(at, config, status)
    schema, metadata = index.schema, index.schema.metadata
    schema = schema.append(pa.field(config.image_column, pa.binary()))
    images, _ = columns_of_images(at.name, schema, config, binary)
    groups = [*_groups(rows_in(index, _SPAN), images)]
    listed = shard_of(
        at,
        index,
        groups,
        size_bytes=status.st_size,
        digest=metadata[b"digest"].decode(),
        images=images,
        path_column=_NAMES,
        left_out=json.loads(metadata[b"left_out"]),
    )

    def load(chosen: Sequence[int], names: Sequence[str]) -> Any:
        kept = [name for name in names if name != config.image_column]
        found = listed.load(chosen, [*kept, *_SPAN])
        if config.image_column in names:
            spans = [listed.load([group], _SPAN) for group in chosen]
            read = [_images(at.path, status, span) for span in spans]
            found = found.append_column(config.image_column, pa.chunked_array(read, pa.binary()))
        return found

    def where_in(group: int, place: int) -> str:
        return f"{at.name}, {listed.load([group], [_NAMES])[_NAMES][place].as_py()}"

    return replace(listed, load=load, where_in=where_in)


def _images(path: str, status: os.stat_result, spans: Any) -> Any:
    """The images at consecutive spans (null: there is none), in one read.

    Raises:
        ValueError: the file is not the one that was indexed.
    """
    pairs = rows_in(spans, _SPAN)
    known = [pair for pair in pairs if pair[0] is not None] or [(0, 0)]
    first, last = min(known)[0], max(offset + size for offset, size in known)
    with open(path, "rb") as file:
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise ValueError("it has changed since it was opened")
        file.seek(first)
        content = memoryview(file.read(last - first))
    images = [None if o is None else bytes(content[o - first : o - first + n]) for o, n in pairs]
    return pa.array(images, pa.binary())


def _groups(spans: Sequence[tuple[int | None, int]], images: tuple[str, ...]) -> Iterator[RowGroup]:
    """Runs of rows that are read at once, with all that lies between their images."""
    rows, size_bytes, ends = 0, 0, list[int]()  # of the group; where its bytes begin and end
    for offset, size in spans:
        own = [] if offset is None else [offset - tarfile.BLOCKSIZE, offset + size]
        both = [*ends, *own]
        is_full = rows == _GROUP_ROWS or max(both, default=0) - min(both, default=0) > _GROUP_BYTES
        if rows and is_full:
            yield RowGroup(rows, size_bytes, size_bytes, images)
            rows, both = 0, own
        ends = [min(both), max(both)] if both else []
        rows, size_bytes = rows + 1, ends[1] - ends[0] if ends else 0
    if rows:
        yield RowGroup(rows, size_bytes, size_bytes, images)


# ------------------------------------------------------------------ the index


def _index_of(at: Opened, config: DataConfig, status: os.stat_result) -> Any:
    """The index from the cache, or a new one, which is stored there."""
    place = os.path.realpath(at.path), status.st_size, status.st_mtime_ns
    identity = ascii((_VERSION, *place, config.image_column, config.label_column))
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = home / "raytrain_ddp" / "tar-index"
    path = folder / f"{sha256(identity.encode()).hexdigest()[:32]}.arrow"
    with ExitStack() as held:  # the processes of a machine share the work
        kept = b""
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context((folder / ".lock").open("w")), fcntl.LOCK_EX)
            kept = path.read_bytes()
        digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if sha256(content).digest() != digest:  # there is none, or a damaged one
            index, sink = _made(at, config), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, index.schema) as writer:
                writer.write_table(index)
            content = sink.getvalue().to_pybytes()
            try:
                with replace_with(path, folder) as temp:
                    temp.write_bytes(sha256(content).digest() + content)
            except (OSError, DataError) as error:  # such as a full disk
                _log.warning("%s: the index of %s is not kept: %s", folder, at.name, error)
        return pa.ipc.open_stream(content).read_all()


def _made(at: Opened, config: DataConfig) -> Any:
    rows: list[tuple[str, int | None, int | None]] = []
    labels: list[Any] = []
    left_out: list[str] = []
    with open(at.path, "rb") as file:
        for key, members in _samples(at.name, file, left_out):
            where = f"{at.name}, {key}"
            suffix = _image_suffix(where, members, config)
            image = members.get(suffix)
            name = key if image is None else image.name
            span = (None, None) if image is None else (image.offset_data, image.size)
            rows.append((name.encode("utf-8", "replace").decode(), *span))
            labels.append(_label(where, members, suffix, config, file.fileno()))
    column = column_of(config.label_column, labels, at.name)
    if all(isinstance(label, str) and _WHOLE.fullmatch(label) for label in labels):
        labels = [*map(int, labels)]  # in the digest only, as in earlier versions
    digest = sha256()
    for row, label in zip(rows, labels, strict=True):
        digest.update(f"{(*row, label)}\n".encode())
    types = {_NAMES: pa.string(), **dict.fromkeys(_SPAN, pa.int64())}
    table = pa.table({name: [row[n] for row in rows] for n, name in enumerate(types)})
    table = table.cast(pa.schema([*types.items()]))
    table = table.append_column(config.label_column or "label", column)
    metadata = {"digest": digest.hexdigest(), "left_out": json.dumps(left_out)}
    return table.replace_schema_metadata(metadata)


def _samples(name: str, file: Any, left_out: list[str]) -> Iterator[tuple[str, Members]]:
    """Yields (key, members) of each sample; adds members that belong to no sample to `left_out`."""
    key, members = "", dict[str, tarfile.TarInfo]()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        # Without any, `next` fails in Python 3.10.
        has_members = tar.firstmember is not None  # type: ignore[attr-defined]
        while has_members and (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
            parts = _NAME.fullmatch(member.name)
            is_data = not _META.match(member.name) and not leftover_in(member.name, _HIDDEN)
            if not (parts and is_data and member.isreg()):
                left_out += [] if member.isdir() else [member.name]
                continue
            if member.issparse():
                raise DataError(
                    f"{name}, {member.name}: is stored as a sparse file: make the "
                    "archive without tar -S."
                )
            suffix = parts[2].lower()
            if members and parts[1] != key:
                yield key, members
                members = {}
            key = parts[1]
            if suffix in members:
                raise DataError(f"{name}, {member.name}: its sample has two members {suffix}.")
            members[suffix] = member
        file.seek(tar.offset)  # tarfile takes a damaged header for the end
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(
                f"{name}: truncated or damaged at byte {tar.offset}, after {key or 'its start'}."
            )
    if members:
        yield key, members


def _image_suffix(where: str, members: Members, config: DataConfig) -> str:
    """The suffix of the sample's image; "" if it has none."""
    if config.image_column != DataConfig.image_column:
        return config.image_column.lower()
    found = [suffix for suffix in members if f".{suffix}".endswith(EXTENSIONS)]
    if len(found) > 1:
        raise DataError(
            f"{where}: has several images ({', '.join(found)}): name one, such as with "
            f"--data.image-column {found[0]}."
        )
    return found[0] if found else ""


def _label(where: str, members: Members, image: str, config: DataConfig, descriptor: int) -> Any:
    if not config.label_column:
        return 0
    is_default = config.label_column == DataConfig.label_column
    suffix = "cls" if is_default else config.label_column.lower()
    found = suffix if suffix in members else "json"
    if found not in members:
        others = [each for each in members if each != image]
        raise DataError(
            f"{where}: no label in a member {suffix} or json, only {', '.join(members)}. Set "
            f"--data.label-column{f' {others[0]}' if len(others) == 1 else ''}."
        )
    content = os.pread(descriptor, members[found].size, members[found].offset_data)
    try:
        if found != suffix:
            return json.loads(content)[config.label_column]
        return content.decode("utf-8-sig").strip()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        kind = "no value" if isinstance(error, KeyError) else "not a label"
        raise DataError(f"{where}.{found}: {kind}: {error}.") from None
