"""Augmentation policies on the host: torchvision's pixels, for the same random choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product

import numpy as np
import pytest
import torch
from pictures import picture
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.auto_augment import apply_policy, policy_draws

v2 = pytest.importorskip("torchvision.transforms.v2")

JITTER = (0.4, 1.5, 0.6, 0.2)
EVERY_KIND = [
    AugmentConfig(policy="randaugment", operations=3, magnitude=17),
    AugmentConfig(policy="trivial"),
    AugmentConfig(policy="augmix"),
    AugmentConfig(jitter=JITTER),
    AugmentConfig(jitter=JITTER, policy="randaugment"),
]
OPERATIONS, LEVELS = 14, 31  # of RandAugment and TrivialAugment
# AugMix's own operations, by their places in torchvision's list, which has colors last.
AUGMIX = (0, 1, 2, 3, 4, 9, 10, 11, 12, 5, 6, 7, 8)
CHAIN_DRAWS = 10  # of AugMix: depth, and three for each of three operations


def channels_last(image: Tensor) -> Tensor:
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def draws_of(config: AugmentConfig, images: int, seed: int = 0) -> list[list[float]]:
    return Draws(seed, 0, np.arange(images)).uniform(policy_draws(config)).tolist()


def pick(index: int, count: int) -> float:
    """A uniform number that chooses `index` of `count`."""
    return (index + 0.5) / count


class Scripted:
    """Replaces torch's random numbers, so that torchvision's policies choose what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "randint", self._integer)
        monkeypatch.setattr(torch, "rand", lambda _: torch.tensor(0.2 if self._negative else 0.8))

    def chooses(self, *operations: tuple[int, int, bool], depths: Iterable[int] = ()) -> None:
        """(place of the operation, level, whether negative) of each application."""
        self._operations, self._depths = iter(operations), iter(depths)

    def _integer(self, high: int, size: object = (), low: int = 0) -> Tensor:
        if low:
            return torch.tensor(next(self._depths))
        if high in (OPERATIONS, len(AUGMIX)):
            place, self._level, self._negative = next(self._operations)
            return torch.tensor(place)
        return torch.tensor(self._level)

    def all_used(self) -> bool:
        return next(self._operations, None) is None


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


# ------------------------------------------------------------------ pixel for pixel


def test_trivial_augment_gives_torchvisions_pixels_for_every_operation_level_and_sign(
    scripted: Scripted,
):
    config, theirs, image = AugmentConfig(policy="trivial"), v2.TrivialAugmentWide(), picture()
    for place, level, negative in product(range(OPERATIONS), range(LEVELS), (False, True)):
        scripted.chooses((place, level, negative))
        draws = [pick(place, OPERATIONS), pick(level, LEVELS), pick(1 - negative, 2)]
        assert torch.equal(apply_policy(image, config, draws), theirs(image)), (place, level)
        assert scripted.all_used()


def test_randaugment_gives_torchvisions_pixels_for_every_operation_magnitude_and_sign(
    scripted: Scripted,
):
    image = picture()
    for magnitude in range(0, LEVELS, 3):
        config = AugmentConfig(policy="randaugment", operations=1, magnitude=magnitude)
        theirs = v2.RandAugment(num_ops=1, magnitude=magnitude)
        for place, negative in product(range(OPERATIONS), (False, True)):
            scripted.chooses((place, -1, negative))
            draws = [pick(place, OPERATIONS), pick(1 - negative, 2)]
            pixels = apply_policy(image, config, draws)
            assert torch.equal(pixels, theirs(image)), (place, magnitude)


@pytest.mark.parametrize("size", [(20, 26), (224, 224)])
def test_randaugment_chains_operations_as_torchvision(scripted: Scripted, size: tuple[int, int]):
    config, theirs = AugmentConfig(policy="randaugment", operations=3), v2.RandAugment(num_ops=3)
    for seed in range(12):
        image, draws = picture(*size, seed), draws_of(config, 1, seed)[0]
        pairs = zip(draws[::2], draws[1::2], strict=True)
        scripted.chooses(*[(int(which * OPERATIONS), -1, sign < 0.5) for which, sign in pairs])
        assert torch.equal(apply_policy(image, config, draws), theirs(image))
        assert scripted.all_used()


@pytest.mark.parametrize("size", [(20, 26), (64, 64)])
def test_augmix_gives_torchvisions_pixels(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
):
    config, theirs = AugmentConfig(policy="augmix"), v2.AugMix()
    seen = set()
    for seed in range(40):
        image, draws = picture(*size, seed), draws_of(config, 1, seed)[0]
        own, (low, high) = draws[0], sorted(draws[1:3])
        shares = iter(([own, 1 - own], [low, high - low, 1 - high]))
        # "Must be on a separate method so that we can overwrite it in tests."
        monkeypatch.setattr(
            theirs, "_sample_dirichlet", lambda _, s=shares: torch.tensor([next(s)])
        )
        chosen, depths = [], []
        for start in range(3, 3 + 3 * CHAIN_DRAWS, CHAIN_DRAWS):
            depths.append(1 + int(draws[start] * 3))
            for at in range(start + 1, start + 1 + 3 * depths[-1], 3):
                which, level, sign = draws[at : at + 3]
                place = AUGMIX[int(which * len(AUGMIX))]
                chosen.append((place, int(level * 3), sign < 0.5))
                seen.add(place)
        scripted.chooses(*chosen, depths=depths)
        assert torch.equal(apply_policy(image, config, draws), theirs(image))
        assert scripted.all_used()
    assert seen == {*range(13)}


def test_jitter_gives_torchvisions_pixels_in_every_order():
    """Contrast by 1.5 would be from -0.5: factors are 0 or more."""
    image, theirs = picture(), v2.ColorJitter(*JITTER)
    config = AugmentConfig(jitter=JITTER)
    ranges = [theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue]
    assert ranges[1] == (0.0, 2.5)
    kinds = ("brightness", "contrast", "saturation", "hue")
    for (number, order), seed in product(enumerate(permutations(range(4))), range(2)):
        draws = [pick(number, 24), *draws_of(config, 1, seed)[0][1:]]
        params = {
            f"{kind}_factor": low + draw * (high - low)
            for kind, draw, (low, high) in zip(kinds, draws[1:], ranges, strict=True)
        }
        expected = theirs.transform(image, {**params, "fn_idx": order})
        assert torch.equal(apply_policy(image, config, draws), expected)


def test_our_own_kernels_give_torchvisions_pixels():
    """Hue for a grid of all colors; contrast and sharpness for many factors; the smallest
    images."""
    tv = v2.functional
    steps = torch.arange(0, 256, 15)  # 0 and 255 among them
    colors = torch.cartesian_prod(steps, steps, steps).T.reshape(3, 18, -1).to(torch.uint8)
    hue = AugmentConfig(jitter=(0.0, 0.0, 0.0, 0.5))
    for draw in (0.0, 1 / 6, 0.49, 0.5, 0.57, 2 / 3, 0.75, 0.99):
        pixels = apply_policy(colors, hue, [0.0, 0.0, 0.0, 0.0, draw])
        assert torch.equal(pixels, tv.adjust_hue(colors, -0.5 + draw))
    contrast = AugmentConfig(jitter=(0.0, 1.0, 0.0, 0.0))
    trivial = AugmentConfig(policy="trivial")
    for image in (picture(2, 5), picture(1, 1), torch.full((3, 8, 8), 255).byte()):
        for draw in np.linspace(0, 1, 12).tolist():
            pixels = apply_policy(image, contrast, [0.0, 0.0, draw, 0.0, 0.0])
            assert torch.equal(pixels, tv.adjust_contrast(image, 1 + (-1 + draw * 2)))
        for level, magnitude in enumerate(torch.linspace(0, 0.99, LEVELS).tolist()):
            pixels = apply_policy(image, trivial, [pick(9, 14), pick(level, 31), 0.9])
            assert torch.equal(pixels, tv.adjust_sharpness(image, 1 + magnitude))


# ------------------------------------------------------------------ what pixels depend on


@pytest.mark.parametrize("config", EVERY_KIND)
def test_the_memory_format_and_concurrent_threads_do_not_change_the_pixels(config: AugmentConfig):
    images = [picture(25, 30, seed) for seed in range(20)]
    draws = draws_of(config, len(images))
    state = torch.get_rng_state()
    alone = [apply_policy(i, config, d) for i, d in zip(images, draws, strict=True)]
    last = [channels_last(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.map(apply_policy, last, [config] * 20, draws) for _ in range(3)]
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(run, alone, strict=True))
    for seed, image in enumerate(images):
        assert torch.equal(image, picture(25, 30, seed)), "the input was written to"
        assert (alone[seed].shape, alone[seed].dtype) == (image.shape, torch.uint8)
    assert torch.equal(torch.get_rng_state(), state), "the process-wide generator was used"


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_torchs_number_of_threads_does_not_change_the_pixels():
    """The number of threads is the worker's number of CPUs, which may change at a restart. The
    image is larger than 256 x 256, where a sum in float32 is no longer exact."""
    image, trivial = picture(401, 500), AugmentConfig(policy="trivial")
    jitter, augmix = AugmentConfig(jitter=JITTER), AugmentConfig(policy="augmix")
    cases = [(trivial, [pick(place, OPERATIONS), 0.4, 0.2]) for place in range(OPERATIONS)]
    cases += [(jitter, [0.5, 0.1, 0.2, 0.3, 0.4]), (augmix, draws_of(augmix, 1)[0])]
    for config, draws in cases:
        pixels = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            pixels.append(apply_policy(image, config, draws))
        assert torch.equal(*pixels), draws
