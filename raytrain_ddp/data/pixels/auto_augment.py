"""Augmentation policies on the host, image by image: ColorJitter, RandAugment, TrivialAugmentWide
and AugMix, with the same operations, magnitudes and pixels as torchvision.

torchvision's own classes draw from torch's process-wide generator, which loader threads share.
Here the caller supplies the random numbers, so an image's pixels depend on nothing else. The tables
of operations and the kernels are torchvision's, except for two that were measured too slow or
depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig

_JITTER_DRAWS = 5  # the order, and a factor for each of four
_CHAINS, _DEPTH, _SEVERITY = 3, 3, 3  # AugMix: chains, operations in the longest, levels in use
_CHAIN_DRAWS = 1 + 3 * _DEPTH
_ORDERS = tuple(permutations(range(4)))

_Operation = tuple[str, list[float], bool]  # name, magnitude of each level, whether -magnitude too


def policy_draws(config: AugmentConfig) -> int:
    """How many uniform numbers `apply_policy` needs per image; 0: it does nothing."""
    of_policy = {
        "none": 0,
        "randaugment": 2 * config.operations,
        "trivial": 3,
        "augmix": 3 + _CHAINS * _CHAIN_DRAWS,
    }
    return _JITTER_DRAWS * any(config.jitter) + of_policy[config.policy]


def apply_policy(image: Tensor, config: AugmentConfig, draws: Sequence[float]) -> Tensor:
    """Color jitter, then the policy. A pure, thread-safe function.

    The pixels do not depend on the memory format of `image` or on torch's number of threads.

    Args:
        image: RGB, uint8 (3, height, width); not written to.
        draws: `policy_draws(config)` uniform numbers in [0, 1).

    Returns:
        uint8 (3, height, width), contiguous unless there was nothing to do; may be `image` itself.

    RandAugment: Cubuk et al. 2020; TrivialAugment: Mueller and Hutter 2021; AugMix: Hendrycks et
    al. 2020.
    """
    if any(config.jitter):
        image = _jitter(image.contiguous(), config.jitter, draws[:_JITTER_DRAWS])
        draws = draws[_JITTER_DRAWS:]
    if config.policy == "none":
        return image
    image = image.contiguous()  # speeds up the kernels; 0.04 ms, once
    if config.policy == "augmix":
        return _augmix(image, draws)
    if config.policy == "trivial":
        which, level, sign = draws
        return _one_of(config.policy, image, which, int(level * 31), sign)
    for which, sign in zip(draws[::2], draws[1::2], strict=True):
        image = _one_of(config.policy, image, which, config.magnitude, sign)
    return image


def _jitter(image: Tensor, most: Sequence[float], draws: Sequence[float]) -> Tensor:
    names = ("Brightness", "Contrast", "Color", "Hue")
    for i in _ORDERS[int(draws[0] * len(_ORDERS))]:
        if most[i]:
            low = -most[i] if names[i] == "Hue" else max(-1.0, -most[i])
            image = _operate(image, names[i], low + draws[1 + i] * (most[i] - low), "randaugment")
    return image


def _augmix(image: Tensor, draws: Sequence[float]) -> Tensor:
    """The gaps that two uniform numbers leave in [0, 1] have the distribution Dirichlet(1, 1, 1);
    Beta(1, 1) is uniform."""
    own, (low, high) = draws[0], sorted(draws[1:3])
    weights = torch.tensor([low, high - low, 1 - high]) * (1 - own)
    mixed = image * own  # float32
    for chain, weight in enumerate(weights.tolist()):
        start = 3 + chain * _CHAIN_DRAWS
        depth = 1 + int(draws[start] * _DEPTH)
        augmented = image
        for at in range(start + 1, start + 1 + 3 * depth, 3):
            which, level, sign = draws[at : at + 3]
            augmented = _one_of("augmix", augmented, which, int(level * _SEVERITY), sign)
        mixed += augmented * weight
    return mixed.to(torch.uint8)


def _one_of(policy: str, image: Tensor, which: float, level: int, sign: float) -> Tensor:
    space = _space(policy, *image.shape[-2:])
    name, magnitudes, signed = space[int(which * len(space))]
    by = -magnitudes[level] if signed and sign < 0.5 else magnitudes[level]
    return _operate(image, name, by, policy)


@lru_cache(maxsize=64)
def _space(policy: str, height: int, width: int) -> list[_Operation]:
    """The operations that a policy chooses from, with equal probability."""
    levels = 10 if policy == "augmix" else 31
    table, found = _torchvisions(policy)._AUGMENTATION_SPACE, list[_Operation]()
    for name in _torchvisions("randaugment")._AUGMENTATION_SPACE:  # AugMix's are in another order
        if name in table:
            of_levels, signed = table[name]
            magnitudes = of_levels(levels, height, width)
            found.append(
                (name, [0.0] * levels if magnitudes is None else magnitudes.tolist(), signed)
            )
    return found


def _operate(image: Tensor, name: str, magnitude: float, policy: str) -> Tensor:
    from torchvision.transforms.v2 import functional

    if name == "Contrast":
        return _contrast(functional.rgb_to_grayscale(image), image, 1 + magnitude)
    if name == "Sharpness":
        return _sharpness(image, 1 + magnitude)
    if name == "Hue":
        turned: Tensor = functional.adjust_hue(image, magnitude)
        return turned
    by = _torchvisions(policy)
    made: Tensor = by._apply_image_or_video_transform(
        image, name, magnitude, by.interpolation, by._fill
    )
    return made


@lru_cache(maxsize=3)
def _torchvisions(policy: str) -> Any:
    from torchvision.transforms import v2  # takes seconds: only if a policy is used

    kinds = {"randaugment": v2.RandAugment, "trivial": v2.TrivialAugmentWide, "augmix": v2.AugMix}
    return kinds[policy]()


def _contrast(gray: Tensor, image: Tensor, factor: float) -> Tensor:
    """Blends with the mean gray.

    The mean is computed from integers, exactly. torchvision's, in float32, depends on the number
    of threads in images of more than 2**24 / 255 pixels; in smaller ones both are equal.
    """
    mean = torch.tensor(int(gray.sum()) / gray.numel(), dtype=torch.float32)
    return (image * factor).add_(mean, alpha=1 - factor).clamp_(0, 255).to(torch.uint8)


def _sharpness(image: Tensor, factor: float) -> Tensor:
    """Blends with the image smoothed by ((1, 1, 1), (1, 5, 1), (1, 1, 1)) / 13, except at the
    border.

    As two sums of three: 0.17 ms at 224 x 224, where torchvision's convolution takes 0.4 to 2.6 ms;
    and exact, as no multiple of 1/13 is near a half, where rounding could go either way.
    """
    pixels = image.float()
    inner = pixels[:, 1:-1, 1:-1]
    sums = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    smooth = sums[:, :, :-2] + sums[:, :, 1:-1] + sums[:, :, 2:]
    smooth.add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(smooth.sub_(inner), alpha=1 - factor)
    return pixels.clamp_(0, 255).to(torch.uint8)
