"""Augments micro-batches of uint8 images on the device: flips, normalizes, erases and mixes.

Nothing here makes the host wait for the device: no shape and no branch depends on a value there.
Random numbers come from the host: per image with the batch, per micro-batch from torch's default
CPU generator, which is seeded for each slot. So they are the same on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig
from raytrain_ddp.data.order import Rows

_TRIES = 10
ERASE_DRAWS = 3 + 2 * _TRIES
"""Uniform numbers that `erase_boxes` needs per image."""


def erase_boxes(
    size: tuple[int, int], probability: float, draws: npt.NDArray[np.float64]
) -> Tensor:
    """The rectangle to erase in each image, on the host (random erasing, Zhong et al. 2020).

    It has 2 to 33 % of the area and an aspect ratio of 0.3 to 3.3. The first of ten candidates that
    fits is used, and none if none fits, as in torchvision's RandomErasing.

    Args:
        size: height and width of the images.
        draws: uniform numbers in [0, 1), shape (n, ERASE_DRAWS).

    Returns:
        int64 (n, 4): top, left, height, width; zeros if nothing is erased.
    """
    height, width = size
    area = height * width * (0.02 + (0.33 - 0.02) * draws[:, :_TRIES])  # (n, tries)
    aspect = 0.3 * (3.3 / 0.3) ** draws[:, _TRIES : 2 * _TRIES]
    tall, wide = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = fits.argmax(1)[:, None]
    tall, wide = np.take_along_axis(tall, first, 1)[:, 0], np.take_along_axis(wide, first, 1)[:, 0]
    place_y, place_x, chance = draws[:, 2 * _TRIES :].T
    top, left = np.floor(place_y * (height - tall + 1)), np.floor(place_x * (width - wide + 1))
    boxes = np.stack((top, left, tall, wide), 1)
    boxes[~fits.any(1) | (chance >= probability)] = 0
    return torch.from_numpy(boxes.astype(np.int64))


def finish_images(
    images: Tensor,
    mean: Tensor,
    std: Tensor,
    flip: Tensor | None = None,
    erase: Tensor | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Model inputs from images: flipped where `flip`, normalized, then 0 where `erase`.

    The values do not depend on the memory format. All tensors are on one device.

    Args:
        images: uint8 (n, 3, h, w), in either memory format.
        mean, std: of pixel values 0 to 255, float32 (3, 1, 1).
        flip: bool (n,).
        erase: (n, 4), from `erase_boxes`; in the flipped image.
        channels_last: the memory format of the result.

    Returns:
        float32 (n, 3, h, w).
    """
    if flip is not None:
        # Adds the difference modulo 256: a `where` of bytes takes ten times as long on a CPU.
        chosen = flip.to(torch.uint8).view(-1, 1, 1, 1)
        images = images.flip(-1).sub_(images).mul_(chosen).add_(images)
    inputs = _normalized(images, mean, std, channels_last)
    if erase is not None:
        top, left, tall, wide = erase.T.unsqueeze(-1)  # each (n, 1)
        y, x = (torch.arange(size, device=erase.device) for size in images.shape[-2:])
        rows, columns = (y >= top) & (y < top + tall), (x >= left) & (x < left + wide)
        inputs.masked_fill_((rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), 0)
    return inputs


def _normalized(images: Tensor, mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """Changes the memory layout while values are bytes, then works in place: on a CPU, allocating
    memory costs more than the arithmetic."""
    if not channels_last:
        return images.contiguous().float().sub_(mean).div_(std)
    n, channels, height, width = images.shape
    # Rows of w * 3 values: on a CPU, five times as fast as broadcasting three values to each pixel.
    rows = images.permute(0, 2, 3, 1).reshape(n, height, width * channels).float()
    rows.sub_(mean.flatten().repeat(width)).div_(std.flatten().repeat(width))
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Mixed:
    """The labels of mixed images.

    Args:
        labels, partners: class indices, int64 (n,), or labels, float (n, labels).
        share: the weight of each image's own label; the rest is its partner's.
    """

    labels: Tensor
    partners: Tensor
    share: float

    def loss(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss with labels mixed in these shares, shape ().

        Args:
            of: the mean loss for labels; linear in the target that they stand for.
        """
        own = of(self.labels)
        return own if self.share == 1 else self.share * own + (1 - self.share) * of(self.partners)


def partners_of(rows: Rows) -> Tensor:
    """The partner of each sample of a micro-batch, made from a different row; on the host.

    Without repeats it is the previous sample, and the last for the first one, as in torchvision's
    MixUp and CutMix. Copies of a row are mixed with different rows. A row that is alone is its own
    partner.

    Args:
        rows: row ids of the samples, shape (n,); copies have the same id.

    Returns:
        int64 (n,): indices into the micro-batch; a permutation if all rows have equally many
        copies.
    """
    _, first, group = np.unique(rows, return_index=True, return_inverse=True)
    group = first.argsort().argsort()[group]  # numbered by first occurrence
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    copy = np.empty(len(rows), np.int64)
    copy[order] = np.arange(len(rows)) - np.repeat(starts, counts)
    others = len(counts) - 1
    if others < 1:
        return torch.arange(len(rows))
    other = (group - 1 - copy % others) % len(counts)
    return torch.from_numpy(order[starts[other] + copy % counts[other]])


def mix(
    inputs: Tensor, labels: Tensor, partners: Tensor | None, config: AugmentConfig
) -> tuple[Tensor, Mixed]:
    """Mixes each image with its partner.

    mixup (Zhang et al. 2018) is a weighted sum, cutmix (Yun et al. 2019) a rectangle pasted in;
    if both are enabled, a fair coin decides. Uses torch's default CPU generator if any is enabled.

    Args:
        inputs: float (n, 3, h, w), not modified; the result keeps its memory format.
        labels: int64 (n,), or float (n, labels).
        partners: from `partners_of`, int64 (n,), on the device; None if neither is enabled.
    """
    if partners is None or (not config.mixup and not config.cutmix):
        return inputs, Mixed(labels, labels, 1.0)
    others = labels.index_select(0, partners)
    sums = not config.cutmix or (config.mixup > 0 and float(torch.rand((), device="cpu")) < 0.5)
    alpha = config.mixup if sums else config.cutmix
    share = float(torch.distributions.Beta(alpha, alpha, validate_args=False).sample())
    if sums:
        return _taken(inputs, partners).lerp_(inputs, share), Mixed(labels, others, share)
    height, width = inputs.shape[-2:]
    side = 0.5 * math.sqrt(1 - share)
    left, right = _span(width, int(side * width))
    top, bottom = _span(height, int(side * height))
    share = 1 - (bottom - top) * (right - left) / (height * width)  # after clipping at the borders
    mixed = inputs.clone()
    mixed[..., top:bottom, left:right] = _taken(inputs[..., top:bottom, left:right], partners)
    return mixed, Mixed(labels, others, share)


def _taken(images: Tensor, which: Tensor) -> Tensor:
    """`index_select` that preserves channels_last."""
    if not images.is_contiguous(memory_format=torch.channels_last):
        return images.index_select(0, which)
    return images.permute(0, 2, 3, 1).index_select(0, which).permute(0, 3, 1, 2)


def _span(length: int, half: int) -> tuple[int, int]:
    """Start and stop of a range of twice `half` about a random center, clipped at the borders."""
    center = int(torch.randint(length, (), device="cpu"))
    return max(0, center - half), min(length, center + half)
