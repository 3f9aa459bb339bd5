"""A folder on a disk, NFS or an object store, with the few operations that checkpoints need."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.read_ahead import reading
from raytrain_ddp.checkpoint.streams import (
    CHUNK_BYTES,
    BytesLike,
    Content,
    no_one,
    read_hashed,
    write_hashed,
)
from raytrain_ddp.errors import ConfigError, PreflightError, UnreachableError, is_passing
from raytrain_ddp.files import absolute, fsync, walk
from raytrain_ddp.uri import (
    REACH_TIMEOUT_S,
    answer_within,
    fsspec_inside,
    open_uri,
    reason_of,
    shareable,
    uri_beside,
    without_secrets,
)

TEMP_PREFIX = ".tmp-"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_plain_name(name: object) -> bool:
    """Whether ``name`` is a file name that cannot lead out of its folder."""
    return isinstance(name, str) and name not in (".", "..") and bool(_PLAIN_NAME.fullmatch(name))


@dataclass(frozen=True)
class Storage:
    """A folder, which may not exist yet, at ``path`` of the pyarrow file system ``fs``.

    ``is_local`` says that ``path`` is a path of this operating system, where a rename is atomic
    and a write is durable only after fsync. In object stores, closing a stream is one atomic PUT.
    All names are plain (letters, digits, ``. _ -``, at most 128): any other raises ConfigError.
    Every method raises OSError if the store does not respond or is full.
    """

    fs: Any  # a pyarrow.fs.FileSystem; pyarrow has no type hints
    path: str
    is_local: bool
    opened_as: str = field(default="", compare=False)  # the URI of it or a parent, without secrets

    def __str__(self) -> str:
        if self.is_local:
            return self.path
        if inner := fsspec_inside(self.fs):
            return str(inner.unstrip_protocol(self.path))
        scheme = str(self.fs.type_name)
        return f"{'gs' if scheme == 'gcs' else scheme}://{self.path}"

    @property
    def address(self) -> str:
        """The path or URI that opens it, with the options that locate its store."""
        if self.is_local or not self.opened_as:
            return str(self)
        return uri_beside(self.opened_as, self.path)

    def join(self, name: str) -> Storage:
        """The folder called ``name`` in this one."""
        return replace(self, path=self._at(name))

    def mkdir(self) -> None:
        """Creates this folder and its parents durably."""
        if self.fs.type_name in ("s3", "gcs"):
            return  # no folders there, and creating one needs rights on the whole bucket
        missing = [Path(self.path), *Path(self.path).parents] if self.is_local else []
        missing = [folder for folder in missing if not folder.exists()]
        self.fs.create_dir(self.path, recursive=True)
        for folder in missing:
            fsync(str(folder.parent))

    def names(self) -> list[str]:
        """The files and folders directly in this folder; empty if it does not exist."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            with suppress(FileNotFoundError):  # names that are not UTF-8 are not ours
                return sorted(filter(str.isprintable, os.listdir(self.path)))
            return []
        # GCS lists folders only if an object has their name; adlfs lists all that is below.
        infos = self._infos(recursive=self.fs.type_name == "gcs")
        return sorted({self._below(info).partition("/")[0] for info in infos})

    def walk(self) -> list[str]:
        """Relative paths of everything below, sorted; those of folders end with ``/``."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            return sorted(walk(self.path))
        found = {
            self._below(info) + ("/" if _is_folder(info) else "")
            for info in self._infos(recursive=True)
        }
        folders = {f"{parent}/" for name in found for parent in PurePosixPath(name).parents[:-1]}
        return sorted(found | folders)

    def size_bytes(self, name: str) -> int | None:
        """The size of a file; None if it does not exist or is a folder or a symbolic link."""
        if self.is_local and os.path.islink(self._at(name)):
            return None
        info = self._info(name)
        return int(info.size) if info.type == pafs.FileType.File else None

    def exists(self, name: str) -> bool:
        """Whether a file called ``name`` exists here."""
        return self.size_bytes(name) is not None

    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError if there is none."""
        return b"".join(self._chunks(name))

    def read_into(
        self,
        name: str,
        views: Sequence[memoryview],
        on_chunk: Callable[[memoryview], None] = no_one,
    ) -> str:
        """Reads a file into memory of its size; see `read_hashed`."""
        with reading(self.fs, self._at(name), sum(map(len, views))) as stream:
            return read_hashed(stream, views, on_chunk)

    def read_part(self, name: str, offset: int, most_bytes: int) -> bytes:
        """At most this many bytes of a file from `offset` on; fewer at its end."""
        with self.fs.open_input_file(self._at(name)) as file:
            return bytes(file.read_at(most_bytes, offset))

    def sha256(self, name: str) -> str:
        """The hex digest of a stored file, read in chunks."""
        digest = hashlib.sha256()
        for chunk in self._chunks(name, self.size_bytes(name) or 0):
            digest.update(chunk)
        return digest.hexdigest()

    def write(self, name: str, data: Content) -> tuple[int, str]:
        """Writes a file durably, but not atomically; returns its size in bytes and hex sha256."""
        return self._write(self._at(name), data)

    def write_atomic(self, name: str, data: BytesLike) -> None:
        """Writes a file durably and atomically: readers see either the old or the new content."""
        if not self.is_local:
            self._write(self._at(name), data)
            return
        temp = self._at(f"{TEMP_PREFIX}{uuid.uuid4().hex}")
        try:
            self._write(temp, data)
            self.fs.move(temp, self._at(name))
        except Exception:
            with suppress(OSError):
                self.fs.delete_file(temp)
            raise
        fsync(self.path)

    def rename(self, old: str, new: str) -> None:
        """Renames a file or folder in this folder; object stores cannot rename folders."""
        self.fs.move(self._at(old), self._at(new))
        self._sync()

    def delete_file(self, name: str) -> None:
        """Deletes a file durably; does nothing if it does not exist."""
        with suppress(FileNotFoundError):
            self.fs.delete_file(self._at(name))
        self._sync()

    def delete_dir(self, name: str) -> None:
        """Deletes the folder called ``name`` and its content; does nothing if it does not exist."""
        try:
            self.fs.delete_dir(self._at(name))
        except OSError as error:  # GCS has no error of its own for a folder that does not exist
            if not isinstance(error, FileNotFoundError) and self.join(name).walk():
                raise

    def sweep(self) -> None:
        """Removes temporary files of killed `write_atomic` and `clock_s` calls in this folder."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            names = list(walk(self.path, deep=False))
        else:
            infos = self._infos(recursive=False)
            names = [self._below(info) for info in infos if not _is_folder(info)]
        for name in names:
            if name.startswith(TEMP_PREFIX) and "/" not in name:
                self.delete_file(name)

    def changed_s(self, name: str) -> float | None:
        """When a file was last written, by the clock of `clock_s`; None if it does not exist."""
        info = self._info(name)
        if info.type != pafs.FileType.File:
            return None
        if info.mtime_ns is None:  # of most file systems of fsspec
            return float(fsspec_inside(self.fs).modified(info.path).timestamp())
        return float(info.mtime_ns / 1e9)

    def clock_s(self) -> float:
        """The current time in s by the clock with which the store dates its files."""
        probe = f"{TEMP_PREFIX}{uuid.uuid4().hex}"
        try:
            self._write(self._at(probe), b"")
            changed_s = self.changed_s(probe)
        finally:
            self.delete_file(probe)
        if changed_s is None:
            raise FileNotFoundError(f"{self}: {probe} disappeared right after it was written")
        return changed_s

    def _at(self, name: str) -> str:
        if not is_plain_name(name):
            raise ConfigError(
                f"{name!r} is not a valid name: use 1 to 128 letters, digits, '.', '_' and '-'."
            )
        return f"{self.path.rstrip('/')}/{name}"

    def _info(self, name: str) -> Any:
        self._forget_listings()
        return self.fs.get_file_info(self._at(name))

    def _infos(self, recursive: bool) -> Any:
        self._forget_listings()
        return self.fs.get_file_info(
            pafs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        )

    def _below(self, info: Any) -> str:
        """The relative path of a file or folder in this folder."""
        return str(info.path[len(self.path) :].strip("/"))

    def _forget_listings(self) -> None:
        if inner := fsspec_inside(self.fs):  # other processes write here, too
            inner.invalidate_cache()

    def _chunks(self, name: str, size_bytes: int = 0) -> Iterator[BytesLike]:
        with reading(self.fs, self._at(name), size_bytes) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    def _write(self, path: str, data: Content) -> tuple[int, str]:
        with self.fs.open_output_stream(path, compression=None) as stream:
            written = write_hashed(stream, data)
        if self.is_local:
            fsync(path)
        return written

    def _sync(self) -> None:
        if self.is_local:
            fsync(self.path)


def open_storage(uri: str) -> Storage:
    """The folder at a plain path (``~`` works) or at a URI of `open_uri`.

    Raises:
        PreflightError: the URI is invalid or names a file. The message contains neither the user
            part nor the query of the URI.
        UnreachableError: its store does not respond, after `REACH_TIMEOUT_S` at most.
    """
    shown = without_secrets(uri)

    def connect() -> Any:  # for S3, open_uri already looks up the bucket's region
        if not uri:
            raise ValueError("it is empty")
        place = uri if "://" in uri else absolute(uri)
        fs, path = open_uri(place)
        return fs, path, fs.get_file_info(path)

    answer = answer_within(REACH_TIMEOUT_S, connect)
    if isinstance(answer, TimeoutError):
        raise UnreachableError(
            f"Storage {shown} did not respond within {REACH_TIMEOUT_S:.0f} s: "
            "check the address, the network and the credentials."
        )
    if isinstance(answer, Exception):
        passes = isinstance(answer, OSError) and is_passing(answer)
        raise (UnreachableError if passes else PreflightError)(
            f"Cannot open storage {shown}: {reason_of(uri, answer).removeprefix(f'{shown}: ')}. "
            "Give a folder, or a URI (s3://, gs://, abfs:// ...) that this machine can reach."
        )
    fs, path, info = answer
    if info.type == pafs.FileType.File:
        raise PreflightError(f"Storage {shown} is a file: give a folder.")
    is_local = isinstance(fs, pafs.LocalFileSystem)
    opened_as = shareable(uri) if "://" in uri else ""
    return Storage(fs, path.rstrip("/") or "/", is_local, opened_as)


def _is_folder(info: Any) -> bool:
    return bool(info.type == pafs.FileType.Directory)
