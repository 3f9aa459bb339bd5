"""The loaders that are compared, but for our own: each at its best settings with two workers.

All shuffle as they do by default in training, prefetch, and yield (images, labels) of 64 uint8
images. An epoch is made longer than it is, by each library's own means, so that no loader starts a
new epoch while it is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_decode
from data_decode import BATCH

WORKERS = 2
TORCH = ("torch", "torch.utils.data")


@dataclass(frozen=True)
class Contender:
    """One way to load.

    Args:
        imports: what is imported before the clock of the first batch starts.
        open: (folder of data_images.py, images to come at least) -> batches without end or as many
            as asked.
        limit: the tight loop that it is compared with.
        rounds: in how many rounds it runs; 0: in all.
        from_start: its speed includes its start, as what it decodes ahead would be counted else.
    """

    title: str
    imports: tuple[str, ...]
    open: Callable[[Path, int], Iterator[Any]]
    limit: str = "limit-2"
    rounds: int = 0
    from_start: bool = False


def data_loader(dataset: Any, images: int = 0, **options: Any) -> Iterator[Any]:
    """DataLoader with two workers; of a map-style data set, `images` samples in random order."""
    from torch.utils.data import DataLoader, RandomSampler

    if images:
        options["sampler"] = RandomSampler(dataset, num_samples=images)
    options = {"batch_size": BATCH, "drop_last": True, "num_workers": WORKERS, **options}
    yield from DataLoader(dataset, prefetch_factor=4, **options)


def folder_pil(folder: Path, images: int) -> Iterator[Any]:
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(data_decode.SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
    yield from data_loader(datasets.ImageFolder(str(folder / "images"), transform), images)


def folder_v2(folder: Path, images: int) -> Iterator[Any]:
    from torchvision import datasets
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(data_decode.SIZE), v2.RandomHorizontalFlip()])

    def load(path: str) -> Any:
        return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)

    found = datasets.ImageFolder(str(folder / "images"), transform, loader=load)
    yield from data_loader(found, images)


def fast_folder(folder: Path) -> Any:
    """A map-style data set of (image, label) in the fastest way."""
    from torchvision import datasets

    return datasets.ImageFolder(
        str(folder / "images"), data_decode.decode_crop, loader=lambda path: Path(path).read_bytes()
    )


def folder_fast(folder: Path, images: int) -> Iterator[Any]:
    yield from data_loader(fast_folder(folder), images)


def webdataset(folder: Path, images: int) -> Iterator[Any]:
    import webdataset as wds

    urls = sorted(str(file) for file in (folder / "webdataset").glob("*.tar"))
    pipeline = (
        wds.WebDataset(urls, resampled=True, shardshuffle=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(data_decode.decode_crop, int)
        .batched(BATCH, partial=False)
    )
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=WORKERS, prefetch_factor=4)
    yield from loader


def mosaic_streaming(folder: Path, images: int) -> Iterator[Any]:
    from streaming import Stream, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Decoded(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            row = super().__getitem__(at)
            return data_decode.decode_crop(row["image"]), row["label"]

    clean_stale_shared_memory()
    stream = Stream(local=str(folder / "mds"), repeat=float(times(folder, images)))
    yield from data_loader(Decoded(streams=[stream], shuffle=True, batch_size=BATCH))


def litdata(folder: Path, images: int) -> Iterator[Any]:
    import litdata as lit

    found = lit.StreamingDataset(
        str(folder / "litdata"),
        shuffle=True,
        subsample=float(times(folder, images)),
        transform=lambda row: (data_decode.decode_crop(row["image"]), row["label"]),
    )
    options = {"batch_size": BATCH, "num_workers": WORKERS, "prefetch_factor": 4}
    yield from lit.StreamingDataLoader(found, drop_last=True, **options)


def hugging_face(folder: Path, images: int) -> Iterator[Any]:
    import datasets

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        decoded = [data_decode.decode_crop(image["bytes"]) for image in rows["image"]]
        return {"image": decoded, "label": rows["label"]}

    found = datasets.load_from_disk(str(folder / "arrow" / "train"))
    found = found.cast_column("image", datasets.Image(decode=False)).with_transform(transform)
    for batch in data_loader(found, images):
        yield batch["image"], batch["label"]


def ray_data(folder: Path, images: int) -> Iterator[Any]:
    import ray
    from torch import from_numpy

    def decode(rows: dict[str, Any]) -> dict[str, Any]:
        decoded, _ = data_decode.collate([(image["bytes"], 0) for image in rows["image"]])
        return {"image": decoded.permute(0, 2, 3, 1).numpy(), "label": rows["label"]}

    ray.init(
        address="local",
        num_cpus=WORKERS,
        object_store_memory=2**30,  # with more, it would decode all of this small set ahead
        include_dashboard=False,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as place:
        for number in range(times(folder, images)):  # a file that is named twice is read once
            for file in (folder / "parquet-hf").glob("*.parquet"):
                (Path(place) / f"{number}-{file.name}").symlink_to(file)
        rows = ray.data.read_parquet(place, shuffle="files")
        decoded = rows.map_batches(decode, batch_size=BATCH)
        # Ray is ended by the end of the process: threads that read ahead do not survive it.
        for batch in decoded.iter_batches(batch_size=BATCH, prefetch_batches=4, drop_last=True):
            yield from_numpy(batch["image"]), from_numpy(batch["label"])


def spdl(folder: Path, images: int) -> Iterator[Any]:
    """Threads; a whole batch a task, which takes less CPU time than an image a task."""
    import random

    from spdl.pipeline import PipelineBuilder
    from torchvision.datasets import ImageFolder

    samples = ImageFolder(str(folder / "images")).samples

    def source() -> Iterator[Sequence[tuple[str, int]]]:
        while True:
            for start in range(0, len(order := random.sample(samples, len(samples))), BATCH):
                if len(chosen := order[start : start + BATCH]) == BATCH:
                    yield chosen

    def load(chosen: Sequence[tuple[str, int]]) -> Any:
        return data_decode.collate([(Path(path).read_bytes(), label) for path, label in chosen])

    pipeline = (
        PipelineBuilder()
        .add_source(source())
        .pipe(load, concurrency=WORKERS)
        .add_sink(4)
        .build(num_threads=WORKERS)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def times(folder: Path, images: int) -> int:
    """How often the images must come to be `images`."""
    return -(-images // sum(1 for _ in (folder / "images").glob("*/*.jpg")))


SIMPLE = ("simplejpeg", *TORCH)
PEERS = {
    "limit-1": Contender(
        "bare decode + crop, 1 thread",
        SIMPLE,
        lambda folder, _: data_decode.into_batch(folder, 1),
        "limit-1",
    ),
    "limit-2": Contender(
        "bare decode + crop, 2 threads", SIMPLE, lambda folder, _: data_decode.into_batch(folder, 2)
    ),
    "limit-mirrored": Contender(
        "bare decode + crop + mirror, 2 threads",
        SIMPLE,
        lambda folder, _: data_decode.into_batch_mirrored(folder, 2),
    ),
    "limit-torchvision": Contender(
        "the same with torchvision, 2 threads",
        ("torchvision", *TORCH),
        lambda folder, _: data_decode.by_torchvision(folder, 2),
    ),
    "folder-pil": Contender("ImageFolder + DataLoader, PIL", ("torchvision", *TORCH), folder_pil),
    "folder-v2": Contender(
        "same, decode_jpeg + v2", ("torchvision.transforms.v2", *TORCH), folder_v2
    ),
    "folder-fast": Contender("same, simplejpeg + crop view", ("torchvision", *SIMPLE), folder_fast),
    "webdataset": Contender("WebDataset", ("webdataset", *SIMPLE), webdataset),
    "mosaic": Contender("mosaicml-streaming", ("streaming", *SIMPLE), mosaic_streaming),
    "litdata": Contender("litdata", ("litdata", *SIMPLE), litdata),
    "hf": Contender("HF datasets + DataLoader", ("datasets", *SIMPLE), hugging_face),
    "spdl": Contender("SPDL, threads", ("spdl.pipeline", "torchvision", *SIMPLE), spdl),
    "ray-data": Contender(
        "Ray Data, speed with its start", ("ray.data", *SIMPLE), ray_data, rounds=1, from_start=True
    ),
}
