"""Resizes images for `convert`, and computes mean and standard deviation of their pixels."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from raytrain_ddp.data.pixels.decoding import (
    ORIENTATION,
    Pixels,
    open_encoded_image,
    orientation_of,
    shrink_for,
)

_JPEG_SIDE = 65_500


def shrink_image(content: bytes, short: int, quality: int) -> bytes:
    """An image as RGB JPEG, with its shorter side reduced to `short` pixels.

    An RGB JPEG that is not too large stays unchanged: encoding it again would lose quality. Of the
    EXIF data, the orientation is kept. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is
    at least twice the new size.

    Raises:
        Exception: it cannot be decoded; decoders raise any type.
    """
    picture = open_encoded_image(content)
    image = Image.open(io.BytesIO(content))
    least = min(picture.height, picture.width)
    if least <= short:
        if image.format == "JPEG" and image.mode == "RGB":
            return content
        pixels, size = picture.pixels(), (picture.height, picture.width)
    else:
        size = (
            max(1, round(picture.height * short / least)),
            max(1, round(picture.width * short / least)),
        )
        pixels = picture.pixels(shrink_for((picture.height, picture.width), size))
    if max(size) > _JPEG_SIDE:
        raise ValueError(f"{size[1]} x {size[0]} pixels: a JPEG has at most {_JPEG_SIDE} per side")
    resized = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if (orientation := orientation_of(image)) != 1:
        exif[ORIENTATION] = orientation
    encoded = io.BytesIO()
    resized.save(encoded, "JPEG", quality=quality, exif=exif)
    return encoded.getvalue()


def encode_png(image: Any) -> bytes:
    """Encodes a PIL image losslessly."""
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()


def decode_image(content: bytes) -> Pixels:
    """RGB, uint8 (height, width, 3), as in training."""
    return open_encoded_image(content).pixels()


@dataclass(frozen=True)
class PixelCounts:
    """A histogram of pixel values per channel; sums are exact in any order.

    Args:
        values: (3, 256).
        height, width: minimum and maximum, in pixels.
    """

    images: int
    values: npt.NDArray[np.int64]
    height: tuple[int, int]
    width: tuple[int, int]

    @classmethod
    def none(cls) -> PixelCounts:
        return cls(0, np.zeros((3, 256), np.int64), (2**31, 0), (2**31, 0))

    @classmethod
    def of(cls, pixels: Pixels) -> PixelCounts:
        values = np.array(Image.fromarray(pixels).histogram(), np.int64).reshape(3, 256)
        height, width, _ = pixels.shape
        return cls(1, values, (height, height), (width, width))

    def plus(self, other: PixelCounts) -> PixelCounts:
        return PixelCounts(
            self.images + other.images,
            self.values + other.values,
            _hull(self.height, other.height),
            _hull(self.width, other.width),
        )

    def mean_std(self) -> tuple[list[float], list[float]]:
        """Per channel, on a scale of 0 to 1; rounded only at the end."""
        means, deviations = [], []
        for counts in self.values.tolist():
            pixels = sum(counts)
            mean = Fraction(sum(n * value for value, n in enumerate(counts)), 255 * pixels)
            square = Fraction(sum(n * value**2 for value, n in enumerate(counts)), 255**2 * pixels)
            means.append(float(mean))
            deviations.append(sqrt(square - mean**2))
        return means, deviations

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "values": self.values.tolist()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> PixelCounts:
        return cls(**{**record, "values": np.array(record["values"], np.int64)})


def _hull(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])
