"""Files on a local disk: flushed so that they survive a power failure, and hashed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_READ_BYTES = 2**20


def fsync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
