"""A region of a JPEG that is decoded alone has the same pixels as in the full image."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from raytrain_ddp.data.pixels import decoding
from raytrain_ddp.data.pixels.decoding import open_encoded_image

pytestmark = pytest.mark.skipif(
    decoding._region_decoder() is None,
    reason="built without _jpeg_region.c (no compiler, no jpeglib.h, or not Pillow's wheel)",
)

SAMPLING = ("444", "422", "420", "440", "411", "Gray")
SIZES = ((1, 1), (7, 9), (16, 16), (33, 47), (64, 130), (121, 83))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise and edges: they expose blurring by upsampling and the transform across a border."""
    draws = np.random.default_rng(seed)
    return np.ascontiguousarray(draws.integers(0, 256, (height, width, 3), np.uint8))


def encoded(pixels: np.ndarray, **options: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "jpeg", **options)
    return content.getvalue()


def boxes(height: int, width: int, count: int = 40) -> list[tuple[int, int, int, int]]:
    """(top, left, height, width), including the full image and single pixels at the corners."""
    draws = np.random.default_rng(height * width)
    found = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1)]
    for _ in range(count):
        top, left = int(draws.integers(height)), int(draws.integers(width))
        h, w = int(draws.integers(height - top)) + 1, int(draws.integers(width - left)) + 1
        found.append((top, left, h, w))
    return found


def decoded_alone(jpeg: bytes) -> list[tuple[int, ...]]:
    """Asserts that each box equals the full image; returns the boxes that were decoded alone."""
    whole = simplejpeg.decode_jpeg(jpeg)
    alone = []
    for top, left, height, width in boxes(*whole.shape[:2]):
        image = open_encoded_image(jpeg, once=True)
        part = image.part(top, left, height, width)
        assert np.array_equal(part, whole[top : top + height, left : left + width])
        if not image._decoded:
            alone.append((top, left, height, width))
    return alone


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("size", SIZES)
def test_any_region_with_any_chroma_subsampling_equals_the_full_image(
    sampling: str, size: tuple[int, int]
) -> None:
    pixels = picture(*size)
    if sampling == "Gray":
        jpeg = simplejpeg.encode_jpeg(pixels[..., :1].copy(), 90, "GRAY", "Gray")
    else:
        jpeg = simplejpeg.encode_jpeg(pixels, 90, "RGB", sampling)
    assert len(decoded_alone(jpeg)) == 43


def test_restart_markers_quality_and_metadata_do_not_matter() -> None:
    for options in (
        {"quality": 20},
        {"restart_marker_blocks": 3},
        {"exif": b"Exif\0\0" + b"x" * 90},
    ):
        assert len(decoded_alone(encoded(picture(65, 97), **options))) == 43


def test_unusual_jpegs_are_decoded_as_a_whole() -> None:
    pixels = picture(65, 97)
    progressive = encoded(pixels, progressive=True)
    assert decoded_alone(progressive) == []
    followed = encoded(pixels) + b"and so on"
    assert decoded_alone(followed) == []
    assert open_encoded_image(encoded(pixels)).part(1, 1, 2, 2).base.shape == (
        65,
        97,
        3,
    )  # not once


def test_a_damaged_jpeg_gives_the_same_result_without_the_region_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jpeg = encoded(picture(65, 97))
    draws = np.random.default_rng(1)
    damaged = [jpeg[: len(jpeg) // 2], jpeg[:-2], b"\xff\xd8\xff"]
    for _ in range(150):
        place, value = int(draws.integers(2, len(jpeg) - 2)), int(draws.integers(256))
        damaged.append(jpeg[:place] + bytes([value]) + jpeg[place + 1 :])

    def outcome(content: bytes) -> Any:
        try:
            return open_encoded_image(content, once=True).part(5, 7, 60, 90).tobytes()
        except Exception as error:
            return type(error)

    found = [outcome(content) for content in damaged]
    monkeypatch.setattr(decoding, "_region_decoder", lambda: None)
    expected = [outcome(content) for content in damaged]
    assert found == expected
    assert any(isinstance(each, type) for each in expected)
    assert any(isinstance(each, bytes) for each in expected)


def test_invalid_arguments_are_refused() -> None:
    decode = decoding._region_decoder()
    assert decode is not None
    jpeg, out = encoded(picture(20, 20)), np.empty((10, 10, 3), np.uint8)
    for box in ((0, 0, 10, 11), (0, 0, 7, 5), (-1, 0, 10, 5), (0, -1, 10, 5), (0, 0, 0, 5)):
        with pytest.raises(ValueError, match="arguments"):
            decode(jpeg, out, *box)
    for box in ((11, 0, 10, 5), (0, 16, 10, 5)):  # beyond the image
        assert decode(jpeg, np.empty((10, 80, 3), np.uint8), *box) == -1
