"""Lists the files below a folder, in an object store, or matching a glob."""

from __future__ import annotations

import glob
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.data.formats.shard import NO_FILE, read_file, unless_failed
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_names, is_passing
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

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_OF_A_SYSTEM = re.compile(  # of macOS; Windows; Linux, Python, version control; network drives
    r"\._.*|\.DS_Store|\.AppleDouble|\.Spotlight-V100|\.fseventsd|\.Trash.*|__MACOSX"
    r"|Network Trash Folder|Temporary Items|Thumbs\.db|ehthumbs\w*\.db|desktop\.ini|~\$.*"
    r"|\$RECYCLE\.BIN|RECYCLER|System Volume Information|found\.\d{3}|lost\+found|\.nfs\w+"
    r"|__pycache__|\.ipynb_checkpoints|\.git|\.svn|CVS|[@#.](?:tmp|__thumb|recycle|snapshot)"
    r"|@eaDir|@SynoResource|@Recently-Snapshot|~snapshot|_gsdata_",
    re.IGNORECASE,
)
LEFT_OUT = "hidden or left by a system"
_MAX_DEPTH = 200
_GLOB_SIGNS = "*?["
_URI_GLOB_SIGNS = "*["  # "?" starts the query
_KINDS_SHOWN = 5
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_PAGES = "https://huggingface.co/datasets/"

T = TypeVar("T")


@dataclass(frozen=True)
class FileListing:
    """The files and folders below a root, without leftovers.

    Args:
        shown: the field and its value, for messages.
        source: the path or URI that was listed.
        fs, root: the file system, and the path of the root in it.
        files: paths relative to the root, sorted. Of images, only the first one in each folder of a
            disk.
        folders: paths relative to the root; empty for an object store.
        left_out: paths of leftovers anywhere in the source, see `leftover_in`.
        pattern: the glob relative to the root; "" for a folder, and the file's name for a file.
    """

    shown: str
    source: str
    fs: Any
    root: str
    files: Sequence[str]
    folders: Sequence[str]
    left_out: Sequence[str]
    pattern: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, pafs.LocalFileSystem)

    @property
    def images(self) -> list[str]:
        return [name for name in self.files if is_image(name)]

    def uri_of(self, name: str) -> str:
        """The path or URI of a file or folder."""
        if self.is_local:
            return str(Path(self.root, name))
        return uri_beside(self.source, f"{self.root}/{name}")

    def content(self, name: str) -> bytes:
        """Reads a small file."""
        outcome = attempt(lambda: read_file(self.fs, f"{self.root}/{name}"))
        return _answered(outcome, self.source, f"{self.shown}: {name}")

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The sizes of files in bytes; None where there is no such file."""
        places = [f"{self.root}/{name}" for name in names]
        outcome = attempt(lambda: self.fs.get_file_info(places))
        return [info.size for info in _answered(outcome, self.source, self.shown)]

    def named(self, ends: tuple[str, ...]) -> list[str]:
        """The files whose names end like this, in any case. Also omits files in folders such as
        ``__pycache__``, like `datasets`."""
        names = (name for name in self.files if name.lower().endswith(ends))
        return [name for name in names if "/__" not in f"/{name}"]


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def leftover_in(path: str, kept: Collection[str] = ()) -> str:
    """Returns the path up to its first file or folder that is hidden or was left by an operating
    system, a file manager or a network drive; "" if there is none.

    Args:
        kept: names that are data nevertheless, such as those of ``data.classes``, and globs of
            hidden ones.
    """
    parts = path.split("/")
    for place, name in enumerate(parts):
        is_kept = not name.startswith(".") or any(fnmatchcase(name, each) for each in kept)
        if name not in (*kept, ".", "..") and (_OF_A_SYSTEM.fullmatch(name) or not is_kept):
            return "/".join(parts[: place + 1])
    return ""


def without_leftovers(
    names: Iterable[str], kept: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Returns the names that are data; and the files and folders that are leftovers, sorted."""
    found = [(name, leftover_in(name, kept)) for name in names]
    return [name for name, left in found if not left], sorted({left for _, left in found if left})


def counted(names: Sequence[str], why: str) -> list[str]:
    """Returns a note with the number of unused files and folders of each kind, and an example; none
    without names."""
    paths = map(PurePosixPath, names)
    kinds = Counter(path.suffix.lower() or path.name for path in paths).most_common()
    listed = first_names([f"{count:,} {kind}" for kind, count in kinds], _KINDS_SHOWN)
    return [f"not used: {listed} ({why}), such as {names[0]}"] if names else []


def _cut_at_glob(place: str, signs: str) -> tuple[str, str]:
    """The folder before the first of the signs, and the pattern ("": none)."""
    first = re.search(f"[{re.escape(signs)}]", place)
    cut = place.rfind("/", 0, first.start()) + 1 if first else len(place)
    return place[:cut], place[cut:]


def _hidden_in(pattern: str) -> list[str]:
    """The parts of a glob that name hidden files or folders, which are data then."""
    return [part for part in pattern.split("/") if part.startswith(".")]


# ------------------------------------------------------------------ disks


def _files_below(
    folder: str, kept: Collection[str] = ()
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields a folder and each one below it, following links, with the names of its files and of
    its leftovers.

    Args:
        kept: see `leftover_in`.

    Raises:
        DataError: a folder cannot be read, there are too many levels, or a link leads back to a
            folder above it.
    """

    def refuse(error: OSError) -> None:  # otherwise, os.walk skips the folder
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if place.count(os.sep) > folder.count(os.sep) + _MAX_DEPTH:
            raise DataError(f"{folder}: more than {_MAX_DEPTH} levels of folders: move them up.")
        folders[:], left = without_leftovers(folders, kept)
        for link in filter(os.path.islink, (os.path.join(place, name) for name in folders)):
            if f"{os.path.realpath(place)}/".startswith(f"{os.path.realpath(link)}/"):
                raise DataError(f"the link {link} points to a folder above it: delete it.")
        files, more = without_leftovers(names, kept)
        yield place, files, left + more


def list_on_disk(
    source: str, shown: str, kept: Collection[str] = (), every: bool = False
) -> FileListing:
    """Lists a folder, a file, or the matches of a glob.

    Args:
        shown: the field and its value, for messages.
        kept: see `leftover_in`.
        every: list all images; by default, only the first one in each folder.

    Raises:
        DataError: nothing matches, or it cannot be read.
    """
    path, pattern = str(expanded(source)), ""
    files: list[str] = []
    folders: list[str] = []
    left_out: list[str] = []
    if os.path.isdir(path):
        try:
            for place, names, left in _files_below(path, kept):
                below = "" if place == path else f"{os.path.relpath(place, path)}/"
                images = sorted(name for name in names if is_image(name))
                others = [name for name in names if not is_image(name)]
                files += [below + name for name in others + images[: None if every else 1]]
                folders += [below[:-1]] if below else []
                left_out += [below + name for name in left]
        except DataError as error:
            raise DataError(f"{shown}: {error}") from error
    elif os.path.isfile(path):
        path, name = os.path.split(path)
        pattern, files = glob.escape(name), [name]
    elif any(sign in source for sign in _GLOB_SIGNS):
        path, pattern = _cut_at_glob(path, _GLOB_SIGNS)
        found = glob.glob(pattern, root_dir=path or None, recursive=True)
        files = [name for name in found if not os.path.isdir(os.path.join(path, name))]
        files, left_out = without_leftovers(files, (*kept, *_hidden_in(pattern)))
        if not files:
            hint = " The pattern matches only folders: append /**/*.parquet." if found else ""
            raise DataError(f"{shown}: no file matches.{hint}")
    else:
        raise DataError(f"{shown}: {_why_missing(path, '' if every else _remedy(source))}")
    root, fs = str(Path(path)), pafs.LocalFileSystem()
    return FileListing(
        shown, source, fs, root, sorted(files), sorted(folders), sorted(left_out), pattern
    )


def _why_missing(path: str, remedy: str) -> str:
    try:
        os.stat(path)
    except PermissionError as error:
        return f"cannot be read: {error.strerror}."
    except (OSError, ValueError):  # it has a null character
        place = "" if os.path.isabs(path) else f" in {Path.cwd()}"
        return f"no such file or folder{place}.{remedy}"
    return f"{NO_FILE}."


def _remedy(source: str) -> str:
    if _HUB_NAME.fullmatch(source):
        return f" For the data set {source} on the Hugging Face Hub, use hf:{source}."
    if Path(source).suffix:  # meant as a file
        return ""
    return " Other choices: 'digits', 'torchvision:CIFAR10', hf:ORG/NAME."


# ------------------------------------------------------------------ object stores


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
    place, mark, query = source.partition("?")
    folder, pattern = _cut_at_glob(place, _URI_GLOB_SIGNS)
    folder += mark + query

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
        files, pattern = [name], glob.escape(name)
    else:
        # No time limit: a long list takes longer than the first response.
        selector = pafs.FileSelector(root, recursive=True)
        infos = _answered(attempt(lambda: fs.get_file_info(selector)), source, shown)
        paths = (each.path.removeprefix(root).lstrip("/") for each in infos if each.is_file)
        found = sorted(name for name in paths if not pattern or fits(name, pattern))
        files, left_out = without_leftovers(found, _hidden_in(pattern))
        if pattern and not files:
            raise DataError(f"{shown}: no file matches.")
    return FileListing(shown, folder, fs, root, files, (), left_out, pattern)


def _answered(outcome: T | Exception, source: str, shown: str) -> T:
    if isinstance(outcome, TimeoutError):
        raise PreflightError(
            f"{shown} did not respond within {REACH_TIMEOUT_S:.0f} s: check the address, the "
            "network and the credentials."
        )
    if isinstance(outcome, Exception) and not isinstance(outcome, RaytrainError):
        lost = next(filter(_is_of_network, _causes_of(outcome)), None)
        if lost is not None:
            raise PreflightError(
                f"{shown} cannot be reached: {reason_of(source, lost)}. Check the network."
            )
    if isinstance(outcome, FileNotFoundError):
        raise _not_there(shown)
    return unless_failed(outcome, source, f"{shown}: cannot be read")


def _not_there(shown: str) -> DataError:
    hint = " If it is private or gated, log in (hf auth login)." if "hf://" in shown else ""
    return DataError(f"{shown}: no such file or folder.{hint}")


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    """Whether it is a failed name resolution, a refused or lost connection, or an offline mode."""
    return isinstance(error, socket.gaierror | ssl.SSLError) or is_passing(error)
