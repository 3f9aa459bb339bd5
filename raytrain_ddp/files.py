"""What outlasts a power cut."""

from __future__ import annotations

import os


def fsync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
