"""Decodes images to pixels: JPEG with libjpeg-turbo, everything else with Pillow. No torch.

Both give the same pixels for JPEG (both are libjpeg-turbo with the same settings); simplejpeg
releases the GIL, needs 0.7 of the time and can decode at a fraction of the size. Files that it
rejects (CMYK, unusual or slightly damaged files) are decoded by Pillow. Of most JPEGs only the part
that is used can be decoded, to the same pixels, if the package was built with `_jpeg_region.c`.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from PIL import Image

Pixels = npt.NDArray[np.uint8]

_log = logging.getLogger("raytrain_ddp")
ORIENTATION = 0x0112  # EXIF
_SIDEWAYS = 5  # from this orientation on, width and height are swapped
_FLIPS = (
    *((0, 0), (1, 1), (1, -1), (-1, -1), (-1, 1)),  # (0 is no orientation), 1 to 4
    *((1, 1), (1, -1), (-1, -1), (-1, 1)),  # 5 to 8, after the axes are swapped
)
_DENOMINATORS = (8, 4, 2)
_WHITE = 255
_MARGINS = 64  # columns: what _jpeg_region.c decodes beside a part, at most
_OBJECT = re.compile(r"\s*<[\w.]+ object at 0x[0-9a-fA-F]+>")  # in Pillow's messages


@dataclass(frozen=True)
class EncodedImage:
    """An image whose size is known and whose pixels are decoded on demand.

    Args:
        height, width: in pixels, after rotation.
        orientation: EXIF's, 1 to 8; 1: unchanged.
        once: a single part of it is used.
    """

    height: int
    width: int
    orientation: int
    jpeg: bytes | None
    other: Any  # a PIL image, if it is not a JPEG
    once: bool = False
    _decoded: dict[int, Pixels] = field(default_factory=dict, repr=False)  # the latest, by `shrink`

    def pixels(self, shrink: int = 1) -> Pixels:
        """RGB, uint8 (height, width, 3), both divided by `shrink` (1, 2, 4, 8) and rounded up.

        Raises:
            ValueError, OSError: the image is damaged.
        """
        if shrink not in self._decoded:
            self._decoded.clear()
            self._decoded[shrink] = self._pixels(shrink)
        return self._decoded[shrink]

    def part(self, top: int, left: int, height: int, width: int) -> Pixels:
        """These pixels, uint8 (height, width, 3). If that is all that is used of a JPEG, what is
        below and beside them is not decoded, nor seen to be damaged.

        Raises: as `pixels`.
        """
        decode = _region_decoder()
        if decode is not None and self.once and self.jpeg and self.orientation == 1:
            out = np.empty((height, width + _MARGINS, 3), np.uint8)
            begin = decode(self.jpeg, out, top, left, height, width)
            if begin >= 0:
                return out[:, begin : begin + width]
        return self.pixels()[top : top + height, left : left + width]

    def _pixels(self, shrink: int) -> Pixels:
        if self.jpeg is None:
            return _upright(_rgb(self.other, shrink), self.orientation)
        height, width = self.height, self.width
        if self.orientation >= _SIDEWAYS:
            height, width = width, height
        least = {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
        try:
            pixels = simplejpeg.decode_jpeg(self.jpeg, **(least if shrink > 1 else {}))
        except ValueError:
            pixels = _rgb(Image.open(io.BytesIO(self.jpeg)), shrink)
        return _upright(pixels, self.orientation)


def open_encoded_image(
    image: Any, exif_orientation: bool = False, once: bool = False
) -> EncodedImage:
    """Reads the header of encoded bytes; accepts a PIL image as well.

    Args:
        once: see EncodedImage.

    Raises:
        ValueError, OSError: not a known image format. If `image` is an exception, it is raised.
    """
    if isinstance(image, Exception):
        raise image
    if not isinstance(image, bytes):
        return _of_pil(image, exif_orientation)
    if image[:2] == b"\xff\xd8":
        try:
            height, width, color_space, _ = simplejpeg.decode_jpeg_header(image)
        except ValueError:
            return _of_pil(Image.open(io.BytesIO(image)), exif_orientation)
        _require_few_pixels(height, width)
        if color_space not in ("CMYK", "YCCK"):
            turn = orientation_of(Image.open(io.BytesIO(image))) if exif_orientation else 1
            height, width = (width, height) if turn >= _SIDEWAYS else (height, width)
            return EncodedImage(height, width, turn, image, None, once)
    return _of_pil(Image.open(io.BytesIO(image)), exif_orientation)


@lru_cache(maxsize=1)
def _region_decoder() -> Callable[..., int] | None:
    """`decode` of _jpeg_region.c with the libjpeg-turbo of Pillow's wheel; None: one is missing."""
    try:
        from raytrain_ddp.data.pixels import _jpeg_region  # type: ignore[attr-defined]
    except ImportError:
        return None
    libraries = (Path(PIL.__file__).parent.parent / "pillow.libs").glob("libjpeg*.so*")
    for library in libraries:
        try:
            _jpeg_region.open(str(library))
        except OSError:
            continue
        return _jpeg_region.decode  # type: ignore[no-any-return]
    return None


def reason_for(error: BaseException) -> str:
    """Why an image cannot be decoded, in one line, without the addresses of objects."""
    return _OBJECT.sub("", str(error)).partition("\n")[0].rstrip(". ") or type(error).__name__


def shrink_for(crop: tuple[int, int], size: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 by which a crop can be divided and still have twice the `size` that it
    is resized to, both (height, width); else 1."""
    for shrink in _DENOMINATORS:
        if crop[0] >= 2 * shrink * size[0] and crop[1] >= 2 * shrink * size[1]:
            return shrink
    return 1


def _require_few_pixels(height: int, width: int) -> None:
    """Raises the same error as Pillow for images that claim too many pixels."""
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > 2 * most:
        raise Image.DecompressionBombError(
            f"{width} x {height} pixels exceed {2 * most} (twice Pillow's MAX_IMAGE_PIXELS)"
        )


def _of_pil(image: Any, exif_orientation: bool) -> EncodedImage:
    turn = orientation_of(image) if exif_orientation else 1
    width, height = image.size if turn < _SIDEWAYS else reversed(image.size)
    return EncodedImage(height, width, turn, None, image)


def orientation_of(image: Any) -> int:
    """The EXIF orientation of a Pillow image, 1 to 8; 1 for TIFF, which Pillow rotates itself."""
    turn = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION, 1)
    return turn if turn in range(1, 9) else 1


def _rgb(image: Any, shrink: int) -> Pixels:
    """Like `Image.convert("RGB")`: alpha is dropped, and values outside 0 to 255 are clipped,
    which is reported."""
    if image.mode.startswith("I") or image.mode == "F":  # of 16 or 32 bits
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if not 0 <= low <= high <= _WHITE or (image.mode == "F" and 0 < high < 10):
            _tell_once(
                "images of 16 or 32 bits per pixel: values below 0 become black, values above 255 "
                "white, and fractions are truncated, as in Pillow; convert them to 8 bits."
            )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors, without Pillow's warning
    image = image.convert("RGB")
    return np.array(image.reduce(shrink) if shrink > 1 else image)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Applies EXIF's orientation: 5 to 8 swap the axes, then flips follow."""
    if orientation >= _SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    up, left = _FLIPS[orientation]
    return np.ascontiguousarray(pixels[::up, ::left])


@lru_cache(maxsize=8)
def _tell_once(line: str) -> None:
    _log.warning(line)
