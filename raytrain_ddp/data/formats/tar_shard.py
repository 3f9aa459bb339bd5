"""Tar files of images and labels, as WebDataset has them, read at any row through an index.

The index of a file is made once per machine, and kept in ``~/.cache/raytrain_ddp`` (or below
``XDG_CACHE_HOME``). Samples are grouped as by webdataset 1.0, `tariterators.group_by_keys`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from posixpath import normpath
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.formats.image_folder import EXTENSIONS, leftover_in
from raytrain_ddp.data.formats.shard import (
    Columns,
    Opened,
    RowGroup,
    Shard,
    check_columns,
    column_of,
)
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import replace_with

_log = logging.getLogger("raytrain_ddp")
_GROUP_ROWS = 256
_GROUP_BYTES = 8 * 2**20
_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")  # key and suffix
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_META = re.compile(r"__[^/]*__($|/)")
_HASH_LENGTH = 64
_HIDDEN = (".*",)  # are data, as the folders of a tar file are no classes
_NAMES = "__name__"  # the column of the members' names
_VERSION = 4  # of the index

Members = Mapping[str, tarfile.TarInfo]  # of a sample, by suffix


@dataclass(frozen=True)
class TarShard(Shard):
    """A tar file. The digest is that of its index."""

    _modified_ns: int
    _index: Any  # name, offset and size of each row's image (null: there is none), label

    @property
    def left_out(self) -> list[str]:
        """The names of members that belong to no sample."""
        return list(json.loads(self._index.schema.metadata[b"left_out"]))

    def where_in(self, group: int, place: int) -> str:
        return f"{self.name}, {self._rows(group)['name'][place].as_py()}"

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        return pa.concat_tables([self._read_group(group, columns) for group in groups])

    def _read_group(self, group: int, columns: Sequence[str]) -> Any:
        rows, image = self._rows(group), self.groups[group].columns[0]
        made: dict[str, Any] = {}
        for column in columns:
            if column == image:
                made[column] = pa.array(self._images(rows), pa.binary())
            else:
                made[column] = rows["name" if column == _NAMES else "label"]
        return pa.table(made)

    def _rows(self, group: int) -> Any:
        return self._index.slice(self.starts()[group], self.groups[group].rows)

    def _images(self, rows: Any) -> Iterator[bytes | None]:
        """The images of consecutive rows, in one read.

        Raises:
            ValueError: the file is not the one that was indexed.
        """
        offsets, sizes, names = (rows[name].to_pylist() for name in ("offset", "size", "name"))
        known = [offset for offset in offsets if offset is not None]
        first = min(known, default=tarfile.BLOCKSIZE) - tarfile.BLOCKSIZE
        last = max((o + s for o, s in zip(offsets, sizes, strict=True) if o is not None), default=0)
        with open(self.at.path, "rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self._modified_ns):
                raise ValueError("it has changed since it was opened")
            file.seek(first)
            content = memoryview(file.read(last - first))
        for name, offset, size in zip(names, offsets, sizes, strict=True):
            if offset is None:
                yield None
                continue
            header = bytes(content[offset - first - tarfile.BLOCKSIZE : offset - first])
            try:
                is_right = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size == size
            except tarfile.HeaderError:
                is_right = False
            if not is_right:
                raise ValueError(f"the header of {name} is damaged")
            yield bytes(content[offset - first : offset - first + size])


def open_tar(at: Opened, columns: Columns) -> TarShard:
    """A tar file by its index, which is made if there is none.

    The image of a sample is its member `image_column`, by default the only one with the suffix of
    an image. Its label is the text of its member `label_column`, by default "cls"; or else the
    value of that name in its member "json".
    """
    if not isinstance(at.fs, pafs.LocalFileSystem):
        raise DataError(
            f"{at.name}: tar files are read from local disks only: download it, or convert it to "
            "Parquet where it is."
        )
    if not at.name.lower().endswith(".tar"):
        raise DataError(f"{at.name}: compressed, so single rows cannot be read: decompress it.")
    if columns.targets:
        raise DataError(
            f"{at.name}: data.target_columns are read from Parquet, Arrow and lists only: write "
            "the targets into a list of the images."
        )
    status = os.stat(at.path)
    index = _index_of(at, columns, status)
    label = index.schema.field("label").type
    schema = pa.schema([(columns.image, pa.binary()), (columns.label or "label", label)])
    _, _, kind = check_columns(at.name, schema, columns)
    digest = index.schema.metadata[b"digest"].decode()
    groups = tuple(_groups(index, columns))
    size, modified = status.st_size, status.st_mtime_ns
    return TarShard(at, size, digest, groups, kind, None, _NAMES, modified, index)


def _groups(index: Any, columns: Columns) -> Iterator[RowGroup]:
    """Runs of rows that are read at once, with all that lies between their images."""
    offsets, sizes = (index[name].to_pylist() for name in ("offset", "size"))
    used = columns.image, *columns.labels

    def group(stop: int) -> RowGroup:
        size = int(max(0, last - first))
        missing = index["size"][start:stop].null_count
        return RowGroup(stop - start, used, size, size, without_image=missing)

    start, first, last = 0, math.inf, 0  # its first row, and the bytes from header to end
    for row, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        begin = math.inf if offset is None else offset - tarfile.BLOCKSIZE
        end = 0 if offset is None else offset + size
        is_too_large = max(last, end) - min(first, begin) > _GROUP_BYTES
        if row - start == _GROUP_ROWS or (row > start and is_too_large):
            yield group(row)
            start, first, last = row, math.inf, 0
        first, last = min(first, begin), max(last, end)
    if offsets:
        yield group(len(offsets))


# ------------------------------------------------------------------ the index


def _index_of(at: Opened, columns: Columns, status: os.stat_result) -> Any:
    """The index from the cache, or a new one, which is stored there."""
    identity = (
        _VERSION,
        os.path.realpath(at.path),
        status.st_size,
        status.st_mtime_ns,
        *columns[:2],
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = home / "raytrain_ddp" / "tar-index"
    path = folder / f"{sha256(ascii(identity).encode()).hexdigest()[:32]}.arrow"
    found = _stored(path)
    if found is not None:
        return found
    with ExitStack() as held:  # the processes of a machine share the work
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context((folder / ".lock").open("w")), fcntl.LOCK_EX)
        except OSError as error:
            _log.warning("%s: the index of %s is not kept: %s", folder, at.name, error.strerror)
            return _made(at, columns)
        found = _stored(path)
        if found is None:
            found = _made(at, columns)
            _store(path, found)
    return found


def _stored(path: Path) -> Any:
    """None if there is no such index, or a damaged one."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, table = content[:_HASH_LENGTH], content[_HASH_LENGTH:]
    if sha256(table).hexdigest().encode() != digest:
        return None
    return pa.ipc.open_stream(table).read_all()


def _store(path: Path, table: Any) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    try:
        with replace_with(path, path.parent) as temp:
            temp.write_bytes(sha256(content).hexdigest().encode() + content)
    except (OSError, DataError) as error:  # such as a full disk
        _log.warning("%s: cannot be written: %s", path, error)


def _made(at: Opened, columns: Columns) -> Any:
    rows: dict[str, list[Any]] = {"name": [], "offset": [], "size": []}
    labels: list[Any] = []
    left_out: list[str] = []
    with open(at.path, "rb") as file:
        for key, members in _samples(at, file, left_out):
            suffix = _image_suffix(f"{at.name}, {key}", members, columns)
            image = members.get(suffix)
            name = key if image is None else image.name
            rows["name"].append(name.encode("utf-8", "replace").decode())
            rows["offset"].append(None if image is None else image.offset_data)
            rows["size"].append(None if image is None else image.size)
            labels.append(_label(f"{at.name}, {key}", members, columns, file.fileno()))
    column = column_of(columns.label, labels, at.name)
    if all(isinstance(label, str) and _WHOLE.fullmatch(label) for label in labels):
        labels = [*map(int, labels)]  # in the digest only, as in earlier versions
    digest = sha256()
    for row in zip(*rows.values(), labels, strict=True):
        digest.update(f"{row}\n".encode())
    types = {"name": pa.string(), "offset": pa.int64(), "size": pa.int64()}
    columns_of = {name: pa.array(rows[name], kind) for name, kind in types.items()}
    table = pa.table({**columns_of, "label": column})
    metadata = {"digest": digest.hexdigest(), "left_out": json.dumps(left_out)}
    return table.replace_schema_metadata(metadata)


def _samples(at: Opened, file: Any, left_out: list[str]) -> Iterator[tuple[str, Members]]:
    """Yields (key, members) of each sample; adds members that belong to no sample to `left_out`."""
    name, key, members = at.name, "", dict[str, tarfile.TarInfo]()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        # Without any, `next` fails in Python 3.10.
        has_members = tar.firstmember is not None  # type: ignore[attr-defined]
        while has_members and (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
            parts = _NAME.fullmatch(member.name)
            is_twice = normpath(member.linkname) == normpath(member.name)
            is_data = not _META.match(member.name) and not leftover_in(member.name, _HIDDEN)
            if member.linkname and is_data and not is_twice:
                raise DataError(
                    f"{name}, {member.name} -> {member.linkname}: links are not followed: make the "
                    "archive with tar --dereference --hard-dereference."
                )
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


def _image_suffix(where: str, members: Members, columns: Columns) -> str:
    """The suffix of the sample's image; "" if it has none."""
    if columns.image != DataConfig.image_column:
        return columns.image.lower()
    found = [suffix for suffix in members if f".{suffix}".endswith(EXTENSIONS)]
    if len(found) > 1:
        raise DataError(
            f"{where}: has several images ({', '.join(found)}): name one, such as with "
            f"--data.image-column {found[0]}."
        )
    return found[0] if found else ""


def _label(where: str, members: Members, columns: Columns, descriptor: int) -> Any:
    if not columns.label:
        return 0
    suffix = "cls" if columns.label == DataConfig.label_column else columns.label.lower()
    member = members.get(suffix) or members.get("json")
    if member is None:
        raise DataError(
            f"{where}: no label in a member {suffix} or json, only {', '.join(members)}. Set "
            "--data.label-column."
        )
    content = os.pread(descriptor, member.size, member.offset_data)
    try:
        if suffix not in members:
            return json.loads(content)[columns.label]
        return content.decode("utf-8-sig").strip()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        kind = "no value" if isinstance(error, KeyError) else "not a label"
        raise DataError(
            f"{where}.{suffix if suffix in members else 'json'}: {kind}: {error}."
        ) from None
