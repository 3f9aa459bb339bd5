"""Lists the files below a folder or matching a glob; for object stores, see store_listing.py."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from raytrain_ddp.data.formats.image_folder import NO_FILE, files_below, is_image, read_on_disk
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import expanded

_GLOB_SIGNS = "*?["
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class FileListing:
    """The files and folders below a root. Hidden ones are omitted.

    Args:
        shown: the field and its value, for messages.
        files: paths relative to the root, sorted; for images, only the first one in each folder.
        folders: paths relative to the root; empty for an object store.
        pattern: the glob relative to the root; "" for a folder, and the file's name for a file.
        uri_of: the path or URI of a file or folder.
        content: reads a small file.
        size_of: in bytes; None if there is no such file.
    """

    shown: str
    is_local: bool
    files: tuple[str, ...]
    folders: tuple[str, ...]
    pattern: str
    uri_of: Callable[[str], str]
    content: Callable[[str], bytes]
    size_of: Callable[[str], int | None]

    def named(self, ends: tuple[str, ...]) -> list[str]:
        """The files whose names end like this, in any case. Also omits files in folders such as
        ``__pycache__``, like `datasets`."""
        return [
            name
            for name in self.files
            if name.lower().endswith(ends) and not name.startswith("__") and "/__" not in name
        ]

    @property
    def images(self) -> list[str]:
        return [name for name in self.files if is_image(name)]

    def is_selected(self, name: str) -> bool:
        """Whether a file of this name would be in the listing."""
        return not self.pattern or fits(name, self.pattern)

    def inside(self, folder: str) -> FileListing:
        """The listing of a subfolder; "" is the root."""
        if not folder:
            return self
        start = f"{folder}/"
        return replace(
            self,
            files=tuple(name.removeprefix(start) for name in self.files if name.startswith(start)),
            folders=tuple(n.removeprefix(start) for n in self.folders if n.startswith(start)),
            uri_of=lambda name: self.uri_of(start + name),
            content=lambda name: self.content(start + name),
            size_of=lambda name: self.size_of(start + name),
        )


# ------------------------------------------------------------------ disks


def list_on_disk(source: str, shown: str) -> FileListing:
    """Lists a folder, a file, or the matches of a glob.

    Args:
        shown: the field and its value, for messages.

    Raises:
        DataError: nothing matches, or it cannot be read.
    """
    path = expanded(source)
    folders: list[str] = []
    pattern = ""
    if os.path.isdir(path):  # path.is_dir() raises for names that are too long
        files, folders = _below(str(path), shown)
    elif os.path.isfile(path):
        path, pattern = path.parent, glob.escape(path.name)
        files = [Path(source).name]
    elif any(sign in source for sign in _GLOB_SIGNS):
        path, pattern = _root_and_pattern(path)
        found = sorted(glob.glob(pattern, root_dir=path, recursive=True))
        files = [name for name in found if not os.path.isdir(path / name)]
        if not files:
            folders_only = (
                " The pattern matches only folders: append /**/*.parquet." if found else ""
            )
            raise DataError(f"{shown}: no file matches.{folders_only}")
    else:
        try:
            os.stat(path)
            problem = f"{NO_FILE}."
        except PermissionError as error:
            problem = f"cannot be read: {error.strerror}."
        except OSError:
            place = "" if path.is_absolute() else f" in {Path.cwd()}"
            problem = f"no such file or folder{place}.{_remedy(source)}"
        raise DataError(f"{shown}: {problem}")

    def size_of(name: str) -> int | None:
        return (path / name).stat().st_size if (path / name).is_file() else None

    def content(name: str) -> bytes:
        try:
            return read_on_disk(str(path / name))
        except OSError as error:
            reason = f"{error.strerror}: repair or remove it"
            raise DataError(f"{shown}: {name}: cannot be read: {reason}.") from error

    return FileListing(
        shown=shown,
        is_local=True,
        files=tuple(sorted(files)),
        folders=tuple(sorted(folders)),
        pattern=pattern,
        uri_of=lambda name: str(path / name),
        content=content,
        size_of=size_of,
    )


def _below(root: str, shown: str) -> tuple[list[str], list[str]]:
    """The files below a folder (of the images, only the first in each folder), and the folders.

    Raises:
        DataError: a folder cannot be read, or a link leads back to a folder above it.
    """
    files: list[str] = []
    folders: list[str] = []
    try:
        for place, names in files_below(root):
            below = "" if place == root else f"{os.path.relpath(place, root)}/"
            images = [name for name in names if is_image(name)]
            files += [below + name for name in names if not is_image(name)]
            files += [below + min(images)] if images else []
            folders += [below[:-1]] if below else []
    except DataError as error:
        raise DataError(f"{shown}: {error}") from error
    return files, folders


def _root_and_pattern(path: Path) -> tuple[Path, str]:
    """The folder before the first glob character, and the rest."""
    parts = path.parts
    first = next(n for n, part in enumerate(parts) if any(sign in part for sign in _GLOB_SIGNS))
    return Path(*parts[:first]), str(PurePosixPath(*parts[first:]))


def _remedy(source: str) -> str:
    if _HUB_NAME.fullmatch(source):
        return f" For the data set {source} on the Hugging Face Hub, use hf://datasets/{source}."
    if Path(source).suffix:  # meant as a file
        return ""
    return " Other choices: 'digits', 'torchvision:CIFAR10', hf://datasets/ORG/NAME."


# ------------------------------------------------------------------ globs


def fits(name: str, pattern: str) -> bool:
    """Whether a path matches, with the rules of `glob`: ``**`` matches any number of folders, and a
    leading dot matches only a dot in the pattern."""
    return _fits(PurePosixPath(name).parts, PurePosixPath(pattern).parts)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        inner = next((n for n, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_fits(parts[n:], pattern[1:]) for n in range(inner + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])
