"""Local files: their paths, flushing to disk, replacing, listing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from raytrain_ddp.errors import ConfigError, DataError


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


def fsync(path: str | os.PathLike[str]) -> None:
    """Flushes a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
