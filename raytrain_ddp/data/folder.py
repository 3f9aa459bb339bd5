"""Images in one folder per class, listed as torchvision's ImageFolder lists them. No torch."""

from __future__ import annotations

import os
from hashlib import sha256

from raytrain_ddp.data.draws import Rows
from raytrain_ddp.data.plan import runs_of
from raytrain_ddp.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_ROWS_PER_BLOCK = 256


def is_hidden(name: str) -> bool:
    """Whether a file or folder is none of the data: what file managers and notebooks leave."""
    return name.startswith(".") or name in ("__MACOSX", "__pycache__")


class FolderImages:
    """Rows of (encoded image, label) from the files below one folder per class.

    Args:
        root: its folders are the classes, in alphabetical order; images may lie at any depth.

    Raises:
        DataError: there are no class folders, or one of them holds no image.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.class_names = sorted(
            entry.name for entry in os.scandir(root) if entry.is_dir() and not is_hidden(entry.name)
        )
        if not self.class_names:
            raise DataError(f"{root}: holds no class folders.")
        self.files: list[tuple[str, int]] = []  # (path, label) of each row
        for label, name in enumerate(self.class_names):
            found = list(_images_below(os.path.join(root, name)))
            if not found:
                raise DataError(
                    f"{os.path.join(root, name)}: a class folder without images "
                    f"({', '.join(EXTENSIONS)}): fill or remove it."
                )
            self.files += [(path, label) for path in found]
        self.blocks = runs_of(len(self.files), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[bytes, int]]:
        records = []
        for row in rows.tolist():
            path, label = self.files[row]
            try:
                with open(path, "rb") as file:
                    records.append((file.read(), label))
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
        return records

    def fingerprint(self) -> str:
        """Of the names and labels, below the root."""
        digest = sha256()
        for path, label in self.files:
            digest.update(f"{os.path.relpath(path, self._root)} {label}\n".encode())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        return self.files[row][0]


def _images_below(folder: str) -> list[str]:
    places: list[tuple[str, list[str]]] = []
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]
        places.append((place, [name for name in names if not is_hidden(name)]))
    found = []
    for place, names in sorted(places):
        paths = (os.path.join(place, name) for name in sorted(names))
        found += [path for path in paths if path.lower().endswith(EXTENSIONS)]
    return found


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error
