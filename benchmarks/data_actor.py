"""Threads or processes for our decoding inside a Ray actor, idle and beside two kinds of training.

Both designs read the same records and collate them by the same function, a whole batch a task.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import data_measure
from data_decode import BATCH
from data_measure import Clock, Size
from data_ours import IMPORTS, train_loader

CPUS = 2
DESIGNS = {
    "threads": "2 threads of our loader",
    "forkserver": "DataLoader, 2 forkserver processes",
}


class Steps:
    """Step k of our loader as item k, for a DataLoader without batching of its own."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.loader: Any = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Any:
        from raytrain_ddp.data.order.epoch_order import EpochOrder
        from raytrain_ddp.data.order.sample_rng import Draws

        if self.loader is None:  # in a worker process: neither is pickled
            self.loader = train_loader(self.folder, "parquet", 0)
            self.orders: dict[int, EpochOrder] = {}
        loader = self.loader
        epoch, step_of_epoch = divmod(step, loader.plan.steps_per_epoch)
        if epoch not in self.orders:
            self.orders[epoch] = EpochOrder(
                loader.data.source.blocks, loader.shuffle, loader.seed, epoch, loader.window
            )
        rows = self.orders[epoch].read(*loader.plan.span(step_of_epoch, 0))
        draws = Draws(loader.seed, epoch, rows)
        batch = loader.data.collate(loader.data.source.read(rows), draws)
        return batch["image"], batch["label"]


def batches_of(design: str, folder: Path, images: int) -> Generator[Any, None, None]:
    steps = 2 * -(-images // BATCH)
    if design == "threads":
        for slots in train_loader(folder, "parquet", CPUS).steps(0, steps):
            yield slots[0].batch["image"], slots[0].batch["label"]
        return
    from torch.utils.data import DataLoader

    yield from DataLoader(
        Steps(folder, steps),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=CPUS,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )


class Worker:
    """The actor."""

    def measure(self, design: str, size: Size) -> dict[str, Any]:
        data_measure.imported_s(IMPORTS)
        works = {"small": data_measure.small_operations, "model": model_step()}
        alone = {f"{name}_alone_ms": data_measure.timed_ms(w, 40) for name, w in works.items()}
        clock = Clock()
        batches = batches_of(design, Path(size.folder), size.needed)
        next(batches)
        first_batch_s = clock.spent_s()
        try:
            for _ in range(size.warm):
                next(batches)
            found = data_measure.speed(batches, size, size.images)
            for name, work in works.items():
                beside = data_measure.speed(batches, size, size.images // 2, work)
                found |= {f"{name}_{key}": value for key, value in beside.items()}
            memory = data_measure.peak_memory(batches, 2.0)
        finally:
            batches.close()
        return {"first_batch_s": first_batch_s, **alone, **found, **memory}


def model_step() -> Any:
    """A step of a small network on the CPU: its arithmetic runs with the GIL released."""
    import torch
    from torch import nn

    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(128, 512), torch.zeros(128, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

    return step


def in_actor(design: str, size: Size) -> dict[str, Any]:
    """What a fresh actor with 2 CPUs measures, in a fresh Ray."""
    import ray

    ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    try:
        worker = ray.remote(num_cpus=CPUS)(Worker).remote()
        found: dict[str, Any] = ray.get(worker.measure.remote(design, size))
        return found
    finally:
        ray.shutdown()
