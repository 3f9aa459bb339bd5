"""Resizes images for `convert`, and computes mean and standard deviation of their pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageStat

from raytrain_ddp.data.pixels.decoding import (
    ORIENTATION,
    Pixels,
    open_encoded_image,
    orientation_of,
    shrink_for,
)
from raytrain_ddp.errors import DataError

_MAX_JPEG_SIDE = 65_500


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
    height, width = old = (picture.height, picture.width)
    if (least := min(old)) > short:
        height, width = (max(1, round(side * short / least)) for side in old)
    elif image.format == "JPEG" and image.mode == "RGB":
        return content
    if max(height, width) > _MAX_JPEG_SIDE:
        raise ValueError(f"{width} x {height} pixels: a JPEG has at most {_MAX_JPEG_SIDE} per side")
    pixels = picture.pixels(shrink_for(old, (height, width)))
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if (orientation := orientation_of(image)) != 1:
        exif[ORIENTATION] = orientation
    encoded = io.BytesIO()
    resized.save(encoded, "JPEG", quality=quality, exif=exif)
    return encoded.getvalue()


def sums_of(pixels: Pixels) -> list[int]:
    """Height, width, and for each channel the sum of the values; then those of their squares."""
    stat = ImageStat.Stat(Image.fromarray(pixels))
    return [*pixels.shape[:2], *map(int, stat.sum), *map(int, stat.sum2)]


def described(images: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Mean and standard deviation per channel, on a scale of 0 to 1, and the least and greatest
    sides, from the `sums_of` images; in any order, the same.

    Raises:
        DataError: there are no images.
    """
    if not images:
        raise DataError("none of the images for mean and std can be decoded.")
    table = np.array(images, np.int64)
    scale = 255 * (table[:, 0] * table[:, 1]).sum()
    mean = table[:, 2:5].sum(0) / scale
    variance = table[:, 5:].sum(0) / scale / 255 - mean**2
    height, width, *_ = np.stack([table.min(0), table.max(0)], 1).tolist()
    return {
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(variance, 0)).tolist(),
        "sampled": {"images": len(images), "height": height, "width": width},
    }
