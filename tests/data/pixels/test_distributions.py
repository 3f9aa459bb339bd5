"""Each random choice has torchvision's distribution: the same uniform numbers give the same choice.

Policies and jitter: test_auto_augment.py; mixup and cutmix: test_device_augmentation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.gpu_augment import ERASE_DRAWS, erase_boxes
from raytrain_ddp.data.pixels.image_batches import (
    crop_draws,
    device_augmentation,
    random_box,
    shift_of,
)

v2 = pytest.importorskip("torchvision.transforms.v2")

SIZES = [(375, 500), (500, 375), (64, 256), (300, 100), (30, 1000), (17, 23), (5, 4)]
IMAGES = 200


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``numbers(areas, aspects, places)``: what torch draws next, in float64."""
    of_boxes: list[float] = []
    of_places: list[float] = []

    def uniform(tensor: Tensor, low: float, high: float) -> Tensor:
        return tensor.fill_(low + (high - low) * of_boxes.pop(0))

    def integer(low: int, high: int, size: Any = ()) -> Tensor:
        return torch.tensor(low + int(of_places.pop(0) * (high - low)))

    def set_to(areas: Any, aspects: Any, places: Any) -> None:
        of_boxes[:] = [n for pair in zip(areas, aspects, strict=True) for n in pair]
        of_places[:] = places

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    monkeypatch.setattr(torch, "randint", integer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield set_to
    torch.set_default_dtype(before)


def uniform(count: int, seed: int) -> list[list[float]]:
    return Draws(seed, 0, np.arange(IMAGES)).uniform(count).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_distribution_equals_torchvisions(size: tuple[int, int], numbers: Callable[..., None]):
    image = [torch.empty(3, *size, device="meta")]
    crop, erase = v2.RandomResizedCrop(9), v2.RandomErasing(p=1)
    draws = uniform(crop_draws(AugmentConfig(crop="random")), 1)
    boxes, central = [], 0
    for each in draws:
        numbers(each[2:12], each[12:22], each[:2])
        found = crop.make_params(image)
        boxes.append(tuple(found[name] for name in ("top", "left", "height", "width")))
    assert [random_box(*size, (0.08, 1.0), each) for each in draws] == boxes
    erased = erase_boxes(size, 1.0, np.array(uniform(ERASE_DRAWS, 2)))
    for each, box in zip(uniform(ERASE_DRAWS, 2), erased.tolist(), strict=True):
        numbers(each[:10], each[10:20], each[20:22])
        found = erase.make_params(image)
        nothing = found["v"] is None
        assert box == [0 if nothing else found[name] for name in ("i", "j", "h", "w")]
        central += nothing
    assert central < IMAGES


@pytest.mark.parametrize("width", [8, 32, 100, 5])
def test_shifts_are_those_of_a_padded_crop(width: int, numbers: Callable[..., None]):
    theirs = v2.RandomCrop(width, padding=max(1, width // 8))
    for each in uniform(crop_draws(AugmentConfig(crop="shift")), 3):
        numbers([], [], each)
        found = theirs.make_params([torch.empty(3, width, width)])
        assert shift_of(width, each)[1:] == (found["top"], found["left"])


def test_mirrored_and_erased_images_are_chosen_independently():
    augment = AugmentConfig(flip=True, erase=0.25)
    made = device_augmentation(augment, Draws(4, 0, np.arange(8000)), (32, 32))
    flip, erased = made["flip"].double(), (made["erase"][:, 2] > 0).double()
    assert abs(flip.mean() - 0.5) < 0.025
    assert abs(erased.mean() - 0.25) < 0.025
    assert abs((flip * erased).mean() - 0.125) < 0.02
    assert not device_augmentation(AugmentConfig(), Draws(4, 0, np.arange(2)), (32, 32))
