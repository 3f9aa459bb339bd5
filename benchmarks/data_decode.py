"""The transform that all loaders are given, and the tight loops that none can beat.

A random part of 8 to 100 % of the area and of aspect 3/4 to 4/3, resized to 224 x 224 (bilinear,
antialiased), and mirrored with probability 1/2; as uint8. All but the loaders of torchvision's own
folder decode in the fastest known way, so that they are compared by how they load.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 224
BATCH = 64


def crop_of(height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a random crop, drawn as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # nothing fitted: the largest allowed one
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    top, left = random.randint(0, height - h), random.randint(0, width - w)
    return slice(top, top + h), slice(left, left + w)


def decode_crop(encoded: bytes) -> Tensor:
    """A transformed JPEG in memory of its own, shape (224, 224, 3), for loaders that stack them."""
    import torch

    image = torch.empty(SIZE, SIZE, 3, dtype=torch.uint8)
    decode_into(image.permute(2, 0, 1)[None], encoded)
    return image.flip(1) if random.random() < 0.5 else image


def collate(items: Sequence[tuple[bytes, int]]) -> tuple[Tensor, Tensor]:
    """A batch of transformed JPEGs, each decoded into its place, for loaders by batches."""
    import torch

    images = new_batch(len(items))
    for place, (encoded, _) in enumerate(items):
        decode_into_mirrored(images[place : place + 1], encoded)
    return images, torch.tensor([label for _, label in items])


def decode_into(out: Tensor, encoded: bytes) -> None:
    """Decodes, crops and resizes into `out`, (1, 3, 224, 224), channels last; no other copies."""
    import simplejpeg
    import torch

    pixels = torch.from_numpy(simplejpeg.decode_jpeg(encoded))
    rows, columns = crop_of(*pixels.shape[:2])
    view = pixels[rows, columns].permute(2, 0, 1)[None]
    torch.ops.aten._upsample_bilinear2d_aa.out(view, (SIZE, SIZE), False, None, None, out=out)


def decode_into_mirrored(out: Tensor, encoded: bytes) -> None:
    """The same, mirrored with probability 1/2."""
    decode_into(out, encoded)
    if random.random() < 0.5:
        out.copy_(out.flip(-1))


def new_batch(images: int) -> Tensor:
    import torch

    batch = torch.empty(images, 3, SIZE, SIZE, dtype=torch.uint8)
    return batch.to(memory_format=torch.channels_last)


def into_batch(folder: Path, threads: int) -> Iterator[Tensor]:
    """simplejpeg, crop as a view, resized into its place in the batch; no mirror."""

    def fill(batch: Tensor, place: int, encoded: bytes) -> None:
        decode_into(batch[place : place + 1], encoded)

    return tight_loops(folder, threads, fill)


def into_batch_mirrored(folder: Path, threads: int) -> Iterator[Tensor]:
    """The same, and half of the images mirrored."""

    def fill(batch: Tensor, place: int, encoded: bytes) -> None:
        decode_into_mirrored(batch[place : place + 1], encoded)

    return tight_loops(folder, threads, fill)


def by_torchvision(folder: Path, threads: int) -> Iterator[Tensor]:
    """torchvision's decode_jpeg, crop as a view, interpolate, copied into the batch; no mirror."""
    import torch
    from torch.nn.functional import interpolate
    from torchvision.io import ImageReadMode, decode_jpeg

    def fill(batch: Tensor, place: int, encoded: bytes) -> None:
        data = torch.frombuffer(encoded, dtype=torch.uint8)  # warns: bytes are not to be written to
        pixels = decode_jpeg(data, mode=ImageReadMode.RGB)
        rows, columns = crop_of(*pixels.shape[1:])
        view = pixels[None, :, rows, columns]
        batch[place] = interpolate(view, (SIZE, SIZE), mode="bilinear", antialias=True)[0]

    return tight_loops(folder, threads, fill)


def tight_loops(folder: Path, threads: int, fill: Any) -> Iterator[Tensor]:
    """Threads that each fill one batch of their own again and again; encoded images in memory."""
    files = sorted((folder / "images").glob("*/*.jpg"))
    random.Random(0).shuffle(files)
    encoded = [file.read_bytes() for file in files]
    done: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    room = threading.Semaphore(4 * threads)  # for batches that nobody has taken yet
    stop = threading.Event()

    def run(number: int) -> None:
        batch = new_batch(BATCH)
        images = cycle(encoded[number::threads])
        while room.acquire() and not stop.is_set():
            for place in range(BATCH):
                fill(batch, place, next(images))
            done.put(batch)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        while True:
            yield done.get()
            room.release()
    finally:
        stop.set()
        room.release(threads)
        for worker in workers:
            worker.join()
