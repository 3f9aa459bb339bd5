"""Images in one folder per class, listed as torchvision's ImageFolder lists them. No torch."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from stat import S_ISDIR, S_ISREG

import numpy as np

from raytrain_ddp.data.formats.labels import NoLabelsError, distinct_names, numbers_in
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
LOST_LINK = "a broken link"
NO_FILE = "a named pipe, socket or device, not a file"
_ROWS_PER_BLOCK = 256
_STAT_THREADS = 16
_READ_BYTES = 2**16
_OF_THE_FILE = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not data but left over from a file manager or notebook."""
    return name.startswith(".") or name in ("__MACOSX", "__pycache__")


class FolderImages:
    """Rows of (encoded image, label) from the files below one folder per class.

    A file that cannot be read (a broken link, no permission) is a `BadRecord`. `same_inside` names
    the folders that all classes have in common, if all images are in such.

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
        self.ignored: Counter[str] = Counter()  # files by extension
        inside: list[list[str]] = []  # folders of each class that has no images beside them
        folders = self._class_folders()
        own = distinct_names(folders, root)
        self.class_names = own if classes is None else list(classes)
        self.files: list[tuple[str, int]] = []  # (path, label) of each row
        for label, name in zip(numbers_in(self.class_names, own, root), folders, strict=True):
            folder = os.path.join(root, name)
            found = self._images_below(folder)
            if not found:
                raise DataError(
                    f"{folder}: a class folder without images ({', '.join(EXTENSIONS)}): add "
                    "images or remove it."
                )
            self.files += [(path, label) for path in found]
            parts = [os.path.relpath(path, folder).split(os.sep) for path in found]
            inside.append(sorted({each[0] for each in parts}) if min(map(len, parts)) > 1 else [])
        is_alike = len(inside[0]) > 1 and inside.count(inside[0]) == len(inside) > 1
        self.same_inside = inside[0] if is_alike else []
        self.blocks = runs_of(len(self.files), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[bytes | BadRecord, int]]:
        return [(content_of(path), label) for path, label in (self.files[r] for r in rows.tolist())]

    def labels(self) -> Rows:
        """The class number of each row, shape (rows,)."""
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

    def _class_folders(self) -> list[str]:
        folders, images = [], 0
        try:
            with os.scandir(self._root) as found:
                entries = [entry for entry in found if not is_hidden(entry.name)]
        except OSError as error:
            raise DataError(f"{self._root}: cannot be read: {error.strerror}.") from error
        for entry in entries:
            # entry.is_dir() raises for a link to itself; it needs no stat for what is no link
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                folders.append(entry.name)
            elif not os.path.exists(entry.path) and not is_image(entry.name):
                raise DataError(f"{entry.path}: a broken link: repair or remove it.")
            else:
                images += is_image(entry.name)
                self.ignored[_kind(entry.name)] += 1
        if not folders and images:
            raise NoLabelsError(
                f"{self._root}: {images} images, but no class folders: create one folder per class."
            )
        if not folders:
            raise DataError(f"{self._root}: contains no class folders.")
        return sorted(folders)

    def _images_below(self, folder: str) -> list[str]:
        found = []
        for place, names in sorted(files_below(folder)):
            found += [os.path.join(place, name) for name in sorted(names) if is_image(name)]
            self.ignored.update(_kind(name) for name in names if not is_image(name))
        return found


def files_below(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and each one below it, also by links, with the names of the files in it; hidden ones
    are omitted.

    Raises:
        DataError: a folder cannot be read, or a link leads back to a folder above it.
    """

    def refuse(error: OSError) -> None:  # otherwise, os.walk skips the folder
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for link in (os.path.join(place, name) for name in folders):
            if os.path.islink(link) and _leads_above(link, folder):
                raise DataError(f"the link {link} points to a folder above it: delete it.")
        yield place, [name for name in names if not is_hidden(name)]


def _leads_above(link: str, root: str) -> bool:
    """Whether following a link would lead back: its target is, or contains, a folder on the path
    from `root` to the link. Other links on this path are resolved."""
    real, place = os.path.realpath(link) + os.sep, os.path.dirname(link)
    while not (os.path.realpath(place) + os.sep).startswith(real):
        if len(place) <= len(root):
            return False
        place = os.path.dirname(place)
    return True


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _kind(name: str) -> str:
    return os.path.splitext(name)[1].lower() or name


def read_on_disk(path: str) -> bytes:
    """The bytes of a file, in fewer system calls than `open` needs.

    Raises:
        OSError: it cannot be read; ENXIO if it might never end.
    """
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


def content_of(path: str) -> bytes | BadRecord:
    """The bytes of a file; a `BadRecord` if it cannot be read for a reason of its own."""
    try:
        return read_on_disk(path)
    except OSError as error:
        if error.errno in _OF_THE_FILE or (error.errno == errno.ENOENT and os.path.islink(path)):
            lost = error.errno == errno.ENOENT
            return BadRecord(LOST_LINK if lost else error.strerror or str(error))
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


def sizes_of(paths: Sequence[str]) -> list[int]:
    """The sizes of files in bytes; -1 where there is no such file, as for a broken link."""
    return [-1 if isinstance(seen, OSError) else seen.st_size for seen in stats_of(paths)]


def stats_of(paths: Sequence[str]) -> Iterator[os.stat_result | OSError]:
    """What is known of each file, or why nothing is; asked in many threads, for NFS."""

    def ask(path: str) -> os.stat_result | OSError:
        try:
            return os.stat(path)
        except ValueError:  # a null character
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as error:
            return error

    with ThreadPoolExecutor(_STAT_THREADS) as threads:
        yield from threads.map(ask, paths)
