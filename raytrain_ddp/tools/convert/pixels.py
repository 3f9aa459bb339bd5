"""Resizes images for `convert`."""

from __future__ import annotations

import io

from PIL import Image

from raytrain_ddp.data.pixels.decoding import (
    ORIENTATION,
    open_encoded_image,
    orientation_of,
    shrink_for,
)

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
