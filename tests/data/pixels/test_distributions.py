"""Each augmentation has torchvision's distribution: 20,000 to 40,000 draws of either.

Two-sample tests under fixed seeds: Kolmogorov-Smirnov for each number, chi-square for each
category, and the correlation of each pair of numbers, at a level of about 1e-5. Each mutation below
is a plausible mistake, and must be noticed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from raytrain_ddp.config.input_sections import AugmentConfig
from raytrain_ddp.data.order.epoch_order import EpochOrder, runs_of
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels import auto_augment, cropping, gpu_augment
from raytrain_ddp.data.pixels.auto_augment import apply_policy, policy_draws
from raytrain_ddp.data.pixels.cropping import crop_draws
from raytrain_ddp.data.pixels.gpu_augment import ERASE_DRAWS, draw_mix, erase_boxes
from raytrain_ddp.data.pixels.image_batches import device_augmentation

v2 = pytest.importorskip("torchvision.transforms.v2")

N = 40_000
SIZES = [(375, 500), (500, 375), (224, 224), (64, 256), (300, 100), (30, 1000), (17, 23), (5, 4)]
JITTER = (0.4, 1.5, 0.3, 0.1)
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
            found.append((_smirnov(a.numbers[name], b.numbers[name]), f"{place}: {name}"))
        for name in a.categories:
            found.append((_chi_square(a.categories[name], b.categories[name]), f"{place}: {name}"))
        found.append((_correlations(a.numbers, b.numbers), f"{place}: correlations"))
    return max(found)


def _smirnov(a: Numbers, b: Numbers) -> float:
    at = np.union1d(a, b)
    shares = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (a, b)]
    critical = 2.47 * math.sqrt(1 / len(a) + 1 / len(b))
    return float(np.abs(shares[0] - shares[1]).max() / critical)


def _chi_square(a: Numbers, b: Numbers) -> float:
    kinds, which = np.unique(np.concatenate((a, b)), return_inverse=True)
    counts = [np.bincount(x, minlength=len(kinds)) for x in (which[: len(a)], which[len(a) :])]
    ratio = math.sqrt(len(b) / len(a))
    terms = (ratio * counts[0] - counts[1] / ratio) ** 2 / (counts[0] + counts[1])
    free = max(1, len(kinds) - 1)
    return float(terms.sum() / (free + 4.3 * math.sqrt(2 * free) + 12))


def _correlations(a: dict[str, Numbers], b: dict[str, Numbers]) -> float:
    of_a, of_b = ({k: v for k, v in x.items() if np.ptp(v) > 0} for x in (a, b))
    names = [name for name in of_a if name in of_b]
    if len(names) < 2:
        return 0.0
    matrices = [np.corrcoef([of[name] for name in names]) for of in (of_a, of_b)]
    size = min(len(next(iter(x.values()))) for x in (a, b))
    return float(np.abs(matrices[0] - matrices[1]).max() / (4.5 * math.sqrt(2 / size)))


# ------------------------------------------------------------------ single images


def _boxes(boxes: Any, height: int, width: int) -> Sample:
    """(top, left, height, width) of parts of an image, shape (n, 4)."""
    top, left, tall, wide = np.asarray(boxes).T
    taken = tall * wide > 0
    top, left, tall, wide = (x[taken] for x in (top, left, tall, wide))
    centre = (top == (height - tall) // 2) & (left == (width - wide) // 2)
    return Sample(
        {
            "area": tall * wide / (height * width),
            "aspect": np.log(wide / tall),
            "top": top / np.maximum(1, height - tall),
            "left": left / np.maximum(1, width - wide),
        },
        {"taken": taken, "whole": (tall == height) * 2 + (wide == width), "central": centre},
    )


def _uniform(count: int, images: int, seed: int) -> Numbers:
    return Draws(seed, 0, np.arange(images)).uniform(count)


def crop() -> Samples:
    draws = _uniform(crop_draws(AugmentConfig(crop="random")), N // len(SIZES), 1).tolist()
    return [
        _boxes([cropping.random_box(h, w, (0.08, 1.0), d) for d in draws], h, w) for h, w in SIZES
    ]


def crop_reference() -> Samples:
    theirs = v2.RandomResizedCrop(9)
    return [_reference_boxes(theirs, h, w, ("top", "left", "height", "width")) for h, w in SIZES]


def _reference_boxes(theirs: Any, height: int, width: int, names: tuple[str, ...]) -> Sample:
    image = [torch.empty(3, height, width, device="meta")]
    params = [theirs.make_params(image) for _ in range(N // len(SIZES) // 2)]
    return _boxes([[p[n] for n in names] if p.get("v", 0) is not None else [0] * 4 for p in params],
                  height, width)  # fmt: skip


def erase() -> Samples:
    draws = _uniform(ERASE_DRAWS, N // len(SIZES), 2)
    return [_boxes(erase_boxes(size, 1.0, draws).numpy(), *size) for size in SIZES]


def erase_reference() -> Samples:
    theirs = v2.RandomErasing(p=1)
    return [_reference_boxes(theirs, h, w, ("i", "j", "h", "w")) for h, w in SIZES]


def shift() -> Samples:
    draws = _uniform(crop_draws(AugmentConfig(crop="shift")), N // 4, 3).tolist()
    places = [np.array([cropping.shift_of(width, d) for d in draws]) for width in (8, 32, 100, 5)]
    return [_shifts(p[:, 1] - p[:, 0], p[:, 2] - p[:, 0]) for p in places]


def shift_reference() -> Samples:
    samples = []
    for width in (8, 32, 100, 5):
        margin = max(1, width // 8)
        theirs, image = v2.RandomCrop(width, padding=margin), [torch.empty(3, width, width)]
        params = [theirs.make_params(image) for _ in range(N // 4)]
        samples.append(
            _shifts(*(np.array([p[k] - margin for p in params]) for k in ("top", "left")))
        )
    return samples


def _shifts(down: Numbers, right: Numbers) -> Sample:
    return Sample({"down": down, "right": right}, {"both": down * 1000 + right})


def chances() -> Samples:
    """Which images are mirrored, which are erased, and which are both."""
    made = device_augmentation(
        AugmentConfig(flip=True, erase=0.25), Draws(4, 0, np.arange(N)), (32, 32)
    )
    flip, erased = made["flip"].numpy(), (made["erase"][:, 2] > 0).numpy()
    return [Sample({"flip": flip * 1.0, "erase": erased * 1.0}, {"both": flip * 2 + erased})]


def chances_reference() -> Samples:
    flip = (torch.rand(N) < v2.RandomHorizontalFlip().p).numpy()
    erased = (torch.rand(N) < v2.RandomErasing(p=0.25).p).numpy()
    return [Sample({"flip": flip * 1.0, "erase": erased * 1.0}, {"both": flip * 2 + erased})]


# ------------------------------------------------------------------ policies

POLICIES = {
    "randaugment": (AugmentConfig(policy="randaugment"), v2.RandAugment),
    "trivial": (AugmentConfig(policy="trivial"), v2.TrivialAugmentWide),
    "augmix": (AugmentConfig(policy="augmix"), v2.AugMix),
}
OPERATIONS = {"randaugment": 2, "trivial": 1, "augmix": 6}  # of an image, on average
BLACK = torch.zeros(3, 1, 1, dtype=torch.uint8)


class _Operations:
    """Notes the operations that a policy calls, instead of doing them.

    `starts`: whether the operation gets the image itself. Chain i of AugMix lights channel i.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.starts: list[bool] = []
        self.chain = -1

    def __call__(self, image: Tensor, name: str, magnitude: float, mode: str = "") -> Tensor:
        first = not image.any()
        self.chain = (self.chain + first) % 3
        self.starts.append(first)
        self.seen.append((name, magnitude))
        lit = torch.zeros_like(image)
        lit[..., self.chain, :, :] = 255
        return lit

    def sample(self) -> Sample:
        names = np.array([name for name, _ in self.seen])
        numbers = {n: np.zeros(1) for n in ()}
        levels = np.array([f"{name} {m:.4f}" if m else name for name, m in self.seen])
        signs = np.array([f"{name} {np.sign(m)}" for name, m in self.seen])
        pairs = np.char.add(names[:-1:2], names[1::2])
        chains = np.diff(np.flatnonzero([*self.starts, True]))
        return Sample(numbers, {"operation": names, "level": levels, "sign": signs,
                                "pairs": pairs, "depth": chains})  # fmt: skip


def policy(name: str) -> Samples:
    config, _ = POLICIES[name]
    noted, before = _Operations(), auto_augment._operate
    auto_augment._operate = noted  # type: ignore[assignment]
    try:
        draws = _uniform(policy_draws(config), N // OPERATIONS[name], 5).tolist()
        results = [apply_policy(BLACK, config, d) for d in draws]
    finally:
        auto_augment._operate = before
    return [noted.sample(), *_shares(torch.stack(results), name)]


def policy_reference(name: str) -> Samples:
    theirs, noted = POLICIES[name][1](), _Operations()
    space = theirs._AUGMENTATION_SPACE.items()
    theirs._AUGMENTATION_SPACE = {k: (lru_cache(levels), signed) for k, (levels, signed) in space}
    theirs._apply_image_or_video_transform = lambda image, op, m, **_: noted(image, op, m)
    theirs._flatten_and_extract_image_or_video = lambda given: (None, given[0])
    theirs._unflatten_and_insert_image_or_video = lambda _, image: image
    for _ in range(N // OPERATIONS[name]):
        theirs(BLACK)
    many = _Operations()
    theirs._apply_image_or_video_transform = lambda image, op, m, **_: many(image, op, m)
    return [noted.sample(), *_shares(theirs(BLACK.expand(N // OPERATIONS[name], 3, 1, 1)), name)]


def _shares(pixels: Tensor, name: str) -> Samples:
    """The shares of AugMix's chains, computed from the brightened channels."""
    if name != "augmix":
        return []
    chains = pixels.flatten(1).T.numpy() / 255
    numbers = {f"chain {i}": share for i, share in enumerate(chains)} | {"own": 1 - chains.sum(0)}
    return [Sample(numbers, {})]


def jitter() -> Samples:
    config = AugmentConfig(jitter=JITTER)
    noted, before = [], auto_augment._operate
    auto_augment._operate = lambda image, name, m: noted.append((name, m)) or image  # type: ignore
    try:
        for draws in _uniform(policy_draws(config), N, 6).tolist():
            apply_policy(BLACK, config, draws)
    finally:
        auto_augment._operate = before
    order = [",".join(name for name, _ in noted[at : at + 4]) for at in range(0, 4 * N, 4)]
    numbers = {
        kind: np.array([m for name, m in noted if name == kind]) + (kind != "Hue")
        for kind in ("Brightness", "Contrast", "Color", "Hue")
    }
    return [Sample(numbers, {"order": np.array(order)})]


def jitter_reference() -> Samples:
    kinds, theirs = ("Brightness", "Contrast", "Color", "Hue"), v2.ColorJitter(*JITTER)
    params = [theirs.make_params([]) for _ in range(N)]
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    numbers = {
        kind: np.array([p[name] for p in params]) for kind, name in zip(kinds, names, strict=True)
    }
    order = [",".join(kinds[i] for i in p["fn_idx"].tolist()) for p in params]
    return [Sample(numbers, {"order": np.array(order)})]


# ------------------------------------------------------------------ mixing

MIXED_SIZES, ALPHAS = [(224, 224), (64, 96)], (0.2, 1.0)


def mixup() -> Samples:
    return [
        Sample({"share": np.array([draw_mix(config, 9, 9)[0] for _ in range(N // 4)])}, {})
        for config in (AugmentConfig(mixup=alpha) for alpha in ALPHAS)
    ]


def mixup_reference() -> Samples:
    kinds = [v2.MixUp(alpha=alpha, num_classes=2) for alpha in ALPHAS]
    return [Sample({"share": kind._dist.sample((N // 4,)).flatten().numpy()}, {}) for kind in kinds]


def cutmix() -> Samples:
    return [
        _cuts([draw_mix(AugmentConfig(cutmix=1.0), *size) for _ in range(N // 4)])
        for size in MIXED_SIZES
    ]


def cutmix_reference() -> Samples:
    samples, theirs = [], v2.CutMix(alpha=1.0, num_classes=2)
    for size in MIXED_SIZES:
        image = [torch.empty(1, 3, *size)]
        drawn = [theirs.make_params(image) for _ in range(N // 4)]
        boxes = [(p["lam_adjusted"], tuple(p["box"][i] for i in (1, 0, 3, 2))) for p in drawn]
        samples.append(_cuts(boxes))
    return samples


def _cuts(drawn: list[Any]) -> Sample:
    boxes = np.array([box for _, box in drawn]).T
    names = ("top", "left", "bottom", "right")
    return Sample(
        {"share": np.array([share for share, _ in drawn]), **dict(zip(names, boxes, strict=True))},
        {},
    )


ROWS, AT_ONCE = 240, 8


def partner(repeats: int) -> Samples:
    """Of shuffled epochs, in micro-batches: pairs of an image and its partner."""
    pairs = []
    for epoch in range(N // ROWS // repeats):
        rows = EpochOrder(runs_of(ROWS, ROWS), "full", 7, epoch).read(0, ROWS)
        for part in np.split(rows, ROWS // AT_ONCE):
            copies = np.repeat(part, repeats)
            pairs.append((copies, copies[gpu_augment.partners_of(copies).numpy()]))
    return [_pairs(*(np.concatenate(x) for x in zip(*pairs, strict=True)))]


def partner_reference() -> Samples:
    order = torch.rand(N // ROWS, ROWS).argsort(1).view(-1, AT_ONCE)
    return [_pairs(order.flatten().numpy(), order.roll(1, 1).flatten().numpy())]


def _pairs(own: Numbers, other: Numbers) -> Sample:
    kind, others = own % 12, other % 12
    return Sample(
        {}, {"pair": kind * 12 + others, "same class": kind == others, "itself": own == other}
    )


# ------------------------------------------------------------------ the tests

Draw = Callable[[], Samples]
KINDS: dict[str, tuple[Draw, Draw]] = {
    "crop": (crop, crop_reference),
    "erase": (erase, erase_reference),
    "shift": (shift, shift_reference),
    "chances": (chances, chances_reference),
    **{
        name: (lambda name=name: policy(name), lambda name=name: policy_reference(name))
        for name in POLICIES
    },
    "jitter": (jitter, jitter_reference),
    "mixup": (mixup, mixup_reference),
    "cutmix": (cutmix, cutmix_reference),
    **{f"partner, repeats {n}": (lambda n=n: partner(n), partner_reference) for n in (1, 2, 4)},
}


@lru_cache
def reference(kind: str) -> Samples:
    torch.default_generator.manual_seed(1)
    return KINDS[kind][1]()


def compared(kind: str) -> tuple[float, str]:
    with torch.random.fork_rng():
        theirs = reference(kind)
        torch.default_generator.manual_seed(2)
        return distance(KINDS[kind][0](), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_equals_torchvisions(kind: str):
    largest, where = compared(kind)
    assert largest < 1, f"{where} differs"


# ------------------------------------------------------------------ mutations are detected


Mutation = Callable[[pytest.MonkeyPatch], None]


def swapped(place: Any, name: str, wrong: Callable[[Any], Any]) -> Mutation:
    """Replaces an attribute by `wrong` applied to it."""
    return lambda patch: patch.setattr(place, name, wrong(getattr(place, name)))


def drawn(change: Callable[[Numbers], None]) -> Mutation:
    """Changes the uniform numbers, shape (n, count), in place."""

    def wrong(uniform: Callable[..., Numbers]) -> Callable[..., Numbers]:
        def changed(*args: Any) -> Numbers:
            numbers = uniform(*args)
            change(numbers)
            return numbers

        return changed

    return swapped(Draws, "uniform", wrong)


def alike(one: int, other: int) -> Mutation:
    """The same random number used twice."""

    def change(numbers: Numbers) -> None:
        numbers[:, one] = numbers[:, other]

    return drawn(change)


def clamped(height: int, width: int, scale: tuple[float, float], draws: list[float]) -> Any:
    """A crop that does not fit is cut to the image."""
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2])
    aspect = (4 / 3) ** (2 * draws[12] - 1)
    w, h = min(width, round(math.sqrt(area * aspect))), min(height, round(math.sqrt(area / aspect)))
    return int(draws[0] * (height - h + 1)), int(draws[1] * (width - w + 1)), h, w


def shorter(dropped: int) -> Mutation:
    """A policy without one of its operations."""
    return swapped(
        auto_augment, "_space", lambda f: lambda *a: f(*a)[:dropped] + f(*a)[dropped + 1 :]
    )


def one_try(numbers: Numbers) -> None:
    for first in (0, 10):
        numbers[:, first + 1 : first + 10] = numbers[:, first : first + 1]


def by_one(rows: Numbers) -> Tensor:
    return torch.arange(len(rows)).roll(1)


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a crop is clamped": ("crop", swapped(cropping, "random_box", lambda _: clamped)),
    "three tries": ("crop", swapped(cropping, "_TRIES", lambda _: 3)),
    "wider aspects": ("crop", swapped(cropping, "_ASPECT", lambda _: 1.4)),
    "larger areas": ("crop", drawn(lambda x: np.sqrt(x, out=x))),
    "never at the lower right": ("crop", drawn(lambda x: np.multiply(x, 0.9, out=x))),
    "crops on the diagonal": ("crop", alike(0, 1)),
    "area decides the aspect": ("crop", alike(2, 12)),
    "ten equal tries to erase": ("erase", drawn(one_try)),
    "erased on the diagonal": ("erase", alike(20, 21)),
    "larger areas are erased": ("erase", drawn(lambda x: np.sqrt(x, out=x))),
    "shifted along the diagonal": ("shift", alike(0, 1)),
    "never shifted to the end": ("shift", drawn(lambda x: np.multiply(x, 0.95, out=x))),
    "shifted by the height": (
        "shift",
        swapped(cropping, "shift_of", lambda f: lambda w, d: f(w + 8, d)),
    ),
    "mirrored too often": ("chances", drawn(lambda x: np.multiply(x, 0.97, out=x))),
    "what is mirrored is erased": (
        "chances",
        swapped(Draws, "uniform", lambda f: lambda self, count, _: f(self, count)[:, ::-1]),
    ),
    "13 operations": ("randaugment", shorter(3)),
    "one operation twice": ("randaugment", alike(0, 2)),
    "hardly ever negative": ("randaugment", drawn(lambda x: np.sqrt(x, out=x))),
    "the operation decides the sign": ("trivial", alike(0, 2)),
    "no strongest level": ("trivial", drawn(lambda x: np.multiply(x, 0.96, out=x))),
    "12 operations": ("augmix", shorter(0)),
    "a deeper chain": ("augmix", swapped(auto_augment, "_DEPTH", lambda _: 2)),
    "a milder level": ("augmix", swapped(auto_augment, "_SEVERITY", lambda _: 2)),
    "weights that favour the image": ("augmix", drawn(lambda x: np.sqrt(x[:, :1], out=x[:, :1]))),
    "chains of one weight": ("augmix", alike(1, 2)),
    "brightness decides the contrast": ("jitter", alike(1, 2)),
    "an order is left out": (
        "jitter",
        swapped(auto_augment, "_ORDERS", lambda orders: orders[:-1]),
    ),
    "weaker colours": ("jitter", drawn(lambda x: np.multiply(x, 0.98, out=x))),
    "uniform mixup": (
        "mixup",
        swapped(torch.distributions, "Beta", lambda f: lambda a, b, **k: f(1.0, 1.0)),
    ),
    "the smaller share": (
        "mixup",
        swapped(torch.Tensor, "__float__", lambda f: lambda x: min(f(x), 1 - f(x))),
    ),
    "a box that is whole": (
        "cutmix",
        swapped(gpu_augment, "_span", lambda f: lambda n, h: (0, min(n, 2 * h))),
    ),
    "a box of the share": ("cutmix", swapped(math, "sqrt", lambda _: lambda x: x)),
    "a copy of itself": (
        "partner, repeats 2",
        swapped(gpu_augment, "partners_of", lambda _: by_one),
    ),
    "copies of itself": (
        "partner, repeats 4",
        swapped(gpu_augment, "partners_of", lambda _: by_one),
    ),
    "not mixed": (
        "partner, repeats 1",
        swapped(gpu_augment, "partners_of", lambda _: lambda rows: torch.arange(len(rows))),
    ),
}


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_mistake_in_the_distribution_is_detected(mistake: str, monkeypatch: pytest.MonkeyPatch):
    kind, mutate = MUTATIONS[mistake]
    reference(kind)
    mutate(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "N", N // 2)
    assert compared(kind)[0] > 1
