"""Loads the same images with the same transform in several ways: speed, CPU time, start, memory.

    python benchmarks/data.py [--rounds N] [--only bare,ours-folder] [--out FILE.md]

The transform is a random crop of 8 to 100 % of the area with an aspect ratio of 3/4 to 4/3, which
is resized to 224 x 224 (bilinear, antialiased) and mirrored with probability 1/2. A batch has 64
images, as uint8; the files are in the page cache. All but `folder-pil` decode in the fastest known
way, so that loaders are compared, not decoders; the bare loop does not mirror. Each loader runs in
a process of its own, with two threads or worker processes, and one torch thread in each.

- CPU s per 1,000: CPU seconds of the process and all below it, for 1,000 images
- first batch: seconds from when everything is imported and nothing is opened
- memory: the proportional set size of all processes, which counts a shared page once

Needs psutil. The images are made once (--cache).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from data_images import make_images, once
from series import HERE, Column, Series, parse, parser, run_to_end

SIZE, BATCH, WORKERS, WARM = 224, 64, 2, 16
LIMIT_S = 420
PACKAGES = ("torchvision", "pillow", "simplejpeg", "pyarrow", "numpy")
COLUMNS = (
    Column("images/s", "images_per_s", has_ratio=True),
    Column("CPU s per 1,000", "cpu_s", 2),
    Column("first batch s", "first_batch_s", 2),
    Column("memory MiB", "pss_bytes", 0, 2**-20),
)


def main() -> int:
    if sys.argv[1:2] == ["--job"]:  # a child of this program
        print(json.dumps(measure(**json.loads(sys.argv[2]))), flush=True)
        return 0
    flags = parser(__doc__, rounds=5)
    flags.add_argument("--images", type=int, help="loaded while it is measured [9000]")
    flags.add_argument("--cache", type=Path, default=HERE.parent / "build/bench-data")
    titles = {name: title for name, (title, _, _) in LOADERS.items()}
    args = parse(flags, titles)
    distinct = 300 if args.quick else 3000
    args.images = args.images or (640 if args.quick else 9000)
    args.cache = (args.cache / str(distinct)).resolve()
    once(args.cache / "images", lambda place: make_images(place, distinct))
    if not (args.cache / "parquet").exists():
        folders = [str(args.cache / name) for name in ("images", "parquet")]
        convert = [sys.executable, "-m", "raytrain_ddp.tools.convert", *folders]
        run_to_end(convert, args.cache / "log", LIMIT_S)
    series = Series(titles, "bare", PACKAGES)
    series.measure(args, partial(in_process, args))
    return series.publish(
        "Loading the same images in several ways",
        [f"{distinct} JPEGs of about 95 KB.", series.table(COLUMNS)],
        args.out,
    )


def in_process(args: argparse.Namespace, name: str, _: str) -> Mapping[str, float]:
    given = {"name": name, "folder": str(args.cache), "images": args.images}
    with tempfile.TemporaryDirectory(prefix="data-") as place:
        log = Path(place) / "log"
        run_to_end([sys.executable, __file__, "--job", json.dumps(given)], log, LIMIT_S)
        return dict(json.loads(log.read_text().splitlines()[-1]))


def measure(name: str, folder: str, images: int) -> dict[str, float]:
    _, modules, opened = LOADERS[name]
    for module in ("torch", *modules):
        import_module(module)
    began = time.perf_counter()
    batches = opened(Path(folder))
    shape = tuple(next(batches).shape)
    assert shape in ((BATCH, 3, SIZE, SIZE), (BATCH, SIZE, SIZE, 3)), shape
    first_batch_s = time.perf_counter() - began
    for _ in range(WARM):
        next(batches)
    loaded, before, began = 0, used(), time.perf_counter()
    while loaded < images:
        loaded += len(next(batches))
    spent_s, after = time.perf_counter() - began, used()
    found = {"images_per_s": loaded / spent_s, "cpu_s": 1000 * (after[0] - before[0]) / loaded}
    found |= {"first_batch_s": first_batch_s, "pss_bytes": after[1]}
    batches.close()
    return found


def used() -> tuple[float, int]:
    """CPU seconds, user and system, and bytes (PSS), of this process and all below it."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cpu_s = sum(sum(process.cpu_times()[:4]) for process in tree)
    return cpu_s, sum(process.memory_full_info().pss for process in tree)


# ------------------------------------------------------------------ the transform


def decode_into(out: Any, encoded: bytes, is_mirrored: bool = False) -> None:
    """Decodes, crops and resizes into `out`, (1, 3, 224, 224), channels last; no other copies."""
    import simplejpeg
    import torch

    pixels = torch.from_numpy(simplejpeg.decode_jpeg(encoded))
    rows, columns = crop_of(*pixels.shape[:2])
    view = pixels[rows, columns].permute(2, 0, 1)[None]
    torch.ops.aten._upsample_bilinear2d_aa.out(view, (SIZE, SIZE), False, None, None, out=out)
    if is_mirrored:
        out.copy_(out.flip(-1))


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


def new_batch() -> Any:
    import torch

    batch = torch.empty(BATCH, 3, SIZE, SIZE, dtype=torch.uint8)
    return batch.to(memory_format=torch.channels_last)


def decoded(encoded: bytes) -> Any:
    """An image in memory of its own, for loaders that stack them; shape (224, 224, 3)."""
    import torch

    image = torch.empty(SIZE, SIZE, 3, dtype=torch.uint8)
    decode_into(image.permute(2, 0, 1)[None], encoded, random.random() < 0.5)
    return image


# ------------------------------------------------------------------ loaders: batches without end


def bare(folder: Path) -> Iterator[Any]:
    """The bare loop, which no loader can beat: images are encoded in memory, buffers are reused."""
    encoded = [file.read_bytes() for file in sorted((folder / "images").glob("*/*.jpg"))]
    kept = [new_batch() for _ in range(8 * WORKERS)]

    def fill(number: int) -> Any:
        batch = kept[number % len(kept)]
        for place in range(BATCH):
            decode_into(batch[place : place + 1], encoded[(number * BATCH + place) % len(encoded)])
        return batch

    with ThreadPoolExecutor(WORKERS) as pool:
        ahead = deque(pool.submit(fill, number) for number in range(4 * WORKERS))
        for number in count(len(ahead)):
            yield ahead.popleft().result()
            ahead.append(pool.submit(fill, number))


def data_loader(dataset: Any) -> Iterator[Any]:
    """A DataLoader with two workers, and an epoch that does not end during the measurement."""
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(dataset, num_samples=10**6)
    options = {"num_workers": WORKERS, "prefetch_factor": 4, "drop_last": True}
    for images, _ in DataLoader(dataset, BATCH, sampler=sampler, **options):
        yield images


def folder_pil(folder: Path) -> Iterator[Any]:
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    yield from data_loader(datasets.ImageFolder(str(folder / "images"), transform))


def fast_folder(folder: Path) -> Any:
    """A map-style data set of (image, label), as fast as it gets."""
    from torchvision import datasets

    read = Path.read_bytes
    return datasets.ImageFolder(
        str(folder / "images"), decoded, loader=lambda path: read(Path(path))
    )


def ours(folder: Path, form: str) -> Iterator[Any]:
    """The batches of a worker with two CPUs, mirrored here instead of on a device."""
    for batch in our_batches(source=str(folder / form), image_size=SIZE):
        for image, is_mirrored in zip(batch["image"], batch["flip"].tolist(), strict=True):
            if is_mirrored:
                image.copy_(image.flip(-1))
        if len(batch["image"]) == BATCH:  # the last batch of an epoch may be smaller
            yield batch["image"]


def our_map(folder: Path, shared: bool) -> Iterator[Any]:
    """The data set of `fast_folder` as a user's own: in processes, or in threads that share it."""
    from raytrain_ddp import Data, MapSource, Task

    class Own(Task):
        def train_data(self) -> Data:
            return Data(MapSource(fast_folder(folder), shared=shared))

    for images, _ in our_batches(Own()):
        if len(images) == BATCH:
            yield images


def our_batches(task: Any = None, **data: Any) -> Iterator[Any]:
    import torch

    from raytrain_ddp import AugmentConfig, DataConfig, TrainConfig
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.runtime.world import World

    augment = AugmentConfig(crop="random", flip=True)
    sizes = {"batch_size": BATCH, "micro_batch": BATCH, "epochs": 10**4}
    config = TrainConfig(data=DataConfig(workers=WORKERS, **data), augment=augment, **sizes)
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), threads=WORKERS)
    for slots in Build(config, world, task).loader.steps(0, 10**6):
        yield slots[0].batch


FOLDER, OURS = ("torchvision.datasets", "simplejpeg"), ("raytrain_ddp.training.build",)
LOADERS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], Iterator[Any]]]] = {
    "bare": ("bare decode + crop, 2 threads", ("simplejpeg",), bare),
    "ours-folder": ("**this loader, ImageFolder**", OURS, partial(ours, form="images")),
    "ours-parquet": ("**this loader, converted Parquet**", OURS, partial(ours, form="parquet")),
    "ours-map": ("this loader, MapSource", (*OURS, *FOLDER), partial(our_map, shared=False)),
    "ours-shared": ("same, shared=True", (*OURS, *FOLDER), partial(our_map, shared=True)),
    "folder-fast": ("ImageFolder, DataLoader", FOLDER, lambda f: data_loader(fast_folder(f))),
    "folder-pil": ("ImageFolder, DataLoader, PIL", FOLDER, folder_pil),
}

if __name__ == "__main__":
    sys.exit(main())
