"""This project's loader among the contenders, and its first batch at any step of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_decode import BATCH, SIZE
from data_measure import Clock, Size, imported_s
from data_peers import TORCH, Contender, fast_folder

if TYPE_CHECKING:
    from raytrain_ddp.data.loading.loader import TrainLoader
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.order.sample_rng import Draws

IMPORTS = ("torch", "raytrain_ddp.data.loading.loader", "raytrain_ddp.data.pixels.image_batches")
STARTS = {"first": 0.0, "middle": 0.5, "last": 1.0}
LISTED = 20  # times that each file is listed, for an epoch of many steps


def train_loader(
    folder: Path, form: str, threads: int, listed: int = 1, mirror: bool = True
) -> TrainLoader:
    """The loader of one worker, batches of one slot.

    Args:
        mirror: on the host, in the loader's threads, as the peers do it; else left to the device.
    """
    from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
    from raytrain_ddp.data.discovery.data_check import locate
    from raytrain_ddp.data.loading.loader import TrainLoader, shuffle_for, window_for
    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.data.order.epoch_order import Plan
    from raytrain_ddp.data.pixels.image_batches import image_data
    from raytrain_ddp.data.splits import open_images

    config = DataConfig(
        source=str(folder / form),
        image_size=SIZE,
        shuffle="full" if form in ("images", "list") else "block",
    )
    found = locate(config).train
    source = open_images(replace(found, paths=found.paths * listed), config)
    data = image_data(source, config, AugmentConfig(crop="random", flip=True), 10)
    return TrainLoader(
        data=mirrored(data) if mirror else data,
        plan=Plan(data.rows, 1, BATCH),
        shuffle=shuffle_for(data, config.shuffle),
        window=window_for(data, config.shuffle_window),
        seed=0,
        world_size=1,
        rank=0,
        threads=LoaderThreads(threads),
    )


def mirrored(data: Data) -> Data:
    """The same, with what is left to the device done as a part of collating."""

    def collate(records: Any, draws: Draws) -> Mapping[str, Any]:
        batch = data.collate(records, draws)
        for image, flip in zip(batch["image"], batch["flip"].tolist(), strict=True):
            if flip:
                image.copy_(image.flip(-1))
        return {"image": batch["image"], "label": batch["label"]}

    return replace(data, collate=collate)


def ours(folder: Path, images: int, form: str, threads: int, mirror: bool) -> Iterator[Any]:
    """Epoch after epoch; the last batch of each is smaller."""
    loader = train_loader(folder, form, threads, mirror=mirror)
    for slots in loader.steps(0, 2 * -(-images // BATCH)):
        yield slots[0].batch["image"], slots[0].batch["label"]


def own_dataset(folder: Path, images: int, shared: bool) -> Iterator[Any]:
    """The data set of `folder_fast` as a user's own: in processes, or in threads that share it."""
    from raytrain_ddp.data.loading.loader import TrainLoader
    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.data.loading.own_sources import MapSource
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.order.epoch_order import Plan

    data = Data(MapSource(fast_folder(folder), shared=shared))
    plan = Plan(data.rows, 1, BATCH)
    loader = TrainLoader(data, plan, "full", 1, 0, 1, 0, LoaderThreads(2))
    for slots in loader.steps(0, 2 * -(-images // BATCH)):
        yield tuple(slots[0].batch)


def first_batch(share: float, size: Size) -> dict[str, float]:
    """The first batch of a loader that starts at this share of the epoch."""
    imported_s(IMPORTS)
    clock = Clock()
    loader = train_loader(Path(size.folder), "parquet", 2, LISTED)
    step = round(share * (loader.plan.steps_per_epoch - 1))
    steps = loader.steps(step, step + 2)
    next(steps)
    spent_s = clock.spent_s()
    steps.close()
    return {"first_batch_s": spent_s, "step": step, "steps": loader.plan.steps_per_epoch}


def contender(title: str, form: str, threads: int, limit: str, mirror: bool = True) -> Contender:
    opened = partial(ours, form=form, threads=threads, mirror=mirror)
    return Contender(title, IMPORTS, opened, limit)


OWN = (*TORCH, *IMPORTS, "torchvision.datasets")
OURS = {
    "ours-map": Contender(
        "ours, MapSource, 2 processes", OWN, partial(own_dataset, shared=False), "limit-2"
    ),
    "ours-map-shared": Contender(
        "same, shared=True, 2 threads", OWN, partial(own_dataset, shared=True), "limit-2"
    ),
    "ours-folder-1": contender("ours, ImageFolder, 1 thread", "images", 1, "limit-1"),
    "ours-folder": contender("ours, ImageFolder, 2 threads", "images", 2, "limit-2"),
    "ours-list": contender("ours, list of paths, 2 threads", "list", 2, "limit-2"),
    "ours-tar": contender("ours, WebDataset tar files, 2 threads", "webdataset", 2, "limit-2"),
    "ours-arrow": contender("ours, save_to_disk, 2 threads", "arrow/train", 2, "limit-2"),
    "ours-hf": contender("ours, datasets' Parquet, 2 threads", "parquet-hf", 2, "limit-2"),
    "ours-1": contender("ours, converted Parquet, 1 thread", "parquet", 1, "limit-1"),
    "ours-2": contender("ours, converted Parquet, 2 threads", "parquet", 2, "limit-2"),
    "ours-device": contender(
        "same, mirrored on the device, not here", "parquet", 2, "limit-2", mirror=False
    ),
}
