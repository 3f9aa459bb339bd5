"""Every image format is decoded to Pillow's pixels, at the right position."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from parquet_files import encoded
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode

from raytrain_ddp.config.sections import AugmentConfig, DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.decoding import open_encoded_image
from raytrain_ddp.data.pixels.image_batches import (
    center_into,
    image_data,
    place_image,
    side_in,
    to_tensor,
)
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.errors import ConfigError

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def smooth(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A photo-like image: coarse noise, enlarged."""
    random = np.random.Generator(np.random.Philox(seed))
    coarse = random.integers(
        0, 256, (max(2, height // 16), max(2, width // 16), channels), np.uint8
    )
    layers = [
        np.asarray(Image.fromarray(coarse[..., c]).resize((width, height), Image.BICUBIC))
        for c in range(channels)
    ]
    return np.stack(layers, -1)


RGB = Image.fromarray(smooth(45, 67))
GRAY = RGB.convert("L")
ALPHA = RGB.copy()
ALPHA.putalpha(GRAY)
PALETTE = RGB.quantize(32)
DEEP = Image.fromarray(np.asarray(GRAY).astype(np.uint16) * 3)

FORMS = {
    "jpeg": encoded(RGB, "jpeg", quality=90),
    "jpeg 4:4:4": encoded(RGB, "jpeg", subsampling=0),
    "progressive jpeg": encoded(RGB, "jpeg", progressive=True),
    "gray jpeg": encoded(GRAY, "jpeg"),
    "cmyk jpeg": encoded(RGB.convert("CMYK"), "jpeg"),
    "png": encoded(RGB, "png"),
    "gray png": encoded(GRAY, "png"),
    "16-bit png": encoded(DEEP, "png"),
    "palette png": encoded(PALETTE, "png"),
    "palette png with transparency": encoded(PALETTE, "png", transparency=bytes(range(32))),
    "alpha png": encoded(ALPHA, "png"),
    "gray and alpha png": encoded(ALPHA.convert("LA"), "png"),
    "1-bit png": encoded(GRAY.convert("1"), "png"),
    "webp": encoded(RGB, "webp", quality=80),
    "alpha webp": encoded(ALPHA, "webp", lossless=True),
    "gif": encoded(PALETTE, "gif"),
    "bmp": encoded(RGB, "bmp"),
    "tiff": encoded(RGB, "tiff"),
    "ppm": encoded(RGB, "ppm"),
}


WIDE = np.asarray(GRAY).astype(np.int64)
DEPTHS = {
    "16-bit pgm": b"P5 67 45 65535\n" + (WIDE * 200).astype(">u2").tobytes(),
    "10-bit pgm": b"P5 67 45 1023\n" + (WIDE * 4).astype(">u2").tobytes(),
    "16-bit ppm": b"P6 67 45 65535\n" + (smooth(45, 67) * 200).astype(">u2").tobytes(),
    "pfm": b"Pf 67 45 -1.0\n" + (WIDE / 255).astype("<f4").tobytes(),
    "16-bit tiff": encoded(DEEP, "tiff"),
    "32-bit tiff below 0": encoded(Image.fromarray(WIDE.astype(np.int32) - 99), "tiff"),
    "float tiff": encoded(Image.fromarray((WIDE / 128).astype(np.float32)), "tiff"),
    "two pages": encoded(RGB, "tiff", save_all=True, append_images=[RGB]),
    "animated gif": encoded(PALETTE, "gif", save_all=True, append_images=[GRAY]),
    **{f"{mode} tiff": encoded(RGB.convert(mode), "tiff") for mode in ("1", "LA", "P", "CMYK")},
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_every_image_format_has_pillows_pixels():
    """Those of more than 8 bits, too, which Pillow clips."""
    for form, content in {**FORMS, **DEPTHS}.items():
        picture = open_encoded_image(content)
        pixels = picture.pixels()
        assert (picture.height, picture.width) == (45, 67)
        assert (pixels.shape, pixels.dtype) == ((45, 67, 3), np.uint8)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        assert np.array_equal(pixels, expected), form
    assert np.array_equal(open_encoded_image(RGB).pixels(), np.asarray(RGB))


@pytest.mark.parametrize("form", ["jpeg", "png", "tiff"])
def test_exif_orientation_is_followed_only_when_asked_for(form: str):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(RGB, form, exif=exif)
        plain = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        turned = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
        assert np.array_equal(open_encoded_image(content).pixels(), plain)
        picture = open_encoded_image(content, exif_orientation=True)
        assert (picture.height, picture.width) == turned.shape[:2]
        assert np.array_equal(picture.pixels(), turned)
        if form == "jpeg":
            assert picture.pixels(2).shape[:2] == tuple(-(-side // 2) for side in turned.shape[:2])


def test_a_slightly_damaged_jpeg_is_judged_by_pillow():
    """Pillow ignores extraneous bytes; a strict decoder refuses them."""
    content = bytearray(FORMS["jpeg"])
    place = content.index(b"\xff\xda")
    content[place:place] = b"\x00\x01\x02"
    expected = np.asarray(Image.open(io.BytesIO(bytes(content))).convert("RGB"))
    assert np.array_equal(open_encoded_image(bytes(content)).pixels(), expected)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        FORMS["jpeg"][:2],
        FORMS["jpeg"][:400],
        FORMS["jpeg"][: len(FORMS["jpeg"]) // 2],
        FORMS["png"][:200],
        FORMS["webp"][:50],
        FORMS["cmyk jpeg"][:500],
        b"\xff\xd8" + bytes(100),
    ],
)
def test_fault_20_an_incomplete_image_raises(content: bytes):
    with pytest.raises((ValueError, OSError)):
        open_encoded_image(content).pixels()


# ------------------------------------------------------------------ size and position


def blank(size: int) -> torch.Tensor:
    images = torch.zeros((1, 3, size, size), dtype=torch.uint8)
    return images.contiguous(memory_format=torch.channels_last)


@settings(max_examples=40)
@given(
    st.integers(20, 90),
    st.integers(20, 90),
    st.sampled_from([16, 27, 32]),
    st.sampled_from(
        [(0.875, "bilinear"), (32 / 34, "bicubic"), (0.95, "bicubic"), (1, "bilinear")]
    ),
)
def test_the_center_crop_has_torchvisions_pixels(
    height: int, width: int, side: int, how: tuple[float, Any]
):
    from torchvision.transforms.v2 import functional as tv

    share, mode = how
    pixels = smooth(height, width)
    out = blank(side)
    center_into(out, open_encoded_image(Image.fromarray(pixels)), False, mode, share)
    whole = to_tensor(pixels)
    if (height, width) != (side, side):
        by = InterpolationMode(mode)
        whole = tv.resize(whole, [round(side / share)], interpolation=by, antialias=True)
    assert torch.equal(out, tv.center_crop(whole, [side, side]))


def test_evaluation_has_its_own_size_and_crop():
    """As in torchvision's V2 recipe: train on 176 pixels, evaluate on 224 of 232; here, one
    eighth."""
    from torchvision.transforms.v2 import functional as tv

    config = DataConfig(image_size=22, eval_size=28, eval_crop=28 / 29, interpolation="bicubic")
    splits = open_splits(config)
    train = image_data(splits.train, config, AugmentConfig(crop="random"), 10)
    assert splits.eval is not None
    evaluation = image_data(splits.eval, config, None, 10)
    draws = Draws(0, 0, np.arange(5))
    assert train.batch(draws)["image"].shape == (5, 3, 22, 22)
    images = evaluation.batch(draws)["image"]
    (raw, _), *_ = splits.eval.read(np.arange(5))
    whole = to_tensor(open_encoded_image(raw, False).pixels())
    resized = tv.resize(whole, [29], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(images[:1], tv.center_crop(resized, [28, 28]))


def test_training_images_grow_with_the_epochs():
    config = DataConfig(image_size=224, start_size=128, grow_epochs=6)
    sides = [side_in(config, epoch) for epoch in range(8)]
    assert sides == [128, 128, 160, 160, 192, 192, 224, 224]
    assert side_in(DataConfig(image_size=64), 0) == 64
    assert side_in(DataConfig(), 3) == 0  # as stored
    config = DataConfig(image_size=72, start_size=40, grow_epochs=1)
    splits = open_splits(config)
    train = image_data(splits.train, config, AugmentConfig(crop="random"), 10)
    evaluation = image_data(splits.train, config, None, 10)
    for epoch, side in ((0, 40), (1, 72), (9, 72)):
        draws = Draws(0, epoch, np.arange(2))
        assert train.batch(draws)["image"].shape == (2, 3, side, side)
        assert evaluation.batch(draws)["image"].shape == (2, 3, 72, 72)
    with pytest.raises(ConfigError, match=r"data\.grow_epochs"):
        TrainConfig(data=config, epochs=1)
    TrainConfig(data=config, epochs=1, steps=100)


def test_a_very_elongated_image_takes_little_memory_and_keeps_its_center():
    pixels = np.zeros((2, 20_000, 3), np.uint8)
    pixels[:, 9_900:10_100] = 200
    out = blank(64)
    center_into(out, open_encoded_image(Image.fromarray(pixels)), jpeg_scaling=True)
    assert (out == 200).all()


# ------------------------------------------------------------------ JPEG at a fraction of its size


@pytest.mark.parametrize("shape", [(1000, 1300), (901, 1403)])
@pytest.mark.parametrize("crop", ["random", "none"])
def test_a_downscaled_jpeg_is_close_to_the_full_one(shape: tuple[int, int], crop: Any):
    """The README's tolerance: 1 of 255 on average if the image has detail at all scales."""
    random = np.random.Generator(np.random.Philox(1))
    fine = smooth(*shape).astype(np.int64) + random.integers(-20, 21, (*shape, 1))
    photo = encoded(Image.fromarray(fine.clip(0, 255).astype(np.uint8)), "jpeg", quality=92)
    augment = AugmentConfig(crop=crop)
    shrunk = 0
    for draws in random.random((6, 22)).tolist():
        whole, scaled = blank(64), blank(64)
        place_image(whole, open_encoded_image(photo), augment, draws, jpeg_scaling=False)
        place_image(scaled, open_encoded_image(photo), augment, draws, jpeg_scaling=True)
        difference = (whole.int() - scaled.int()).abs()
        assert difference.float().mean() < 1.0
        assert difference.max() < 16, difference.max()
        shrunk += not torch.equal(whole, scaled)
    assert shrunk
