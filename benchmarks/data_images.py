"""JPEGs of ImageNet's size, made once.

An image is noise whose amplitude falls with the spatial frequency, as that of photographs does; the
slope is such that quality 90 gives about 96 KB.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
QUALITY = 90
SLOPE = 1.27
SHAPES = ((375, 500), (375, 500), (375, 500), (500, 375), (333, 500), (500, 400), (480, 640))


def once(place: Path, write: Callable[[Path], None]) -> None:
    """`place` is there whole or not at all."""
    if place.exists():
        return
    part = place.with_name(f".{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    began = time.monotonic()
    write(part)
    part.rename(place)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    print(f"{place}: {size / 1e6:.0f} MB in {time.monotonic() - began:.1f} s", flush=True)


def make_images(place: Path, count: int) -> None:
    for label in range(CLASSES):
        (place / f"class_{label}").mkdir()
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:  # no threads yet
        pool.starmap(make_image, ((place, number) for number in range(count)), chunksize=50)


def make_image(place: Path, number: int) -> None:
    height, width = SHAPES[number % len(SHAPES)]
    draws = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = draws.standard_normal((3, *frequency.shape, 2)).view(np.complex128)[..., 0]
    spectrum = 0.35 * spectrum + 0.65 * spectrum.mean(0)  # the color channels are correlated
    pixels = np.fft.irfft2(spectrum * frequency**-SLOPE, s=(height, width))
    pixels = 115 + 55 * (pixels - pixels.mean()) / pixels.std()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())
    image.save(place / f"class_{number % CLASSES}" / f"{number:06}.jpg", quality=QUALITY)
