"""Lists the files below a folder, in an object store, or matching a glob."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.data.formats.image_folder import (
    NO_FILE,
    files_below,
    is_image,
    read_on_disk,
    without_leftovers,
)
from raytrain_ddp.data.formats.shard import read_file
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_names
from raytrain_ddp.files import expanded
from raytrain_ddp.uri import (
    REACH_TIMEOUT_S,
    answer_within,
    attempt,
    fsspec_inside,
    open_uri,
    reason_of,
    uri_beside,
)

_GLOB_SIGNS = "*?["
_KINDS_SHOWN = 5
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class FileListing:
    """The files and folders below a root, without leftovers.

    Args:
        shown: the field and its value, for messages.
        files: paths relative to the root, sorted; for images, only the first one in each folder.
        folders: paths relative to the root; empty for an object store.
        left_out: paths of leftovers anywhere in the source, see `leftover_in`.
        pattern: the glob relative to the root; "" for a folder, and the file's name for a file.
        uri_of: the path or URI of a file or folder.
        content: reads a small file.
        size_of: in bytes; None if there is no such file.
    """

    shown: str
    is_local: bool
    files: tuple[str, ...]
    folders: tuple[str, ...]
    left_out: tuple[str, ...]
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


def counted(names: Sequence[str], why: str) -> list[str]:
    """Returns a note with the number of unused files and folders of each kind, and an example; none
    without names."""
    paths = map(PurePosixPath, names)
    kinds = Counter(path.suffix.lower() or path.name for path in paths).most_common()
    listed = first_names([f"{count:,} {kind}" for kind, count in kinds], _KINDS_SHOWN)
    return [f"not used: {listed} ({why}), such as {names[0]}"] if names else []


# ------------------------------------------------------------------ disks


def list_on_disk(
    source: str, shown: str, kept: Collection[str] = (), every: bool = False
) -> FileListing:
    """Lists a folder, a file, or the matches of a glob.

    Args:
        shown: the field and its value, for messages.
        kept: see `leftover_in`.
        every: list all images; by default, those of a data set.

    Raises:
        DataError: nothing matches, or it cannot be read.
    """
    path = expanded(source)
    folders: list[str] = []
    left_out: list[str] = []
    pattern = ""
    if os.path.isdir(path):  # path.is_dir() raises for names that are too long
        files, folders, left_out = _below(str(path), shown, kept, every)
    elif os.path.isfile(path):
        path, pattern = path.parent, glob.escape(path.name)
        files = [Path(source).name]
    elif any(sign in source for sign in _GLOB_SIGNS):
        path, pattern = _root_and_pattern(path)
        found = sorted(glob.glob(pattern, root_dir=path, recursive=True))
        files = [name for name in found if not os.path.isdir(path / name)]
        files, left_out = without_leftovers(files, (*kept, *pattern.split("/")))
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
        except (OSError, ValueError):  # it has a null character
            place = "" if path.is_absolute() else f" in {Path.cwd()}"
            problem = f"no such file or folder{place}.{'' if every else _remedy(source)}"
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
        left_out=tuple(sorted(left_out)),
        pattern=pattern,
        uri_of=lambda name: str(path / name),
        content=content,
        size_of=size_of,
    )


def _below(
    root: str, shown: str, kept: Collection[str], every: bool
) -> tuple[list[str], list[str], list[str]]:
    """Returns the files below a folder (of the images, only the first in each folder unless `every`
    is wanted), the folders, and the leftovers.

    Raises:
        DataError: as `files_below`.
    """
    files: list[str] = []
    folders: list[str] = []
    left_out: list[str] = []
    try:
        for place, names, left in files_below(root, kept):
            below = "" if place == root else f"{os.path.relpath(place, root)}/"
            images = [name for name in names if is_image(name)]
            files += [below + name for name in names if not is_image(name)]
            files += [below + name for name in sorted(images)[: None if every else 1]]
            folders += [below[:-1]] if below else []
            left_out += [below + name for name in left]
    except DataError as error:
        raise DataError(f"{shown}: {error}") from error
    return files, folders, left_out


def _root_and_pattern(path: Path) -> tuple[Path, str]:
    """The folder before the first glob character, and the rest."""
    parts = path.parts
    first = next(n for n, part in enumerate(parts) if any(sign in part for sign in _GLOB_SIGNS))
    return Path(*parts[:first]), str(PurePosixPath(*parts[first:]))


def _remedy(source: str) -> str:
    if _HUB_NAME.fullmatch(source):
        return f" For the data set {source} on the Hugging Face Hub, use hf:{source}."
    if Path(source).suffix:  # meant as a file
        return ""
    return " Other choices: 'digits', 'torchvision:CIFAR10', hf:ORG/NAME."


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


T = TypeVar("T")

_PAGES = "https://huggingface.co/datasets/"
_URI_GLOB_SIGNS = "*["  # "?" starts the query


def list_in_store(source: str, shown: str) -> FileListing:
    """Lists the files below a URI or matching its glob, with a single list request.

    Args:
        shown: the field and its value, for messages.

    Raises:
        DataError: nothing matches, or it cannot be read.
        ConfigError: the scheme is unknown.
        PreflightError: the store cannot be reached.
    """
    if source.startswith(_PAGES):
        raise DataError(f"{shown} is a web page: use hf://datasets/{source.removeprefix(_PAGES)}.")
    folder, pattern = _cut_at_glob(source)

    def ask() -> tuple[Any, Any]:
        fs, path = open_uri(folder)
        info = fs.get_file_info(path)
        inner = fsspec_inside(fs)
        if info.type == pafs.FileType.NotFound and inner is not None:
            inner.info(path)  # raises what the listing hides, such as a refused connection
        return fs, info

    fs, info = _answered(answer_within(REACH_TIMEOUT_S, ask), source, shown)
    if info.type == pafs.FileType.NotFound:
        raise _not_there(shown)
    root, sizes = info.path, {}
    left_out: list[str] = []
    if info.is_file and not pattern:
        root, name = str(PurePosixPath(info.path).parent), PurePosixPath(info.path).name
        sizes, pattern = {name: info.size}, glob.escape(name)
    else:
        # No time limit: a long list takes longer than the first response.
        sizes = _answered(attempt(lambda: _files_below(fs, root)), source, shown)
        found = [name for name in sizes if not pattern or fits(name, pattern)]
        names, left_out = without_leftovers(found, pattern.split("/"))
        sizes = {name: sizes[name] for name in names}
        if pattern and not sizes:
            raise DataError(f"{shown}: no file matches.")

    def uri_of(name: str) -> str:
        return source if info.is_file else uri_beside(folder, f"{root}/{name}")

    def content(name: str) -> bytes:
        return _answered(attempt(lambda: read_file(fs, f"{root}/{name}")), source, shown)

    return FileListing(
        shown=shown,
        is_local=False,
        files=tuple(sizes),
        folders=(),
        left_out=tuple(left_out),
        pattern=pattern,
        uri_of=uri_of,
        content=content,
        size_of=sizes.get,
    )


def _cut_at_glob(uri: str) -> tuple[str, str]:
    """The URI of the folder before the first glob character, and the pattern ("": none)."""
    place, question_mark, query = uri.partition("?")
    first = min((place.find(sign) for sign in _URI_GLOB_SIGNS if sign in place), default=-1)
    if first < 0:
        return uri, ""
    cut = place.rfind("/", 0, first)
    return place[:cut] + question_mark + query, place[cut + 1 :]


def _files_below(fs: Any, path: str) -> dict[str, int]:
    """Sizes of all files, by their paths below the folder, sorted."""
    infos = fs.get_file_info(pafs.FileSelector(path, recursive=True))
    files = {info.path.removeprefix(path).lstrip("/"): info.size for info in infos if info.is_file}
    return dict(sorted(files.items()))


def _answered(outcome: T | Exception, source: str, shown: str) -> T:
    if isinstance(outcome, RaytrainError):
        raise outcome
    chain = _chain(outcome) if isinstance(outcome, Exception) else iter(())
    lost = next(filter(_is_of_network, chain), None)
    if isinstance(outcome, FileNotFoundError) and lost is None:
        raise _not_there(shown)
    if isinstance(outcome, Exception):
        if isinstance(outcome, TimeoutError):
            raise PreflightError(
                f"{shown} did not respond within {REACH_TIMEOUT_S:.0f} s: check the address, the "
                "network and the credentials."
            )
        hidden = lost if isinstance(outcome, FileNotFoundError) else None
        reason = reason_of(source, hidden or outcome)
        if "NETWORK_CONNECTION" in reason or lost is not None:
            raise PreflightError(f"{shown} cannot be reached: {reason}. Check the network.")
        raise DataError(f"{shown}: cannot be read: {reason}.")
    return outcome


def _not_there(shown: str) -> DataError:
    hint = " If it is private or gated, log in (hf auth login)." if "hf://" in shown else ""
    return DataError(f"{shown}: no such file or folder.{hint}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    """Whether it is a failed name resolution, a refused or lost connection, or an offline mode."""
    return isinstance(error, ConnectionError | socket.gaierror | ssl.SSLError) or (
        isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    )
