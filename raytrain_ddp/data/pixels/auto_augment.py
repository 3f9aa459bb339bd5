"""Augmentation policies on the host, image by image: ColorJitter, RandAugment, TrivialAugmentWide
and AugMix, with the same operations, magnitudes and pixels as torchvision.

torchvision's own classes draw from torch's process-wide generator, which loader threads share.
Here the caller supplies the random numbers, so an image's pixels depend on nothing else. Kernels
are torchvision's, except for those that were measured too slow or depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig

Policy = Literal["none", "randaugment", "trivial", "augmix"]

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
    space = _space(config.policy, *image.shape[-2:])
    if config.policy == "augmix":
        return _augmix(image, space, draws)
    if config.policy == "trivial":
        which, level, sign = draws
        return _operate(image, *_chosen(space, which, int(level * 31), sign))
    for which, sign in zip(draws[::2], draws[1::2], strict=True):
        image = _operate(image, *_chosen(space, which, config.magnitude, sign))
    return image


def _jitter(image: Tensor, most: Sequence[float], draws: Sequence[float]) -> Tensor:
    names = ("Brightness", "Contrast", "Color", "Hue")
    for i in _ORDERS[int(draws[0] * len(_ORDERS))]:
        if most[i]:
            low = -most[i] if names[i] == "Hue" else max(-1.0, -most[i])
            image = _operate(image, names[i], low + draws[1 + i] * (most[i] - low))
    return image


def _augmix(image: Tensor, space: list[_Operation], draws: Sequence[float]) -> Tensor:
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
            chosen = _chosen(space, which, int(level * _SEVERITY), sign)
            augmented = _operate(augmented, *chosen, mode="bilinear")
        mixed += augmented * weight
    return mixed.to(torch.uint8)


def _chosen(space: list[_Operation], which: float, level: int, sign: float) -> tuple[str, float]:
    name, magnitudes, signed = space[int(which * len(space))]
    return name, -magnitudes[level] if signed and sign < 0.5 else magnitudes[level]


@lru_cache(maxsize=64)
def _space(policy: Policy, height: int, width: int) -> list[_Operation]:
    """The operations that a policy chooses from, with equal probability."""
    levels = 10 if policy == "augmix" else 31

    def to(most: float, least: float = 0.0) -> list[float]:
        return torch.linspace(least, most, levels).tolist()  # float32, as torchvision's

    if policy == "trivial":
        shear, across, down, angle, color = 0.99, 32.0, 32.0, 135.0, 0.99
        bits = 8 - torch.arange(levels) / ((levels - 1) / 6)
    elif policy == "randaugment":
        shear, across, down, angle, color = 0.3, 150 / 331 * width, 150 / 331 * height, 30.0, 0.9
        bits = 8 - torch.arange(levels) / ((levels - 1) / 4)
    else:
        shear, across, down, angle, color = 0.3, width / 3, height / 3, 30.0, 0.9
        bits = 4 - torch.arange(levels) / ((levels - 1) / 4)
    same = [] if policy == "augmix" else [("Identity", [0.0] * levels, False)]
    return [
        *same,
        ("ShearX", to(shear), True),
        ("ShearY", to(shear), True),
        ("TranslateX", to(across), True),
        ("TranslateY", to(down), True),
        ("Rotate", to(angle), True),
        ("Brightness", to(color), True),
        ("Color", to(color), True),
        ("Contrast", to(color), True),
        ("Sharpness", to(color), True),
        ("Posterize", bits.round().tolist(), False),
        ("Solarize", to(0.0, 1.0), False),
        ("AutoContrast", [0.0] * levels, False),
        ("Equalize", [0.0] * levels, False),
    ]


def _operate(image: Tensor, name: str, magnitude: float, mode: str = "nearest") -> Tensor:
    return _kernels(mode)[name](image, magnitude)


@lru_cache(maxsize=2)
def _kernels(mode: str) -> dict[str, Callable[[Tensor, float], Tensor]]:
    """Name -> kernel(image, magnitude); `mode` of the geometric ones: nearest or bilinear."""
    # The import takes seconds: only when a policy is used.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    interpolation = InterpolationMode(mode)

    def shear(image: Tensor, x: float, y: float) -> Tensor:
        """Shears by a share of the height or width, about the upper left corner."""
        degrees = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
        moved: Tensor = tv.affine(image, 0.0, [0, 0], 1.0, degrees, interpolation, center=[0, 0])
        return moved

    def translate(image: Tensor, x: float, y: float) -> Tensor:
        moved: Tensor = tv.affine(image, 0.0, [int(x), int(y)], 1.0, [0.0, 0.0], interpolation)
        return moved

    return {
        "Identity": lambda image, _: image,
        "ShearX": lambda image, m: shear(image, m, 0.0),
        "ShearY": lambda image, m: shear(image, 0.0, m),
        "TranslateX": lambda image, m: translate(image, m, 0.0),
        "TranslateY": lambda image, m: translate(image, 0.0, m),
        "Rotate": lambda image, m: tv.rotate(image, m, interpolation),
        "Brightness": lambda image, m: tv.adjust_brightness(image, 1 + m),
        "Color": lambda image, m: tv.adjust_saturation(image, 1 + m),
        "Contrast": lambda image, m: _contrast(tv.rgb_to_grayscale(image), image, 1 + m),
        "Sharpness": lambda image, m: _sharpness(image, 1 + m),
        "Hue": tv.adjust_hue,
        "Posterize": lambda image, m: tv.posterize(image, int(m)),
        "Solarize": lambda image, m: tv.solarize(image, 255 * m),
        "AutoContrast": lambda image, _: tv.autocontrast(image),
        "Equalize": lambda image, _: tv.equalize(image),
    }


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
