"""Images in one folder per class, listed as torchvision's ImageFolder lists them. No torch."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from hashlib import sha256
from stat import S_ISDIR, S_ISREG

import numpy as np

from raytrain_ddp.data.formats.labels import NoLabelsError, distinct_names, numbers_in
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
NO_FILE = "a named pipe, socket or device, not a file"
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
_ROWS_PER_BLOCK = 256
_STAT_THREADS = 16
_READ_BYTES = 2**16
_OF_THE_FILE = (
    *(errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO),
)


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


class FolderImages(ImageSource):
    """Rows of (encoded image, label) from the files below one folder per class.

    A file that cannot be read (a broken link, no permission) is a `BadRecord`.

    Args:
        root: its folders are the classes, in alphabetical order, with images at any depth.
        classes: class names, which must include those of the folders. Default: those of the
            folders.

    Raises:
        NoLabelsError: there are images, but no class folders.
        DataError: there are no class folders, one of them has no images or is not a known class, or
            a folder cannot be read.
    """

    def __init__(self, root: str, classes: Sequence[str] | None = None) -> None:
        self._root = root
        found: dict[str, list[str]] = {}  # images of each class
        outside = 0
        for place, names, _ in sorted(files_below(root, classes or ())):
            images = [os.path.join(place, name) for name in sorted(names) if is_image(name)]
            if place != root:
                found.setdefault(os.path.relpath(place, root).split(os.sep)[0], []).extend(images)
                continue
            outside = len(images)
            for path in (os.path.join(place, name) for name in names if not is_image(name)):
                if not os.path.exists(path):  # its target may have been a class folder
                    raise DataError(f"{path}: a broken link: repair or remove it.")
        if not found and outside:
            raise NoLabelsError(
                f"{root}: {outside} images, but no class folders: create one folder per class."
            )
        if not found:
            raise DataError(f"{root}: contains no class folders.")
        own = distinct_names(sorted(found), root)
        self.class_names = own if classes is None else list(classes)
        self.files: list[tuple[str, int]] = []
        for label, name in zip(numbers_in(self.class_names, own, root), sorted(found), strict=True):
            folder = os.path.join(root, name)
            if not found[name]:
                raise DataError(
                    f"{folder}: a class folder without images ({', '.join(EXTENSIONS)}): add "
                    "images or remove it."
                )
            self.files += [(path, label) for path in found[name]]
        self.blocks = runs_of(len(self.files), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[bytes | BadRecord, int]]:
        return [(content_of(path), label) for path, label in (self.files[r] for r in rows.tolist())]

    def labels(self) -> Rows:
        return np.array([label for _, label in self.files], np.int64)

    def fingerprint(self) -> str:
        """The fingerprint of names relative to the root, labels and sizes."""
        digest, sizes = sha256(), sizes_of([path for path, _ in self.files])
        for (path, label), size in zip(self.files, sizes, strict=True):
            line = f"{os.path.relpath(path, self._root)} {label} {size}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def where(self, row: int) -> str:
        return self.files[row][0]


def files_below(
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


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def read_on_disk(path: str) -> bytes:
    """The bytes of a file, in fewer system calls than `open` needs.

    Raises:
        OSError: it cannot be read; ENXIO if it might never end.
    """
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's writer
    try:
        seen = os.fstat(file)
        if not S_ISREG(seen.st_mode) and not S_ISDIR(seen.st_mode):
            raise OSError(errno.ENXIO, NO_FILE)
        pieces = [os.read(file, seen.st_size + 1)]
        while more := os.read(file, _READ_BYTES):  # of more than 2 GiB, or still growing
            pieces.append(more)
        return b"".join(pieces)
    finally:
        os.close(file)


def reason_of_file(error: Exception) -> str:
    """Why a file itself cannot be read; "" if it may be readable later."""
    if isinstance(error, FileNotFoundError):  # of a store, too
        return "no such file"
    if isinstance(error, OSError) and error.errno in _OF_THE_FILE:
        return str(error.strerror)
    return ""


def content_of(path: str) -> bytes | BadRecord:
    """The bytes of a file; a `BadRecord` if it cannot be read for a reason of its own."""
    try:
        return read_on_disk(path)
    except OSError as error:
        if reason := reason_of_file(error):
            return BadRecord(reason)
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


def sizes_of(paths: Sequence[str]) -> list[int]:
    """The sizes of files in bytes; -1 where there is no such file, as for a broken link."""

    def size(path: str) -> int:
        try:
            return os.path.getsize(path)
        except (OSError, ValueError):  # or it has a null character
            return -1

    with ThreadPoolExecutor(_STAT_THREADS) as threads:  # for NFS
        return list(threads.map(size, paths))
