"""Local files: flushing to disk, hashing, replacing, listing, and small records as JSON."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from raytrain_ddp.errors import ConfigError, DataError, RunLockedError

_READ_BYTES = 2**20


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder in place of ``~`` or ``~user``.

    Raises:
        ConfigError: there is no such user, or it is a URI.
    """
    scheme = re.match(
        r"(s3|gs|gcs|abfss?|az|hf|file|https?|hdfs):/|(\w[\w+.-]*)://", str(path), re.I
    )
    if scheme is not None:
        name = (scheme[1] or scheme[2]).lower()
        raise ConfigError(
            f"{path}: must be a path on this machine. "
            f"(URIs begin with {name}://, and not every option accepts one.)"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such user, so no such folder.") from None


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, without ``.``, ``..`` and a trailing slash. Links are kept, except
    those before a ``..``, which would lead elsewhere.

    Raises:
        ConfigError: like `expanded`.
    """
    parts = expanded(path).parts
    if ".." in parts:
        last = len(parts) - parts[::-1].index("..")
        parts = (os.path.realpath(os.path.join(*parts[:last])), *parts[last:])
    return os.path.abspath(os.path.join("", *parts))


def is_utf8(text: str) -> bool:
    """Whether a word of a command line, or a path, has no bytes that are not UTF-8."""
    return text.encode(errors="ignore") == os.fsencode(text)


def require_utf8(name: str, path: Path) -> None:
    """Raises ConfigError, with this name of the option, unless a path `is_utf8`."""
    if not is_utf8(str(path)):
        raise ConfigError(f"{name} {path}: must be UTF-8: use another name.")


def require_alone(lock: IO[str], refusal: str) -> None:
    """Locks a file until it is closed; raises RunLockedError, with this text, if another process
    holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RunLockedError(refusal) from None


def fsync(path: str | os.PathLike[str]) -> None:
    """Flushes a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def different(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """``["seed: 1, was 0"]``: the differences between two records, which may be nested."""
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += different(old, new, key)
        elif old != new:
            what = f"{name} {key}" if name else key
            digest = isinstance(old, str) and isinstance(new, str) and len(old) == len(new) == 64
            lines.append(f"{what} changed" if digest else f"{what} {new!r}, was {old!r}")
    return lines


@contextmanager
def replace_with(path: Path, state: Path) -> Iterator[Path]:
    """Yields a path to write to; if nothing is raised, it then durably replaces `path`.

    Raises:
        DataError: the folder `state` does not exist here.
    """
    if not state.is_dir():
        raise DataError(f"{state}: not found: it must be in a folder that all machines share.")
    temp = state / f"tmp-{uuid4().hex}"
    try:
        yield temp
        fsync(temp)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], state: Path) -> None:
    """Atomic and durable."""
    with replace_with(path, state) as temp:
        temp.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file.

    Raises:
        DataError: it is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path}: is damaged: no JSON object.")
    return content


def walk(folder: str, above: str = "", deep: bool = True) -> Iterator[str]:
    """The files and folders in `folder`, relative to it; a folder ends in "/". Unlike pyarrow's
    listing, it takes names of any bytes, and follows a link only if it is the first folder, or to
    see if it is a folder. What is deleted meanwhile is left out.

    Args:
        above: what stands before each name.
        deep: if not, the content of folders is skipped.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            linked = entry.is_symlink()
            if entry.is_dir() and not (linked and above):
                yield f"{above}{entry.name}/"
                if deep:
                    yield from walk(entry.path, f"{above}{entry.name}/", deep=not linked)
            else:
                yield f"{above}{entry.name}"
