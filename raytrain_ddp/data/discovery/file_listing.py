"""Lists the files below a folder, in an object store, or matching a glob."""

from __future__ import annotations

import glob
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.data.formats.image_folder import (
    NO_FILE,
    files_below,
    is_image,
    without_leftovers,
)
from raytrain_ddp.data.formats.shard import read_file
from raytrain_ddp.errors import (
    DataError,
    PreflightError,
    RaytrainError,
    first_names,
    is_passing,
)
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

T = TypeVar("T")


@dataclass(frozen=True)
class FileListing:
    """The files and folders below a root, without leftovers.

    Args:
        shown: the field and its value, for messages.
        source: the path or URI that was listed.
        fs, root: the file system, and the path of the root in it.
        files: sizes in bytes by paths relative to the root, sorted; -1: unknown. For images, only
            the first one in each folder of a disk.
        folders: paths relative to the root; empty for an object store.
        left_out: paths of leftovers anywhere in the source, see `leftover_in`.
        pattern: the glob relative to the root; "" for a folder, and the file's name for a file.
    """

    shown: str
    source: str
    fs: Any
    root: str
    files: Mapping[str, int]
    folders: Sequence[str]
    left_out: Sequence[str]
    pattern: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, pafs.LocalFileSystem)

    def uri_of(self, name: str) -> str:
        """The path or URI of a file or folder."""
        if self.is_local:
            return str(Path(self.root, name))
        return uri_beside(self.source, f"{self.root}/{name}")

    def content(self, name: str) -> bytes:
        """Reads a small file."""
        outcome = attempt(lambda: read_file(self.fs, f"{self.root}/{name}"))
        return _answered(outcome, self.source, f"{self.shown}: {name}")

    def size_of(self, name: str) -> int | None:
        """The size of a file in bytes; None if there is no such file."""
        if not self.is_local:
            return self.files.get(name)
        place = f"{self.root}/{name}"
        return os.path.getsize(place) if os.path.isfile(place) else None

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
        path, pattern, files = path.parent, glob.escape(path.name), [path.name]
    elif any(sign in source for sign in _GLOB_SIGNS):
        path, pattern = _root_and_pattern(path)
        found = sorted(glob.glob(pattern, root_dir=path, recursive=True))
        files = [name for name in found if not os.path.isdir(path / name)]
        files, left_out = without_leftovers(files, (*kept, *_hidden_in(pattern)))
        if not files:
            folders_only = (
                " The pattern matches only folders: append /**/*.parquet." if found else ""
            )
            raise DataError(f"{shown}: no file matches.{folders_only}")
    else:
        raise DataError(f"{shown}: {_why_missing(path, '' if every else _remedy(source))}")
    sizes = dict.fromkeys(sorted(files), -1)
    fs, root = pafs.LocalFileSystem(), str(path)
    return FileListing(shown, source, fs, root, sizes, sorted(folders), sorted(left_out), pattern)


def _why_missing(path: Path, remedy: str) -> str:
    try:
        os.stat(path)
    except PermissionError as error:
        return f"cannot be read: {error.strerror}."
    except (OSError, ValueError):  # it has a null character
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        return f"no such file or folder{place}.{remedy}"
    return f"{NO_FILE}."


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


def _hidden_in(pattern: str) -> list[str]:
    """The parts of a glob that name hidden files or folders, which are data then."""
    return [part for part in pattern.split("/") if part.startswith(".")]


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


# ------------------------------------------------------------------ object stores

_PAGES = "https://huggingface.co/datasets/"
_URI_GLOB_SIGNS = "*["  # "?" starts the query


def fits(name: str, pattern: str) -> bool:
    """Whether a path matches a glob, in which ``**`` matches any number of folders."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    parts = (part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/"))
    return re.fullmatch(glob_translate("/".join(parts)), name) is not None


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
    root, left_out = info.path, list[str]()
    if info.is_file and not pattern:
        root, _, name = info.path.rpartition("/")
        sizes, pattern = {name: info.size}, glob.escape(name)
    else:
        # No time limit: a long list takes longer than the first response.
        sizes = _answered(attempt(lambda: _files_below(fs, root)), source, shown)
        found = [name for name in sizes if not pattern or fits(name, pattern)]
        names, left_out = without_leftovers(found, _hidden_in(pattern))
        sizes = {name: sizes[name] for name in names}
        if pattern and not sizes:
            raise DataError(f"{shown}: no file matches.")
    return FileListing(shown, folder, fs, root, sizes, (), left_out, pattern)


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
    if not isinstance(outcome, Exception):
        return outcome
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, TimeoutError):
        raise PreflightError(
            f"{shown} did not respond within {REACH_TIMEOUT_S:.0f} s: check the address, the "
            "network and the credentials."
        )
    causes = [outcome, *_causes_of(outcome)]
    lost = next(filter(_is_of_network, causes), None)
    if lost is not None:
        raise PreflightError(
            f"{shown} cannot be reached: {reason_of(source, lost)}. Check the network."
        )
    if isinstance(outcome, FileNotFoundError):
        raise _not_there(shown)
    raise DataError(f"{shown}: cannot be read: {reason_of(source, outcome)}.")


def _not_there(shown: str) -> DataError:
    hint = " If it is private or gated, log in (hf auth login)." if "hf://" in shown else ""
    return DataError(f"{shown}: no such file or folder.{hint}")


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


def _is_of_network(error: BaseException) -> bool:
    """Whether it is a failed name resolution, a refused or lost connection, or an offline mode."""
    return isinstance(error, socket.gaierror | ssl.SSLError) or is_passing(error)
