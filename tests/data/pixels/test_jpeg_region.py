"""A region of a JPEG that is decoded alone has the same pixels as in the full image."""

from __future__ import annotations

from typing import Any

import numpy as np
import parquet_files
import pytest
import simplejpeg
from PIL import Image

from raytrain_ddp.data.pixels.decoding import open_encoded_image

SAMPLING = ("444", "422", "420", "440", "411", "Gray")
SIZES = ((1, 1), (7, 9), (33, 47), (121, 83))
BOXES = 23


def noise(height: int, width: int) -> np.ndarray:
    """Noise and edges: they expose blurring by upsampling and the transform across a border."""
    draws = np.random.default_rng(0)
    return np.ascontiguousarray(draws.integers(0, 256, (height, width, 3), np.uint8))


def encoded(pixels: np.ndarray, **options: Any) -> bytes:
    return parquet_files.encoded(Image.fromarray(pixels), "jpeg", **options)


def boxes(height: int, width: int) -> list[tuple[int, int, int, int]]:
    """(top, left, height, width), including the full image and single pixels at the corners."""
    draws = np.random.default_rng(height * width)
    found = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1)]
    for _ in range(BOXES - 3):
        top, left = int(draws.integers(height)), int(draws.integers(width))
        h, w = int(draws.integers(height - top)) + 1, int(draws.integers(width - left)) + 1
        found.append((top, left, h, w))
    return found


def decoded_alone(jpeg: bytes) -> int:
    """Asserts that each box equals the full image; returns how many are no view of it."""
    whole, alone = simplejpeg.decode_jpeg(jpeg), 0
    for top, left, height, width in boxes(*whole.shape[:2]):
        part = open_encoded_image(jpeg, once=True).part(top, left, height, width)
        assert np.array_equal(part, whole[top : top + height, left : left + width])
        alone += part.base is None or part.base.shape != whole.shape
    return alone


pytestmark = pytest.mark.skipif(
    not decoded_alone(encoded(noise(16, 16))),
    reason="built without _jpeg_region.c (no compiler, no jpeglib.h, or not Pillow's wheel)",
)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_any_region_with_any_chroma_subsampling_equals_the_full_image(sampling: str) -> None:
    for size in SIZES:
        pixels = noise(*size)
        if sampling == "Gray":
            jpeg = simplejpeg.encode_jpeg(pixels[..., :1].copy(), 90, "GRAY", "Gray")
        else:
            jpeg = simplejpeg.encode_jpeg(pixels, 90, "RGB", sampling)
        assert decoded_alone(jpeg) == BOXES


def test_restart_markers_quality_and_metadata_do_not_matter_and_unusual_jpegs_are_decoded_whole():
    pixels = noise(65, 97)
    exif = b"Exif\0\0" + b"x" * 90
    for options in ({"quality": 20}, {"restart_marker_blocks": 3}, {"exif": exif}):
        assert decoded_alone(encoded(pixels, **options)) == BOXES
    assert decoded_alone(encoded(pixels, progressive=True)) == 0
    assert decoded_alone(encoded(pixels) + b"and so on") == 0
    assert open_encoded_image(encoded(pixels)).part(1, 1, 2, 2).base.shape == pixels.shape


def test_a_damaged_jpeg_gives_the_same_result_without_the_region_decoder():
    jpeg = encoded(noise(65, 97))
    draws = np.random.default_rng(1)
    damaged = [jpeg[: len(jpeg) // 2], jpeg[:-2], b"\xff\xd8\xff"]
    for _ in range(80):
        place, value = int(draws.integers(2, len(jpeg) - 2)), int(draws.integers(256))
        damaged.append(jpeg[:place] + bytes([value]) + jpeg[place + 1 :])

    def outcome(content: bytes, once: bool) -> Any:
        try:
            return open_encoded_image(content, once=once).part(5, 7, 60, 90).tobytes()
        except Exception as error:
            return type(error)

    found = [outcome(content, True) for content in damaged]
    assert found == [outcome(content, False) for content in damaged]
    assert {type(each) for each in found} == {type, bytes}
