"""Augmentation after the crop: policies on the host, and batch operations on the device."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate, one_hot

from raytrain_ddp.config.input_sections import AugmentConfig
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels import auto_augment
from raytrain_ddp.data.pixels.auto_augment import apply_policy, policy_draws
from raytrain_ddp.data.pixels.gpu_augment import (
    ERASE_DRAWS,
    erase_boxes,
    finish_images,
    mix,
    partners_of,
)

v2 = pytest.importorskip("torchvision.transforms.v2")

JITTER = (0.4, 0.3, 0.6, 0.2)
EVERY_KIND = [
    AugmentConfig(policy="randaugment", operations=3, magnitude=17),
    AugmentConfig(policy="trivial"),
    AugmentConfig(policy="augmix"),
    AugmentConfig(jitter=JITTER),
    AugmentConfig(jitter=JITTER, policy="randaugment"),
]


def picture(height: int = 20, width: int = 26, seed: int = 0) -> Tensor:
    """Soft shapes with noise, partly clipped; uint8 (3, height, width)."""
    random = np.random.Generator(np.random.Philox(seed))
    shapes = torch.from_numpy(random.random((1, 3, 4, 4)))
    shapes = interpolate(shapes, (height, width), mode="bicubic")[0]
    noise = torch.from_numpy(random.random((3, height, width)))
    return (shapes * 320 - 40 + noise * 40).clamp(0, 255).to(torch.uint8)


def channels_last(image: Tensor) -> Tensor:
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def draws_of(config: AugmentConfig, images: int, seed: int = 0) -> list[list[float]]:
    return Draws(seed, 0, np.arange(images)).uniform(policy_draws(config)).tolist()


def pick(index: int, count: int) -> float:
    """A uniform number that chooses `index` of `count`."""
    return (index + 0.5) / count


Space = dict[str, Any]  # name -> (function of levels, height and width, signed)


class ScriptedRandom:
    """Replaces torch's random numbers for torchvision's policies with those given by a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.integers: list[int] = []
        self.signs: list[bool] = []
        monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(self.integers.pop(0)))
        monkeypatch.setattr(
            torch, "rand", lambda _: torch.tensor(0.2 if self.signs.pop(0) else 0.8)
        )

    def operation(self, space: Space, name: str, level: int | None, negative: bool) -> None:
        """`level` None: the policy's own fixed level, which is not drawn."""
        magnitudes, signed = space[name]
        self.integers.append(list(space).index(name))
        if level is not None and magnitudes(31, 9, 9) is not None:
            self.integers.append(level)
        if signed:
            self.signs.append(negative)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedRandom:
    return ScriptedRandom(monkeypatch)


def names_of(policy: auto_augment.Policy) -> list[str]:
    return [name for name, _, _ in auto_augment._space(policy, 9, 9)]


# ------------------------------------------------------------------ policies, pixel for pixel


def test_the_operations_equal_torchvisions():
    spaces = {
        "randaugment": v2.RandAugment._AUGMENTATION_SPACE,
        "trivial": v2.TrivialAugmentWide._AUGMENTATION_SPACE,
        "augmix": v2.AugMix._AUGMENTATION_SPACE,
    }
    for policy, space in spaces.items():
        ours = auto_augment._space(policy, 37, 53)
        assert {name for name, _, _ in ours} == set(space)
        levels = 10 if policy == "augmix" else 31
        for name, magnitudes, signed in ours:
            theirs = space[name][0](levels, 37, 53)
            assert magnitudes == ([0.0] * levels if theirs is None else theirs.tolist())
            assert signed == space[name][1]


def test_trivial_augment_gives_torchvisions_pixels_for_every_operation_level_and_sign(
    scripted: ScriptedRandom,
):
    config, theirs, image = AugmentConfig(policy="trivial"), v2.TrivialAugmentWide(), picture()
    names = names_of("trivial")
    for (i, name), level, negative in product(enumerate(names), range(31), (False, True)):
        scripted.operation(theirs._AUGMENTATION_SPACE, name, level, negative)
        draws = [pick(i, len(names)), pick(level, 31), pick(1 - negative, 2)]
        assert torch.equal(apply_policy(image, config, draws), theirs(image)), (name, level)
    assert not scripted.integers
    assert not scripted.signs


def test_randaugment_gives_torchvisions_pixels_for_every_operation_magnitude_and_sign(
    scripted: ScriptedRandom,
):
    image, names = picture(), names_of("randaugment")
    for magnitude in range(0, 31, 3):
        config = AugmentConfig(policy="randaugment", operations=1, magnitude=magnitude)
        theirs = v2.RandAugment(num_ops=1, magnitude=magnitude)
        for (i, name), negative in product(enumerate(names), (False, True)):
            scripted.operation(theirs._AUGMENTATION_SPACE, name, None, negative)
            draws = [pick(i, len(names)), pick(1 - negative, 2)]
            assert torch.equal(apply_policy(image, config, draws), theirs(image)), (name, magnitude)


@pytest.mark.parametrize("size", [(20, 26), (31, 17), (224, 224)])
def test_randaugment_chains_operations_as_torchvision(
    scripted: ScriptedRandom, size: tuple[int, int]
):
    config = AugmentConfig(policy="randaugment", operations=3)
    theirs, names = v2.RandAugment(num_ops=3), names_of("randaugment")
    for seed in range(20):
        image, draws = picture(*size, seed), draws_of(config, 1, seed)[0]
        for which, sign in zip(draws[::2], draws[1::2], strict=True):
            name = names[int(which * len(names))]
            scripted.operation(theirs._AUGMENTATION_SPACE, name, None, sign < 0.5)
        assert torch.equal(apply_policy(image, config, draws), theirs(image))


@pytest.mark.parametrize("size", [(20, 26), (64, 64)])
def test_augmix_gives_torchvisions_pixels(
    scripted: ScriptedRandom, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
):
    config, theirs, names = AugmentConfig(policy="augmix"), v2.AugMix(), names_of("augmix")
    seen = Counter[str]()
    for seed in range(60):
        image, draws = picture(*size, seed), draws_of(config, 1, seed)[0]
        own, (low, high) = draws[0], sorted(draws[1:3])
        shares = iter(([own, 1 - own], [low, high - low, 1 - high]))
        monkeypatch.setattr(
            theirs, "_sample_dirichlet", lambda _, s=shares: torch.tensor([next(s)])
        )
        for chain in (draws[3:13], draws[13:23], draws[23:33]):
            depth = 1 + int(chain[0] * 3)
            scripted.integers.append(depth)
            for at in range(depth):
                which, level, sign = chain[1 + 3 * at : 4 + 3 * at]
                name = names[int(which * len(names))]
                space = theirs._AUGMENTATION_SPACE
                scripted.operation(space, name, int(level * 3), sign < 0.5)
                seen[name] += 1
        assert torch.equal(apply_policy(image, config, draws), theirs(image))
        assert not scripted.integers
    assert set(seen) == set(names)


def test_jitter_gives_torchvisions_pixels_in_every_order():
    image, theirs = picture(), v2.ColorJitter(*JITTER)
    config = AugmentConfig(jitter=JITTER)
    for order, seed in product(range(24), range(4)):
        draws = [pick(order, 24), *draws_of(config, 1, seed)[0][1:]]
        low = [1 - j for j in JITTER[:3]] + [-JITTER[3]]
        factors = [a + d * 2 * j for a, d, j in zip(low, draws[1:], JITTER, strict=True)]
        kinds = ("brightness", "contrast", "saturation", "hue")
        params = {f"{kind}_factor": f for kind, f in zip(kinds, factors, strict=True)}
        params["fn_idx"] = auto_augment._ORDERS[order]
        assert torch.equal(apply_policy(image, config, draws), theirs.transform(image, params))


def test_our_own_kernels_give_torchvisions_pixels():
    """Hue for a grid of all colors; sharpness and contrast for many factors; the smallest
    images."""
    from torchvision.transforms.v2 import functional as tv

    steps = torch.arange(0, 256, 15)  # 0 and 255 among them
    colours = torch.cartesian_prod(steps, steps, steps).T.reshape(3, 18, -1).to(torch.uint8)
    for shift in (-0.5, -1 / 3, -0.01, -1e-9, 0.0, 1e-9, 0.07, 1 / 6, 0.25, 0.49, 0.5):
        assert torch.equal(auto_augment._hue(colours, shift), tv.adjust_hue(colours, shift))
    for image in (picture(), picture(2, 5), picture(1, 1), torch.full((3, 8, 8), 255).byte()):
        for factor in np.linspace(0, 2, 21).tolist():
            sharp = auto_augment._operate(image, "Sharpness", factor - 1)
            assert torch.equal(sharp, tv.adjust_sharpness(image, 1 + (factor - 1)))
            contrast = auto_augment._operate(image, "Contrast", factor - 1)
            assert torch.equal(contrast, tv.adjust_contrast(image, 1 + (factor - 1)))


# ------------------------------------------------------------------ policies, dependencies


def test_without_policy_or_jitter_nothing_is_drawn_or_done():
    image = picture()
    assert policy_draws(AugmentConfig(operations=7, magnitude=30)) == 0
    assert apply_policy(image, AugmentConfig(), []) is image


@pytest.mark.parametrize("config", EVERY_KIND)
def test_the_memory_format_does_not_change_the_pixels(config: AugmentConfig):
    for seed, draws in enumerate(draws_of(config, 25)):
        image = picture(25, 30, seed)
        expected = apply_policy(image, config, draws)
        assert torch.equal(apply_policy(channels_last(image), config, draws), expected)
        assert torch.equal(image, picture(25, 30, seed)), "the input was written to"
        assert expected.shape == image.shape
        assert expected.dtype == torch.uint8


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("name", [*names_of("trivial"), "Hue"])
def test_torchs_number_of_threads_does_not_change_the_pixels(name: str):
    """The number of threads is the worker's number of CPUs, which may change at a restart. The
    image is larger than 256 x 256, where a sum in float32 is no longer exact."""
    image = picture(401, 500)
    for mode, magnitude in product(("nearest", "bilinear"), (0.37, 0.05)):
        pixels = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            pixels.append(auto_augment._operate(image, name, magnitude, mode))
        assert torch.equal(*pixels)


@pytest.mark.usefixtures("torch_threads")
def test_the_mean_gray_of_a_large_image_is_exact():
    """A sum in float32 may be too small, depending on the number of threads."""
    random = np.random.Generator(np.random.Philox(1))
    half = random.integers(1, 256, 300_800)
    pixels = random.permutation(np.concatenate((half, 256 - half, [128])))  # mean 128; as gray, 127
    image = torch.from_numpy(pixels).byte().view(601, 1001).expand(3, -1, -1)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        assert (auto_augment._operate(image, "Contrast", -1.0) == 127).all()


@pytest.mark.parametrize("config", EVERY_KIND)
def test_four_concurrent_threads_give_the_pixels_of_one(config: AugmentConfig):
    images = [channels_last(picture(seed=seed)) for seed in range(40)]
    draws = draws_of(config, len(images))
    state = torch.get_rng_state()
    alone = [apply_policy(i, config, d) for i, d in zip(images, draws, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.map(apply_policy, images, [config] * 40, draws) for _ in range(4)]
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(run, alone, strict=True))
    assert torch.equal(torch.get_rng_state(), state), "the process-wide generator was used"


# ------------------------------------------------------------------ policies, distributions


def operations_of(
    config: AugmentConfig, images: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, float]]:
    """(operation, magnitude) for each application in a number of images."""
    seen: list[tuple[str, float]] = []

    def note(image: Tensor, name: str, magnitude: float, mode: str = "nearest") -> Tensor:
        seen.append((name, magnitude))
        return image

    monkeypatch.setattr(auto_augment, "_operate", note)
    for draws in draws_of(config, images):
        apply_policy(picture(), config, draws)
    return seen


@pytest.mark.parametrize(
    ("config", "per_image"),
    [
        (AugmentConfig(policy="randaugment", operations=2), 2),
        (AugmentConfig(policy="trivial"), 1),
        (AugmentConfig(policy="augmix"), 6),  # three chains of one to three
    ],
)
def test_operations_signs_and_levels_are_equally_likely(
    config: AugmentConfig, per_image: int, monkeypatch: pytest.MonkeyPatch
):
    seen = operations_of(config, 2000, monkeypatch)
    assert len(seen) == pytest.approx(2000 * per_image, rel=0.05)
    names = Counter(name for name, _ in seen)
    expected = len(seen) / len(names_of(config.policy))
    assert set(names) == set(names_of(config.policy))
    assert all(abs(count - expected) < 5 * expected**0.5 for count in names.values())
    colour = [m for name, m in seen if name in ("Brightness", "Color", "Contrast", "Sharpness")]
    positive = sum(m > 0 for m in colour) / sum(m != 0 for m in colour)
    assert abs(positive - 0.5) < 5 * 0.5 / len(colour) ** 0.5
    levels = Counter(abs(m) for m in colour)
    assert len(levels) == {"randaugment": 1, "trivial": 31, "augmix": 3}[config.policy]
    assert all(abs(n - len(colour) / len(levels)) < 5 * n**0.5 + 1 for n in levels.values())


def test_jitter_factors_fill_their_ranges_in_all_orders(monkeypatch: pytest.MonkeyPatch):
    config = AugmentConfig(jitter=(0.4, 1.5, 0.0, 0.1))
    seen = operations_of(config, 2000, monkeypatch)
    orders = Counter(tuple(name for name, _ in seen[at : at + 3]) for at in range(0, 6000, 3))
    assert len(orders) == 6  # saturation is off
    assert all(abs(count - 2000 / 6) < 100 for count in orders.values())
    # Contrast by 1.5 would be from -0.5: factors, 1 + magnitude, are 0 or more.
    ranges = {"Brightness": (-0.4, 0.4), "Contrast": (-1.0, 1.5), "Hue": (-0.1, 0.1)}
    for name, (low, high) in ranges.items():
        drawn = np.array([magnitude for n, magnitude in seen if n == name])
        assert len(drawn) == 2000
        assert low <= drawn.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < drawn.max() <= high
        assert abs(drawn.mean() - (low + high) / 2) < 5 * drawn.std() / 2000**0.5


def test_augmix_shares_are_uniform_and_add_up_to_one(monkeypatch: pytest.MonkeyPatch):
    config = AugmentConfig(policy="augmix")
    white, black = (torch.full((3, 1, 1), value, dtype=torch.uint8) for value in (255, 0))
    draws = draws_of(config, 2000)
    monkeypatch.setattr(auto_augment, "_operate", lambda image, *_, **__: image)
    assert min(int(apply_policy(white, config, d).min()) for d in draws) >= 254  # truncated
    monkeypatch.setattr(auto_augment, "_operate", lambda *_, **__: black)
    own = np.array([int(apply_policy(white, config, d)[0]) for d in draws]) / 255
    assert abs(np.sort(own) - np.linspace(0, 1, 2000)).max() < 1.95 / 2000**0.5 + 1 / 255

    lit = itertools.cycle(255 * torch.eye(3).view(3, 3, 1, 1))

    def light(image: Tensor, *_: Any, **__: Any) -> Tensor:
        """Each chain, which starts from the image itself, brightens its own channel."""
        return next(lit) if image is black else image

    monkeypatch.setattr(auto_augment, "_operate", light)
    shares = torch.stack([apply_policy(black, config, [0.0, *d[1:]]).flatten() for d in draws])
    for share in shares.T.numpy() / 255:
        expected = 1 - (1 - np.linspace(0, 1, 2000)) ** 0.5  # quantiles of Beta(1, 2)
        assert abs(share.mean() - 1 / 3) < 0.025
        assert abs(np.sort(share) - expected)[:1900].max() < 0.06


# ------------------------------------------------------------------ random erasing


def erase_draws(images: int, seed: int = 0) -> np.ndarray:
    return Draws(seed, 0, np.arange(images)).uniform(ERASE_DRAWS)


def test_erased_boxes_are_inside_the_image_and_distributed_as_torchvisions():
    for height, width in ((64, 64), (32, 96)):
        boxes = erase_boxes((height, width), 1.0, erase_draws(4000))
        top, left, tall, wide = boxes.T.numpy()
        assert min(top.min(), left.min()) == 0
        assert (top + tall).max() == height
        assert (left + wide).max() == width
        theirs_class, image = v2.RandomErasing(p=1), torch.zeros(3, height, width)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            params = [theirs_class.make_params([image]) for _ in range(2000)]
        theirs = np.array([[p["i"], p["j"], p["h"], p["w"]] for p in params])
        for ours, other in zip((top, left, tall, wide), theirs.T, strict=True):
            at = np.linspace(0, max(height, width), 60)
            shares = [np.searchsorted(np.sort(v), at) / len(v) for v in (ours, other)]
            # Kolmogorov and Smirnov: exceeded by chance once in a thousand.
            assert np.abs(shares[0] - shares[1]).max() < 1.95 * (1 / 4000 + 1 / 2000) ** 0.5


def test_the_probability_of_erasing_follows_the_config():
    boxes = erase_boxes(32, 0.25, erase_draws(8000))
    erased = boxes[:, 2] > 0
    assert abs(erased.double().mean() - 0.25) < 0.025
    assert (boxes[~erased] == 0).all()
    assert (erase_boxes(32, 0.0, erase_draws(100)) == 0).all()


def test_an_image_is_erased_the_same_way_alone_and_in_a_batch():
    draws = erase_draws(50)
    together = erase_boxes(40, 0.7, draws)
    alone = [erase_boxes((40, 40), 0.7, draws[i : i + 1])[0] for i in range(50)]
    assert torch.equal(torch.stack(alone), together)


def test_nothing_is_erased_when_none_of_the_ten_tries_fits():
    large_and_tall = np.full((2, ERASE_DRAWS), 0.999)
    large_and_tall[:, -1] = 0  # to be erased
    large_and_tall[1, 5] = 0  # the sixth area fits
    boxes = erase_boxes(50, 1.0, large_and_tall)
    assert boxes[0].tolist() == [0, 0, 0, 0]
    assert boxes[1, 2:].tolist() == [13, 4]


# ------------------------------------------------------------------ finish


MEAN = torch.tensor([120.0, 110.0, 100.0]).view(3, 1, 1)
STD = torch.tensor([60.0, 55.0, 58.0]).view(3, 1, 1)


def batch(n: int = 6, height: int = 12, width: int = 10) -> Tensor:
    return torch.stack([picture(height, width, seed) for seed in range(n)])


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("erased", [False, True])
def test_finished_images_equal_torchvisions_in_every_memory_format(flipped: bool, erased: bool):
    from torchvision.transforms.v2 import functional as tv

    images = batch()
    flip = torch.tensor([True, False, True, True, False, False]) if flipped else None
    erase = erase_boxes((12, 10), 0.8, erase_draws(6)) if erased else None
    expected = []
    for i, image in enumerate(images):
        turned = tv.horizontal_flip(image) if flip is not None and flip[i] else image
        scaled = tv.to_dtype(turned, torch.float32, scale=True)
        inputs = tv.normalize(
            scaled, (MEAN / 255).flatten().tolist(), (STD / 255).flatten().tolist()
        )
        if erase is not None:
            inputs = tv.erase(inputs, *erase[i].tolist(), torch.zeros(1))
        expected.append(inputs)
    formats = (torch.contiguous_format, torch.channels_last)
    results = []
    for stored, wanted in product(formats, formats):
        given = images.contiguous(memory_format=stored)
        inputs = finish_images(given, MEAN, STD, flip, erase, wanted is torch.channels_last)
        assert inputs.is_contiguous(memory_format=wanted)
        assert inputs.dtype == torch.float32
        assert torch.equal(given, images), "the images were written to"
        results.append(inputs)
    torch.testing.assert_close(results[0], torch.stack(expected))
    assert all(torch.equal(result, results[0]) for result in results)
    if erase is not None:
        assert ((results[0] == 0).all(1).sum((1, 2)) >= erase[:, 2] * erase[:, 3]).all()


# ------------------------------------------------------------------ mixup and cutmix


def mixed(
    config: AugmentConfig, seed: int, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, float]:
    """(inputs, soft labels of 5 classes, share) under a seed."""
    torch.default_generator.manual_seed(seed)
    result, of = mix(inputs, labels, partners_of(np.arange(len(labels))), config)
    soft = of.share * one_hot(of.labels, 5) + (1 - of.share) * one_hot(of.partners, 5)
    return result, soft, of.share


@pytest.fixture
def inputs() -> Tensor:
    return finish_images(batch(), MEAN, STD)


LABELS = torch.tensor([0, 3, 1, 4, 4, 2])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_equals_torchvisions_with_the_same_draws(kind: str, alpha: float, inputs: Tensor):
    theirs = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[kind](alpha=alpha, num_classes=5)
    before, shares = inputs.clone(), set()
    for seed in range(30):
        ours, soft, share = mixed(AugmentConfig(**{kind: alpha}), seed, inputs, LABELS)
        torch.default_generator.manual_seed(seed)
        expected, expected_soft = theirs(inputs, LABELS)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(soft, expected_soft)
        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        shares.add(share)
    assert len(shares) > 10
    assert torch.equal(inputs, before)


def test_the_label_share_of_cutmix_is_the_share_of_pixels():
    inputs = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 14, 18)
    for seed in range(50):
        result, _, share = mixed(AugmentConfig(cutmix=1.0), seed, inputs, LABELS[:4])
        own = (result == inputs).double().mean((1, 2, 3))
        assert own.tolist() == pytest.approx([share] * 4)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixing_keeps_the_memory_format(kind: str, layout: torch.memory_format, inputs: Tensor):
    config = AugmentConfig(**{kind: 1.0})
    result, _, _ = mixed(config, 3, inputs.contiguous(memory_format=layout), LABELS)
    assert result.is_contiguous(memory_format=layout)
    torch.testing.assert_close(result, mixed(config, 3, inputs, LABELS)[0])


def test_mixup_and_cutmix_are_equally_likely_and_depend_only_on_the_seed(inputs: Tensor):
    config, summed = AugmentConfig(mixup=1.0, cutmix=1.0), 0
    for seed in range(400):
        result, soft, _ = mixed(config, seed, inputs, LABELS)
        again, soft_again, _ = mixed(config, seed, inputs, LABELS)
        assert torch.equal(result, again)
        assert torch.equal(soft, soft_again)
        pasted = (result == inputs) | (result == inputs.roll(1, 0))
        summed += not bool(pasted.all())
    assert 150 < summed < 250


@pytest.mark.parametrize(("images", "repeats"), [(8, 1), (8, 2), (2, 4), (3, 4), (5, 3)])
def test_every_image_is_mixed_with_another_one_exactly_once(images: int, repeats: int):
    rows = np.repeat(np.random.Generator(np.random.Philox(0)).permutation(50)[:images], repeats)
    partners = partners_of(rows)
    assert sorted(partners.tolist()) == list(range(len(rows)))
    assert (rows[partners.numpy()] != rows).all()
    if repeats == 1:
        assert torch.equal(partners, torch.arange(images).roll(1))
    met = [set(rows[partners.numpy()][rows == row]) for row in rows]
    assert {len(others) for others in met} == {min(repeats, images - 1)}


def test_with_skipped_copies_partners_are_still_other_images():
    rows = np.array([7, 7, 7, 7, 2, 9, 9, 2])  # one copy of 2 apart: no order is assumed
    others = rows[partners_of(rows).numpy()]
    assert (others != rows).all()
    assert set(others) <= {2, 7, 9}
    for alone in ([4], [4, 4, 4]):
        assert partners_of(np.array(alone)).tolist() == list(range(len(alone)))
    assert partners_of(np.array([], np.int64)).tolist() == []


def test_mixing_a_single_sample_leaves_it_unchanged(inputs: Tensor):
    for config in (AugmentConfig(mixup=1.0), AugmentConfig(cutmix=1.0)):
        result, soft, _ = mixed(config, 1, inputs[:1], LABELS[:1])
        torch.testing.assert_close(result, inputs[:1])
        torch.testing.assert_close(soft, one_hot(LABELS[:1], 5).float())


def test_without_mixing_nothing_is_drawn_and_the_loss_is_plain(inputs: Tensor):
    state = torch.get_rng_state()
    result, of = mix(inputs, LABELS, None, AugmentConfig())
    assert result is inputs
    assert torch.equal(torch.get_rng_state(), state)
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for smoothing in (0.0, 0.1):
        expected = cross_entropy(logits, LABELS, label_smoothing=smoothing)
        smoothed = partial(cross_entropy, logits, label_smoothing=smoothing)
        assert torch.equal(of.loss(smoothed), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradient_are_those_of_soft_labels(smoothing: float, inputs: Tensor):
    for seed, kind in product(range(5), ("mixup", "cutmix")):
        config = AugmentConfig(**{kind: 1.0})
        _, soft, _ = mixed(config, seed, inputs, LABELS)
        torch.default_generator.manual_seed(seed)
        _, of = mix(inputs, LABELS, partners_of(np.arange(6)), config)
        logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        losses = (
            of.loss(partial(cross_entropy, logits, label_smoothing=smoothing)),
            cross_entropy(logits, soft, label_smoothing=smoothing),
        )
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


@contextmanager
def no_wait_for_the_device() -> Iterator[None]:
    """Raises a RuntimeError where the host waits for a GPU. Setting the mode itself raises a
    warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def sync_modes(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """The modes set from now on, each with torch's own warning."""
    modes: list[int | str] = []

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return modes


def test_the_mode_that_forbids_waits_works_with_warnings_as_errors_and_is_reset(
    sync_modes: list[int | str],
):
    with suppress(ZeroDivisionError), no_wait_for_the_device():
        assert sync_modes == ["error"]
        _ = 1 / 0
    assert sync_modes == ["error", "default"]


@pytest.mark.gpu
def test_a_gpu_gets_the_values_of_a_cpu_and_the_host_never_waits(inputs: Tensor):
    flip, erase = torch.arange(6) % 2 == 0, erase_boxes((12, 10), 0.8, erase_draws(6))
    arguments: Sequence[Tensor] = (batch(), MEAN, STD, flip, erase)
    on_gpu = [argument.cuda() for argument in arguments]
    partners = partners_of(np.arange(6)).cuda()
    labels, logits = LABELS.cuda(), torch.zeros(6, 5, device="cuda")
    config = AugmentConfig(mixup=1.0, cutmix=1.0)
    for last, seed in product((False, True), range(4)):
        expected = mixed(config, seed, finish_images(*arguments, channels_last=last), LABELS)[0]
        torch.cuda.synchronize()
        with no_wait_for_the_device():
            torch.default_generator.manual_seed(seed)
            result, of = mix(finish_images(*on_gpu, channels_last=last), labels, partners, config)
            of.loss(partial(cross_entropy, logits, label_smoothing=0.1))
        layout = torch.channels_last if last else torch.contiguous_format
        assert result.is_contiguous(memory_format=layout)
        torch.testing.assert_close(result.cpu(), expected)
