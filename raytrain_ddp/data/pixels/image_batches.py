"""Makes batches of images: decodes, crops, resizes and augments on the host, as uint8.

Operations that are cheap for whole batches (flip, normalize, erase, mix) run on the device: see
gpu_augment.py. All random choices come from the sample's own `Draws`.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from raytrain_ddp.config.sections import AugmentConfig, DataConfig
from raytrain_ddp.data.loading.sources import Batch, Data, ImageSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.auto_augment import apply_policy, policy_draws
from raytrain_ddp.data.pixels.decoding import (
    EncodedImage,
    Pixels,
    open_encoded_image,
    reason_for,
    shrink_for,
)
from raytrain_ddp.data.pixels.gpu_augment import ERASE_DRAWS, erase_boxes, partners_of
from raytrain_ddp.errors import DataError, printable

_log = logging.getLogger("raytrain_ddp")
_CROP, _FLIP, _POLICY, _ERASE = range(4)  # streams of random numbers
_GROWS_BY = 32  # pixels
_TRIES = 10
_ASPECT = 4 / 3  # of a random crop: 3/4 to 4/3
_LONGEST = 8  # maximum ratio of the sides
CENTER_SHARE = 0.875
"""Of the shorter side: the usual 224 of 256 pixels."""
Mode = Literal["bilinear", "bicubic"]

OnBad = Callable[[int, str], None]


def image_data(
    source: ImageSource,
    config: DataConfig,
    augment: AugmentConfig | None,
    classes: int,
    on_bad: OnBad | None = None,
) -> Data:
    """Batches of {"image": uint8 (n, 3, height, width), channels last; "label": int64 (n,), or
    float32 (n, targets)}; also {"flip": bool (n,)}, {"erase": (n, 4)}, {"partner": int64 (n,)}
    where `augment` asks for them.

    Depending on `config.bad_records`, a bad record is an error or is omitted from its batch.

    Args:
        augment: None for evaluation, which uses the center of each image.
        on_bad: called with the row of a bad record, which is omitted, and why it is bad; instead of
            what `config.bad_records` says. Only without `augment`.
    """
    if augment is None:
        config = replace(
            config, image_size=config.eval_size or config.image_size, start_size=0, grow_epochs=0
        )
        plain, share = AugmentConfig(crop="none"), config.eval_crop
        return Data(source, _Collate(source, config, plain, classes, share, on_bad))
    return Data(source, _Collate(source, config, augment, classes))


def _stacked(labels: Sequence[Any]) -> torch.Tensor:
    if labels and isinstance(labels[0], np.ndarray):
        return torch.from_numpy(np.stack(labels))
    return torch.tensor(labels, dtype=torch.int64)


def device_augmentation(
    augment: AugmentConfig, draws: Draws, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The operations that the device applies to a batch: "flip", "erase" and "partner", see above.

    Args:
        size: height and width of the images.
    """
    made: dict[str, torch.Tensor] = {}
    if augment.flip:
        made["flip"] = torch.from_numpy(draws.uniform(1, _FLIP)[:, 0] < 0.5)
    if augment.erase:
        made["erase"] = erase_boxes(size, augment.erase, draws.uniform(ERASE_DRAWS, _ERASE))
    if augment.mixup or augment.cutmix:
        made["partner"] = partners_of(draws.rows)
    return made


def side_in(config: DataConfig, epoch: int) -> int:
    """The side of the square images in an epoch, in pixels; 0: as stored."""
    if epoch >= config.grow_epochs:
        return config.image_size
    grown = (config.image_size - config.start_size) * epoch // config.grow_epochs
    return config.start_size + grown // _GROWS_BY * _GROWS_BY


_Bytes = npt.NDArray[np.uint8]


class BatchMemory:
    """Memory of batches, used again as soon as no tensor refers to it. Fresh memory costs a page
    fault per 4 KiB: a tenth of the loader's CPU time, if a batch is larger than what malloc keeps
    (32 MiB). Several threads may use it; a copy in another process begins empty."""

    def __init__(self) -> None:
        self._free: deque[_Bytes] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMemory, ()

    def empty(self, images: int, height: int, width: int) -> Tensor:
        """Uninitialized uint8 (images, 3, height, width), channels last."""
        shape = images, height, width, 3
        size = math.prod(shape)
        memory = self._taken(size)
        part = memory[:size]  # alive as long as any tensor refers to it
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(shape).permute(0, 3, 1, 2)

    def _taken(self, size: int) -> _Bytes:
        """Free memory of this size or larger; drops what is too small by now."""
        try:
            while len(memory := self._free.pop()) < size:
                pass
        except IndexError:
            return np.empty(size, np.uint8)
        return memory


@dataclass(eq=False, repr=False)
class _Collate:
    source: ImageSource
    config: DataConfig
    augment: AugmentConfig
    classes: int
    share: float = CENTER_SHARE
    on_bad: OnBad | None = None
    _reported: set[int] = field(default_factory=set, init=False)  # rows already reported
    _memory: BatchMemory = field(default_factory=BatchMemory, init=False)

    def __call__(self, records: Sequence[tuple[Any, Any]], draws: Draws) -> Batch:
        crops = draws.uniform(crop_draws(self.augment), _CROP).tolist()
        policies = draws.uniform(policy_draws(self.augment), _POLICY).tolist()
        images = torch.empty((0, 3, 1, 1), dtype=torch.uint8)
        outs: Sequence[torch.Tensor] = ()  # of one image each
        kept: list[int] = []
        size = (1, 1)
        for place, picture in self._pictures(records, draws.rows.tolist()):
            own = self._size(picture, draws.epoch)
            if not outs:
                images, size = self._memory.empty(len(records), *own), own
                outs = images.split(1)
            elif own != size:
                sizes = f"{size} and {own}"
                flag = "--image-size" if self.on_bad else "--data.image-size"
                raise DataError(f"images of unequal size, {sizes}: set {flag}.")
            out = outs[len(kept)]
            try:
                scaling, mode = self.config.jpeg_scaling, self.config.interpolation
                place_image(out, picture, self.augment, crops[place], scaling, mode, self.share)
            except Exception as error:  # decoders raise any type
                self._refuse(int(draws.rows[place]), error)
                continue
            if policies[place]:
                out[0] = apply_policy(out[0], self.augment, policies[place])
            kept.append(place)
        labels = _stacked([records[place][1] for place in kept])
        made = device_augmentation(self.augment, draws.of(kept), size)
        return {"image": images[: len(kept)], "label": labels, **made}

    def _pictures(
        self, records: Sequence[tuple[Any, Any]], rows: list[int]
    ) -> Iterator[tuple[int, EncodedImage]]:
        """(place, opened picture) of each record that can be opened; one for all repeats of a
        row."""
        before, picture, once = -1, None, len(set(rows)) == len(rows)
        for place, (row, (image, label)) in enumerate(zip(rows, records, strict=True)):
            if isinstance(label, int) and not 0 <= label < self.classes:
                where = self.source.where(row)
                raise DataError(
                    f"{where}: label {label} is not in the range 0 to {self.classes - 1}."
                )
            try:
                if row != before or picture is None:
                    picture = open_encoded_image(image, self.config.exif_orientation, once)
            except Exception as error:
                self._refuse(row, error)
                picture = None
            else:
                yield place, picture
            before = row

    def _size(self, picture: EncodedImage, epoch: int) -> tuple[int, int]:
        """(height, width) of the model's input."""
        side = side_in(self.config, epoch)
        if side or self.augment.crop == "random":
            return side or picture.width, side or picture.width
        return picture.height, picture.width

    def _refuse(self, row: int, reason: Exception) -> None:
        if self.on_bad is not None:
            self.on_bad(row, reason_for(reason))
            return
        line = f"{self.source.where(row)}: not a readable image: {reason_for(reason)}"
        if self.config.bad_records == "error":
            remedy = "Repair or remove it, or set --data.bad-records skip."
            raise DataError(f"{line}. {remedy}") from None
        if row not in self._reported:
            self._reported.add(row)
            _log.warning("skipped %s", printable(line))


# ------------------------------------------------------------------ crops


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
