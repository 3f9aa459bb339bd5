"""Crops and resizes images to the model's input size, as uint8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from raytrain_ddp.config.sections import AugmentConfig
from raytrain_ddp.data.pixels.decoding import EncodedImage, Pixels, open_encoded_image, shrink_for

_TRIES = 10
_ASPECT = 4 / 3  # of a random crop: 3/4 to 4/3
_LONGEST = 8  # maximum ratio of the sides
CENTER_SHARE = 0.875
"""Of the shorter side: the usual 224 of 256 pixels."""
Mode = Literal["bilinear", "bicubic"]


def crop_draws(augment: AugmentConfig) -> int:
    """How many uniform numbers `place_image` needs per image."""
    return {"none": 0, "shift": 2, "random": 2 + 2 * _TRIES}[augment.crop]


def place_image(
    out: Tensor,
    picture: EncodedImage,
    augment: AugmentConfig,
    draws: Sequence[float],
    jpeg_scaling: bool,
    mode: Mode = "bilinear",
    share: float = CENTER_SHARE,
) -> None:
    """Decodes, crops and resizes into `out`, uint8 (1, 3, height, width), channels last.

    `out` is square or of the image's own size.

    Args:
        draws: `crop_draws(augment)` uniform numbers in [0, 1).
        mode: how it is resized. share: of the shorter side, if its center is kept.

    Raises:
        ValueError, OSError: the image is damaged.
    """
    if augment.crop != "random":
        center_into(out, picture, jpeg_scaling, mode, share)
        if augment.crop == "shift":
            out.copy_(shifted(out, draws))
        return
    top, left, height, width = random_box(picture.height, picture.width, augment.scale, draws)
    shrink = shrink_for((height, width), (out.shape[-2], out.shape[-1]))
    top, left = top // shrink * shrink, left // shrink * shrink  # aligned to its pixels
    by = shrink if jpeg_scaling and picture.jpeg else 1
    if by == 1:
        part = picture.part(top, left, height, width)
    else:
        part = picture.pixels(by)[
            top // by : -(-(top + height) // by), left // by : -(-(left + width) // by)
        ]
    resize_into(out, to_tensor(part), height / by, width / by, mode)


def random_box(
    height: int, width: int, scale: tuple[float, float], draws: Sequence[float]
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random part of the image, as in torchvision's
    RandomResizedCrop.

    Its share of the area is uniform in `scale`, its aspect ratio log-uniform in 3/4 to 4/3 (Szegedy
    et al. 2015). The first of ten candidates that fits is used; if none fits, the largest central
    part whose aspect ratio is in that range.

    Args:
        draws: uniform numbers in [0, 1): top, left, ten areas, ten aspects.
    """
    for place in range(2, 2 + _TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[place])
        aspect = _ASPECT ** (2 * draws[place + _TRIES] - 1)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[0] * (height - h + 1)), int(draws[1] * (width - w + 1)), h, w
    w, h = min(width, round(height * _ASPECT)), min(height, round(width * _ASPECT))
    return (height - h) // 2, (width - w) // 2, h, w


def center_into(
    out: Tensor,
    picture: EncodedImage,
    jpeg_scaling: bool,
    mode: Mode = "bilinear",
    share: float = CENTER_SHARE,
) -> None:
    """Resizes the shorter side to size / share and crops the center, as torchvision's Resize and
    CenterCrop do; skipped for exact sizes."""
    height, width = picture.height, picture.width
    if (height, width) == tuple(out.shape[-2:]):
        out.copy_(to_tensor(picture.pixels()))
        return
    size = out.shape[-1]
    longest = _LONGEST * min(height, width)
    if max(height, width) > longest:  # very elongated: resizing all of it could take gigabytes
        pixels = picture.pixels()
        top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
        middle = Image.fromarray(pixels[top : top + longest, left : left + longest])
        picture = open_encoded_image(middle)
        height, width = picture.height, picture.width
    short = max(size, round(size / share))
    long = int(short * max(height, width) / min(height, width))
    h, w = (short, long) if height < width else (long, short)
    shrink = shrink_for((height, width), (h, w)) if jpeg_scaling and picture.jpeg else 1
    whole = torch.empty((1, 3, h, w), dtype=torch.uint8, memory_format=torch.channels_last)
    resize_into(whole, to_tensor(picture.pixels(shrink)), height / shrink, width / shrink, mode)
    top, left = round((h - size) / 2), round((w - size) / 2)
    out.copy_(whole[:, :, top : top + size, left : left + size])


def shifted(images: Tensor, draws: Sequence[float]) -> Tensor:
    """Pads with zeros by an eighth of the width, and crops at a random place."""
    height, width = images.shape[-2:]
    margin, top, left = shift_of(width, draws)
    padded = pad(images, (margin, margin, margin, margin))
    return padded[..., top : top + height, left : left + width]


def shift_of(width: int, draws: Sequence[float]) -> tuple[int, int, int]:
    """(margin, top, left): how far an image is padded, and where it is cropped."""
    margin = max(1, width // 8)
    return margin, int(draws[0] * (2 * margin + 1)), int(draws[1] * (2 * margin + 1))


def resize_into(
    out: Tensor, image: Tensor, height: float, width: float, mode: Mode = "bilinear"
) -> None:
    """Resizes uint8 with antialiasing: `interpolate` without its copies, in half the time.

    Args:
        height, width: of the region that fills `out`; less than the image's by under a pixel.
    """
    size = list(out.shape[-2:])
    exact = (height, width) == tuple(image.shape[-2:])
    scales = (None, None) if exact else (size[0] / height, size[1] / width)
    aten = torch.ops.aten
    by = aten._upsample_bicubic2d_aa if mode == "bicubic" else aten._upsample_bilinear2d_aa
    by.out(image, size, False, *scales, out=out)


def to_tensor(pixels: Pixels) -> Tensor:
    """uint8 (height, width, 3) as (1, 3, height, width) in channels-last memory, without a copy."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])
