"""Each augmentation has torchvision's distribution.

Two-sample tests under fixed seeds: Kolmogorov-Smirnov for each number, chi-square for each
category, and the correlation of each pair of numbers, at a level of about 1e-5. Policies and jitter
are compared pixel for pixel instead: test_auto_augment.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from raytrain_ddp.config.input_sections import AugmentConfig
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels.cropping import crop_draws, random_box, shift_of
from raytrain_ddp.data.pixels.gpu_augment import ERASE_DRAWS, draw_mix, erase_boxes
from raytrain_ddp.data.pixels.image_batches import device_augmentation

v2 = pytest.importorskip("torchvision.transforms.v2")

N = 12_000
SIZES = [(375, 500), (64, 256), (300, 100), (17, 23)]
WIDTHS = (8, 32, 5)
MIXED_SIZES, ALPHAS = [(224, 224), (64, 96)], (0.2, 1.0)
Numbers = npt.NDArray[Any]


class Sample(NamedTuple):
    """The drawn values: arrays of the same length for each."""

    numbers: dict[str, Numbers]
    categories: dict[str, Numbers]


Samples = list[Sample]


# ------------------------------------------------------------------ the statistics


def distance(ours: Samples, theirs: Samples) -> tuple[float, str]:
    """The largest statistic in units of its critical value: above 1, the distributions differ."""
    found = [(0.0, "nothing")]
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.numbers.keys(), a.categories.keys()) == (b.numbers.keys(), b.categories.keys())
        for name in a.numbers:
            found.append((smirnov(a.numbers[name], b.numbers[name]), f"{place}: {name}"))
        for name in a.categories:
            found.append((chi_square(a.categories[name], b.categories[name]), f"{place}: {name}"))
        found.append((correlations(a.numbers, b.numbers), f"{place}: correlations"))
    return max(found)


def smirnov(a: Numbers, b: Numbers) -> float:
    at = np.union1d(a, b)
    shares = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (a, b)]
    critical = 2.47 * math.sqrt(1 / len(a) + 1 / len(b))
    return float(np.abs(shares[0] - shares[1]).max() / critical)


def chi_square(a: Numbers, b: Numbers) -> float:
    kinds, which = np.unique(np.concatenate((a, b)), return_inverse=True)
    counts = [np.bincount(x, minlength=len(kinds)) for x in (which[: len(a)], which[len(a) :])]
    ratio = math.sqrt(len(b) / len(a))
    terms = (ratio * counts[0] - counts[1] / ratio) ** 2 / (counts[0] + counts[1])
    free = max(1, len(kinds) - 1)
    return float(terms.sum() / (free + 4.3 * math.sqrt(2 * free) + 12))


def correlations(a: dict[str, Numbers], b: dict[str, Numbers]) -> float:
    of_a, of_b = ({k: v for k, v in x.items() if np.ptp(v) > 0} for x in (a, b))
    names = [name for name in of_a if name in of_b]
    if len(names) < 2:
        return 0.0
    matrices = [np.corrcoef([of[name] for name in names]) for of in (of_a, of_b)]
    size = min(len(next(iter(x.values()))) for x in (a, b))
    return float(np.abs(matrices[0] - matrices[1]).max() / (4.5 * math.sqrt(2 / size)))


# ------------------------------------------------------------------ crops, erasing, flips


def boxes(found: Any, height: int, width: int) -> Sample:
    """(top, left, height, width) of parts of an image, shape (n, 4)."""
    top, left, tall, wide = np.asarray(found).T
    taken = tall * wide > 0
    top, left, tall, wide = (x[taken] for x in (top, left, tall, wide))
    center = (top == (height - tall) // 2) & (left == (width - wide) // 2)
    return Sample(
        {
            "area": tall * wide / (height * width),
            "aspect": np.log(wide / tall),
            "top": top / np.maximum(1, height - tall),
            "left": left / np.maximum(1, width - wide),
        },
        {"taken": taken, "whole": (tall == height) * 2 + (wide == width), "central": center},
    )


def uniform(count: int, images: int, seed: int) -> Numbers:
    return Draws(seed, 0, np.arange(images)).uniform(count)


def crop() -> Samples:
    draws = uniform(crop_draws(AugmentConfig(crop="random")), N // len(SIZES), 1).tolist()
    return [boxes([random_box(h, w, (0.08, 1.0), d) for d in draws], h, w) for h, w in SIZES]


def crop_reference() -> Samples:
    theirs = v2.RandomResizedCrop(9)
    return [reference_boxes(theirs, h, w, ("top", "left", "height", "width")) for h, w in SIZES]


def reference_boxes(theirs: Any, height: int, width: int, names: tuple[str, ...]) -> Sample:
    image = [torch.empty(3, height, width, device="meta")]
    params = [theirs.make_params(image) for _ in range(N // len(SIZES))]
    nothing = [0] * 4
    found = [[p[n] for n in names] if p.get("v", 0) is not None else nothing for p in params]
    return boxes(found, height, width)


def erase() -> Samples:
    draws = uniform(ERASE_DRAWS, N // len(SIZES), 2)
    return [boxes(erase_boxes(size, 1.0, draws).numpy(), *size) for size in SIZES]


def erase_reference() -> Samples:
    theirs = v2.RandomErasing(p=1)
    return [reference_boxes(theirs, h, w, ("i", "j", "h", "w")) for h, w in SIZES]


def shift() -> Samples:
    draws = uniform(crop_draws(AugmentConfig(crop="shift")), N // len(WIDTHS), 3).tolist()
    places = [np.array([shift_of(width, d) for d in draws]) for width in WIDTHS]
    return [shifts(p[:, 1] - p[:, 0], p[:, 2] - p[:, 0]) for p in places]


def shift_reference() -> Samples:
    samples = []
    for width in WIDTHS:
        margin = max(1, width // 8)
        theirs, image = v2.RandomCrop(width, padding=margin), [torch.empty(3, width, width)]
        params = [theirs.make_params(image) for _ in range(N // len(WIDTHS))]
        down, right = (np.array([p[k] - margin for p in params]) for k in ("top", "left"))
        samples.append(shifts(down, right))
    return samples


def shifts(down: Numbers, right: Numbers) -> Sample:
    return Sample({"down": down, "right": right}, {"both": down * 1000 + right})


def chances() -> Samples:
    """Which images are mirrored, which are erased, and which are both."""
    augment = AugmentConfig(flip=True, erase=0.25)
    made = device_augmentation(augment, Draws(4, 0, np.arange(N)), (32, 32))
    flip, erased = made["flip"].numpy(), (made["erase"][:, 2] > 0).numpy()
    return [Sample({"flip": flip * 1.0, "erase": erased * 1.0}, {"both": flip * 2 + erased})]


def chances_reference() -> Samples:
    flip = (torch.rand(N) < v2.RandomHorizontalFlip().p).numpy()
    erased = (torch.rand(N) < v2.RandomErasing(p=0.25).p).numpy()
    return [Sample({"flip": flip * 1.0, "erase": erased * 1.0}, {"both": flip * 2 + erased})]


# ------------------------------------------------------------------ mixing


def mixup() -> Samples:
    configs = [AugmentConfig(mixup=alpha) for alpha in ALPHAS]
    shares = [np.array([draw_mix(config, 9, 9)[0] for _ in range(N // 4)]) for config in configs]
    return [Sample({"share": share}, {}) for share in shares]


def mixup_reference() -> Samples:
    kinds = [v2.MixUp(alpha=alpha, num_classes=2) for alpha in ALPHAS]
    shares = [np.array([kind.make_params([])["lam"] for _ in range(N // 4)]) for kind in kinds]
    return [Sample({"share": share}, {}) for share in shares]


def cutmix() -> Samples:
    config = AugmentConfig(cutmix=1.0)
    return [cuts([draw_mix(config, *size) for _ in range(N // 4)]) for size in MIXED_SIZES]


def cutmix_reference() -> Samples:
    samples, theirs = [], v2.CutMix(alpha=1.0, num_classes=2)
    for size in MIXED_SIZES:
        drawn = [theirs.make_params([torch.empty(1, 3, *size)]) for _ in range(N // 4)]
        found = [(p["lam_adjusted"], tuple(p["box"][i] for i in (1, 0, 3, 2))) for p in drawn]
        samples.append(cuts(found))
    return samples


def cuts(drawn: list[Any]) -> Sample:
    edges = np.array([box for _, box in drawn])
    names = ("top", "left", "bottom", "right")
    numbers = {name: edges[:, place] for place, name in enumerate(names)}
    return Sample({"share": np.array([share for share, _ in drawn]), **numbers}, {})


# ------------------------------------------------------------------ the tests

Draw = Callable[[], Samples]
KINDS: dict[str, tuple[Draw, Draw]] = {
    "crop": (crop, crop_reference),
    "erase": (erase, erase_reference),
    "shift": (shift, shift_reference),
    "chances": (chances, chances_reference),
    "mixup": (mixup, mixup_reference),
    "cutmix": (cutmix, cutmix_reference),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_equals_torchvisions(kind: str):
    ours, theirs = KINDS[kind]
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        expected = theirs()
        torch.default_generator.manual_seed(2)
        largest, where = distance(ours(), expected)
    assert largest < 1, f"{where} differs"
