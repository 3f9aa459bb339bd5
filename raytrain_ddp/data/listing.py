"""The files below a folder, glob or URI, on a disk or in an object store, as one listing."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.data.folder import EXTENSIONS, is_hidden
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError
from raytrain_ddp.uri import (
    REACH_TIMEOUT_S,
    answer_within,
    attempt,
    open_uri,
    reason_of,
    uri_beside,
    without_secrets,
)

T = TypeVar("T")

_GLOB_SIGNS = "*?["
_URI_GLOB_SIGNS = "*["  # a "?" begins the query
_HUB_NAME = re.compile(r"(https://huggingface\.co/datasets/)?([\w.-]+/[\w.-]+)/?")


@dataclass(frozen=True)
class Listing:
    """What lies below a place. Hidden files and folders are left out.

    Args:
        shown: the field and its value, for messages.
        files: paths below the root, sorted; of the images in a folder, only the first.
        folders: paths below the root; none in an object store.
        pattern: of a glob, below the root; "" for a folder, and the file's name for a file.
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

    @property
    def parquet(self) -> list[str]:
        """Also without those in folders such as ``__pycache__``, as `datasets` has it."""
        return [
            name
            for name in self.files
            if name.lower().endswith(".parquet") and not name.startswith("__") and "/__" not in name
        ]

    @property
    def images(self) -> list[str]:
        return [name for name in self.files if is_image(name)]

    def is_selected(self, name: str) -> bool:
        """Whether a file of this name would be in the listing."""
        return not self.pattern or fits(name, self.pattern)

    def inside(self, folder: str) -> Listing:
        """That of a folder in it; "" is the top."""
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


def list_files(source: str, shown: str) -> Listing:
    """Lists a folder, a file, or what fits a glob.

    Args:
        shown: the field and its value, for messages.

    Raises:
        DataError: there is nothing, or it cannot be read.
        ConfigError: nothing knows the scheme of a URI.
        PreflightError: an object store cannot be reached.
    """
    on_hub = _HUB_NAME.fullmatch(source)
    if on_hub and on_hub[1]:
        raise DataError(f"{shown} is a page: give hf://datasets/{on_hub[2]}.")
    if source.startswith("file://"):
        source = open_uri(source)[1]
    return _in_store(source, shown) if "://" in source else _on_disk(source, shown)


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


# ------------------------------------------------------------------ disks


def _on_disk(source: str, shown: str) -> Listing:
    path = Path(source).expanduser()
    folders: list[str] = []
    pattern = ""
    if path.is_dir():
        files = _below(str(path), shown, folders)
    elif path.is_file():
        path, pattern = path.parent, glob.escape(path.name)
        files = [Path(source).name]
    elif any(sign in source for sign in _GLOB_SIGNS):
        path, pattern = _root_and_pattern(path)
        found = sorted(glob.glob(pattern, root_dir=path, recursive=True))
        files = [name for name in found if not (path / name).is_dir()]
        if not files:
            folders_only = " The folders alone do: add /**/*.parquet." if found else ""
            raise DataError(f"{shown}: no file matches.{folders_only}")
    else:
        raise DataError(f"{shown}: no such file or folder.{_remedy(source)}")

    def size_of(name: str) -> int | None:
        return (path / name).stat().st_size if (path / name).is_file() else None

    return Listing(
        shown=shown,
        is_local=True,
        files=tuple(sorted(files)),
        folders=tuple(sorted(folders)),
        pattern=pattern,
        uri_of=lambda name: str(path / name),
        content=lambda name: (path / name).read_bytes(),
        size_of=size_of,
    )


def _below(root: str, shown: str, folders: list[str]) -> list[str]:
    """Files below a folder, of images the first in each; appends the folders.

    Raises:
        DataError: a folder cannot be read, or a link leads back to a folder above it.
    """
    files: list[str] = []

    def visit(below: str, above: frozenset[str]) -> None:
        place = os.path.join(root, below)
        try:
            with os.scandir(place) as found:
                entries = [(e.name, e.is_dir(), e.is_symlink()) for e in found]
        except OSError as error:
            raise DataError(f"{shown}: {place} cannot be read: {error.strerror}.") from error
        first_image = ""
        for name, is_folder, is_link in entries:
            if is_hidden(name):
                continue
            path = f"{below}{name}"
            if is_folder:
                inside = above
                if is_link:
                    real = os.path.realpath(os.path.join(root, path))
                    if any((one + os.sep).startswith(real + os.sep) for one in above):
                        raise DataError(f"{shown}: the link {path} leads to a folder above it.")
                    inside = above | {real}
                folders.append(path)
                visit(f"{path}/", inside)
            elif not is_image(name):
                files.append(path)
            elif not first_image or path < first_image:
                first_image = path
        if first_image:
            files.append(first_image)

    visit("", frozenset({os.path.realpath(root)}))
    return files


def _root_and_pattern(path: Path) -> tuple[Path, str]:
    """The folder before the first sign of a glob, and the rest."""
    parts = path.parts
    first = next(n for n, part in enumerate(parts) if any(sign in part for sign in _GLOB_SIGNS))
    return Path(*parts[:first]), str(PurePosixPath(*parts[first:]))


def _remedy(source: str) -> str:
    on_hub = _HUB_NAME.fullmatch(source)
    if on_hub and not source.startswith((".", "~")):
        return (
            f" For the data set {on_hub[2]} of the Hugging Face Hub give hf://datasets/{on_hub[2]}."
        )
    return " Other choices: 'digits', 'torchvision:CIFAR10', hf://datasets/ORG/NAME."


# ------------------------------------------------------------------ object stores


def _in_store(source: str, shown: str) -> Listing:
    """Asks the store for one list."""
    folder, pattern = _cut_at_glob(source)

    def ask() -> tuple[Any, Any]:
        fs, path = open_uri(folder)
        return fs, fs.get_file_info(path)

    fs, info = _answered(answer_within(REACH_TIMEOUT_S, ask), source, shown)
    if info.type == pafs.FileType.NotFound:
        raise _not_there(source, shown)
    root, sizes = info.path, {}
    if info.is_file and not pattern:
        root, name = str(PurePosixPath(info.path).parent), PurePosixPath(info.path).name
        sizes, pattern = {name: info.size}, glob.escape(name)
    else:
        # No time limit: a long list takes longer than a first answer.
        sizes = _answered(attempt(lambda: _files_below(fs, root)), source, shown)
        if pattern:
            sizes = {n: s for n, s in sizes.items() if fits(n, pattern)}
            if not sizes:
                raise DataError(f"{shown}: no file matches.")
        else:
            sizes = {n: s for n, s in sizes.items() if not any(map(is_hidden, n.split("/")))}

    def uri_of(name: str) -> str:
        return source if info.is_file else uri_beside(folder, f"{root}/{name}")

    def content(name: str) -> bytes:
        return _answered(attempt(lambda: _content(fs, f"{root}/{name}")), source, shown)

    return Listing(
        shown=shown,
        is_local=False,
        files=tuple(sizes),
        folders=(),
        pattern=pattern,
        uri_of=uri_of,
        content=content,
        size_of=sizes.get,
    )


def _cut_at_glob(uri: str) -> tuple[str, str]:
    """The URI of the folder before the first sign of a pattern, and the pattern ("": none)."""
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


def _content(fs: Any, path: str) -> bytes:
    with fs.open_input_stream(path, compression=None) as stream:
        return bytes(stream.read())


def _answered(outcome: T | Exception, source: str, shown: str) -> T:
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, FileNotFoundError):
        raise _not_there(source, shown)
    if isinstance(outcome, Exception):
        download = ""
        if source.startswith("hf://datasets/"):
            name = "/".join(without_secrets(source).split("/")[3:5])
            command = f"hf download --repo-type dataset {name} --local-dir DIR"
            download = f", or download it ({command}) and give DIR"
        if isinstance(outcome, TimeoutError):
            raise PreflightError(
                f"{shown} did not answer within {REACH_TIMEOUT_S:.0f} s: check the address, the "
                f"network and the credentials{download}."
            )
        reason = reason_of(source, outcome)
        if any(isinstance(error, OSError) and _is_of_network(error) for error in _chain(outcome)):
            raise PreflightError(
                f"{shown} cannot be reached: {reason}. Check the network{download}."
            )
        raise DataError(f"{shown}: cannot be read: {reason}.")
    return outcome


def _not_there(source: str, shown: str) -> DataError:
    if not source.startswith("hf://"):
        return DataError(f"{shown}: no such file or folder.")
    if source.startswith("hf://datasets/"):
        return DataError(
            f"{shown}: no such data set, file or folder on the Hugging Face Hub. If it is private "
            "or gated, log in (hf auth login)."
        )
    return DataError(
        f"{shown}: no such model: data sets are at hf://datasets/{source.removeprefix('hf://')}."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: OSError) -> bool:
    """A name that is not resolved, a connection that is refused or lost, or an offline mode."""
    return isinstance(error, ConnectionError) or type(error).__module__ in ("socket", "ssl")


# ------------------------------------------------------------------ globs


def fits(name: str, pattern: str) -> bool:
    """Whether a path fits, as `glob` has it: ``**`` stands for any number of folders, and only a
    dot in the pattern fits a leading dot."""
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
