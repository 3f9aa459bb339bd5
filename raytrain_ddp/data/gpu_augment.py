"""What is done to a micro-batch of uint8 images on the device: mirrored, normalised, erased, mixed.

Nothing here makes the host wait for the device: no shape and no branch depends on a value there.
Random numbers come from the host: per image with the batch, per micro-batch from torch's default
CPU generator, which is seeded for each slot. So they are the same on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.input_sections import AugmentConfig
from raytrain_ddp.data.sample_rng import Rows

_TRIES = 10
ERASE_DRAWS = 3 + 2 * _TRIES
"""Uniform numbers that `erase_boxes` needs for an image."""


def erase_boxes(
    size: int | tuple[int, int], probability: float, draws: npt.NDArray[np.float64]
) -> Tensor:
    """The rectangle that is erased of each image, on the host (random erasing, Zhong et al. 2020).

    Of 2 to 33 % of the area and of aspect 0.3 to 3.3; the first of ten that fits is taken, and none
    if none fits, as torchvision's RandomErasing does it.

    Args:
        size: height and width of the images; one number: of square ones.
        draws: uniform numbers in [0, 1), shape (n, ERASE_DRAWS).

    Returns:
        int64 (n, 4): top, left, height, width; zeros where nothing is erased.
    """
    height, width = (size, size) if isinstance(size, int) else size
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


def finish(
    images: Tensor,
    mean: Tensor,
    std: Tensor,
    flip: Tensor | None = None,
    erase: Tensor | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Inputs of a model from images: mirrored where `flip`, normalised, then 0 where `erase`.

    The values do not depend on the memory format. All tensors are on one device.

    Args:
        images: uint8 (n, 3, h, w), in either memory format.
        mean, std: of pixel values 0 to 255, float32 (3, 1, 1).
        flip: bool (n,).
        erase: (n, 4), from `erase_boxes`; in the mirrored image.
        channels_last: the memory format of what is returned.

    Returns:
        float32 (n, 3, h, w).
    """
    if flip is not None:
        # Modulo 256, the difference where 1: a `where` of bytes takes ten times as long on a CPU.
        chosen = flip.to(torch.uint8).view(-1, 1, 1, 1)
        images = images.flip(-1).sub_(images).mul_(chosen).add_(images)
    inputs = _normalised(images, mean, std, channels_last)
    if erase is not None:
        inputs.masked_fill_(_inside(erase, *images.shape[-2:]), 0)
    return inputs


def _normalised(images: Tensor, mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """Laid out while still a byte a value; then in place, as fresh memory costs a CPU more than the
    arithmetic."""
    if not channels_last:
        return images.contiguous().float().sub_(mean).div_(std)
    n, channels, height, width = images.shape
    # Rows of w * 3 values: on a CPU five times as fast as broadcasting three values to each pixel.
    rows = images.permute(0, 2, 3, 1).reshape(n, height, width * channels).float()
    rows.sub_(mean.flatten().repeat(width)).div_(std.flatten().repeat(width))
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


def _inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """bool (n, 1, height, width): the pixels inside of each box."""
    top, left, tall, wide = boxes.T.unsqueeze(-1)  # each (n, 1)
    y = torch.arange(height, device=boxes.device)
    x = torch.arange(width, device=boxes.device)
    rows, columns = (y >= top) & (y < top + tall), (x >= left) & (x < left + wide)
    inside: Tensor = rows.unsqueeze(2) & columns.unsqueeze(1)
    return inside.unsqueeze(1)


@dataclass(frozen=True)
class Mixed:
    """The labels of mixed images.

    Args:
        labels, partners: class indices, int64 (n,).
        share: how much of each image is of its own label; the rest is of its partner's.
    """

    labels: Tensor
    partners: Tensor
    share: float

    def loss(self, logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Mean cross entropy, shape (), as with labels mixed in these shares.

        Args:
            logits: (n, classes).
        """
        own = cross_entropy(logits, self.labels, label_smoothing=label_smoothing)
        if self.share == 1:
            return own
        others = cross_entropy(logits, self.partners, label_smoothing=label_smoothing)
        return self.share * own + (1 - self.share) * others


def partners_of(rows: Rows) -> Tensor:
    """Which sample of a micro-batch each one is mixed with, on the host: of another row.

    Without repeats the one before it, the first with the last, as torchvision's MixUp and CutMix.
    The copies of a row meet copies of different rows. A row that is alone is its own partner.

    Args:
        rows: row ids of the samples, shape (n,); copies have the same.

    Returns:
        int64 (n,): places in the micro-batch; a permutation where all rows have as many copies.
    """
    _, first, group = np.unique(rows, return_index=True, return_inverse=True)
    group = first.argsort().argsort()[group]  # numbered as they come
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
    with both on, a fair coin chooses. Draws from torch's default CPU generator, if any is on.

    Args:
        inputs: float (n, 3, h, w), not written to; the result keeps its memory format.
        labels: int64 (n,).
        partners: from `partners_of`, int64 (n,), on the device; None where neither is on.
    """
    if partners is None or (not config.mixup and not config.cutmix):
        return inputs, Mixed(labels, labels, 1.0)
    share, box = draw_mix(config, *inputs.shape[-2:])
    others = labels.index_select(0, partners)
    if box is None:
        return _taken(inputs, partners).lerp_(inputs, share), Mixed(labels, others, share)
    top, left, bottom, right = box
    mixed = inputs.clone()
    mixed[..., top:bottom, left:right] = _taken(inputs[..., top:bottom, left:right], partners)
    return mixed, Mixed(labels, others, share)


def draw_mix(
    config: AugmentConfig, height: int, width: int
) -> tuple[float, tuple[int, int, int, int] | None]:
    """How a micro-batch is mixed, from torch's default CPU generator.

    Returns:
        the share that each image keeps; cutmix: the box that it loses (top, left, bottom, right),
        mixup: None.
    """
    sums = not config.cutmix or (config.mixup > 0 and float(torch.rand((), device="cpu")) < 0.5)
    alpha = config.mixup if sums else config.cutmix
    share = float(torch.distributions.Beta(alpha, alpha, validate_args=False).sample())
    if sums:
        return share, None
    side = 0.5 * math.sqrt(1 - share)
    left, right = _span(width, int(side * width))
    top, bottom = _span(height, int(side * height))
    share = 1 - (bottom - top) * (right - left) / (height * width)  # as it was cut
    return share, (top, left, bottom, right)


def _taken(images: Tensor, which: Tensor) -> Tensor:
    """`index_select` that keeps channels_last."""
    if not images.is_contiguous(memory_format=torch.channels_last):
        return images.index_select(0, which)
    return images.permute(0, 2, 3, 1).index_select(0, which).permute(0, 3, 1, 2)


def _span(length: int, half: int) -> tuple[int, int]:
    """From and to of a stretch of twice `half` about a random centre, cut off at the borders."""
    centre = int(torch.randint(length, (), device="cpu"))
    return max(0, centre - half), min(length, centre + half)
