"""Images that are given one by one: paths, URIs, encoded bytes, PIL images and arrays."""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from PIL import Image

from raytrain_ddp.data.formats.image_folder import content_of, stats_of
from raytrain_ddp.data.formats.shard import read_file, with_retries
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.errors import DataError
from raytrain_ddp.uri import open_uri, reason_of, without_secrets

_ROWS_PER_BLOCK = 256


class GivenImages:
    """A source of (encoded image or PIL image, 0); there are no labels.

    Args:
        images: each a path, a URI, encoded bytes, a PIL image, or a uint8 array of (height, width),
            (height, width, 3) or (height, width, 4).
        pipes: the paths that may be pipes, such as /dev/stdin, which are read to their end.
            Default: all.
    """

    class_names: list[str] = []  # noqa: RUF012  (part of ImageSource; there are none)

    def __init__(self, images: Sequence[Any], pipes: Container[str] | None = None) -> None:
        self._images, self._pipes = images, pipes
        self.blocks = runs_of(len(images), _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> list[tuple[Any, int]]:
        return [(_opened(self._images[row], self._pipes), 0) for row in rows.tolist()]

    def labels(self) -> Rows:
        return np.zeros(len(self._images), np.int64)

    def where(self, row: int) -> str:
        image = self._images[row]
        named = isinstance(image, str | os.PathLike)
        return without_secrets(os.fspath(image)) if named else f"image {row}"

    def fingerprint(self) -> str:
        """Of the paths, and the sizes and modification times of local files."""
        paths = [self.where(row) for row in range(len(self._images))]
        digest = sha256()
        for path, seen in zip(paths, stats_of(paths), strict=True):
            of_file = None if isinstance(seen, OSError) else (seen.st_size, seen.st_mtime_ns)
            digest.update(f"{path} {of_file}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def _opened(image: Any, pipes: Container[str] | None) -> Any:
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        if "://" in path:
            return _in_store(path)
        try:
            is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)
        except (OSError, ValueError):
            return BadRecord("no such file")
        if is_pipe and (pipes is None or path in pipes):
            with open(path, "rb") as pipe:
                return pipe.read()
        return content_of(path)
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    return image if isinstance(image, Image.Image) and all(image.size) else _of_array(image)


def _in_store(uri: str) -> bytes | BadRecord:
    def ask() -> bytes:
        fs, path = open_uri(uri)
        return read_file(fs, path)

    outcome = with_retries(ask, is_local=False)
    if isinstance(outcome, FileNotFoundError):
        return BadRecord("no such file")
    if isinstance(outcome, Exception):
        raise DataError(f"{without_secrets(uri)}: cannot be read: {reason_of(uri, outcome)}.")
    return outcome


def _of_array(image: Any) -> Image.Image | BadRecord:
    array = np.asarray(image)
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not fits or not array.size:
        return BadRecord(
            f"an array of {array.dtype} {array.shape}; expected uint8 (height, width, 3)"
        )
    return Image.fromarray(array)
