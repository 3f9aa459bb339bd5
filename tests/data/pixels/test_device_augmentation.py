"""Augmentation of batches on the device: erasing, flips and normalization, mixup and cutmix."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from pictures import picture
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from raytrain_ddp.config.sections import AugmentConfig
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.gpu_augment import (
    ERASE_DRAWS,
    erase_boxes,
    finish_images,
    mix,
    partners_of,
)

v2 = pytest.importorskip("torchvision.transforms.v2")

MEAN = torch.tensor([120.0, 110.0, 100.0]).view(3, 1, 1)
STD = torch.tensor([60.0, 55.0, 58.0]).view(3, 1, 1)
LABELS = torch.tensor([0, 3, 1, 4, 4, 2])


def batch(n: int = 6, height: int = 12, width: int = 10) -> Tensor:
    return torch.stack([picture(height, width, seed) for seed in range(n)])


def erase_draws(images: int, seed: int = 0) -> np.ndarray:
    return Draws(seed, 0, np.arange(images)).uniform(ERASE_DRAWS)


# ------------------------------------------------------------------ finish


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("erased", [False, True])
def test_finished_images_equal_torchvisions_in_every_memory_format(flipped: bool, erased: bool):
    tv, images = v2.functional, batch()
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


@pytest.mark.parametrize("alpha", [0.2, 1.0])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_equals_torchvisions_with_the_same_draws(kind: str, alpha: float, inputs: Tensor):
    theirs = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[kind](alpha=alpha, num_classes=5)
    before, shares = inputs.clone(), set()
    last = inputs.contiguous(memory_format=torch.channels_last)
    for seed in range(20):
        ours, soft, share = mixed(AugmentConfig(**{kind: alpha}), seed, inputs, LABELS)
        torch.default_generator.manual_seed(seed)
        expected, expected_soft = theirs(inputs, LABELS)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(soft, expected_soft)
        shares.add(share)
        of_last = mixed(AugmentConfig(**{kind: alpha}), seed, last, LABELS)[0]
        assert of_last.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(of_last, ours)
    assert len(shares) > 8
    assert torch.equal(inputs, before)


def test_mixup_and_cutmix_are_equally_likely_and_depend_only_on_the_seed(inputs: Tensor):
    config, summed = AugmentConfig(mixup=1.0, cutmix=1.0), 0
    for seed in range(200):
        result, soft, _ = mixed(config, seed, inputs, LABELS)
        again, soft_again, _ = mixed(config, seed, inputs, LABELS)
        assert torch.equal(result, again)
        assert torch.equal(soft, soft_again)
        pasted = (result == inputs) | (result == inputs.roll(1, 0))
        summed += not bool(pasted.all())
    assert 70 < summed < 130


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


def test_mixing_a_single_sample_or_none_at_all_leaves_images_and_loss_as_they_are(inputs: Tensor):
    for config in (AugmentConfig(mixup=1.0), AugmentConfig(cutmix=1.0)):
        result, soft, _ = mixed(config, 1, inputs[:1], LABELS[:1])
        torch.testing.assert_close(result, inputs[:1])
        torch.testing.assert_close(soft, one_hot(LABELS[:1], 5).float())
    state = torch.get_rng_state()
    result, of = mix(inputs, LABELS, None, AugmentConfig())
    assert result is inputs
    assert torch.equal(torch.get_rng_state(), state)
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(of.loss(partial(cross_entropy, logits)), cross_entropy(logits, LABELS))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradient_are_those_of_soft_labels(smoothing: float, inputs: Tensor):
    for seed, kind in product(range(3), ("mixup", "cutmix")):
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
