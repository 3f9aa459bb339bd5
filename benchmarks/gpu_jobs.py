"""The measurements of gpu.py, each in a process of its own: ``gpu_jobs.py JOB OPTIONS``.

OPTIONS is a JSON object; the last line of the output is one, too.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.events import Checkpoint, Train
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.training.loop import train
from raytrain_ddp.training.recording.local_session import LocalSession, join_world
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.device_feed import plan_of, train_loader

KEPT = 64  # different images in memory
ROWS = 2**20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class InMemory(ImageClassification):
    """Images that need not be read or decoded; a micro-batch is copied as any other one."""

    def train_data(self) -> Data:
        side = self._config.data.image_size
        images = np.random.default_rng(0).integers(0, 256, (KEPT, 3, side, side), np.uint8)
        return Data(_Repeated(torch.from_numpy(images)), lambda batch, _: batch)

    def eval_data(self) -> Data | None:
        return None


class _Repeated:
    def __init__(self, images: Tensor) -> None:
        self._images = images
        self.blocks = runs_of(ROWS, 1024)

    def read(self, rows: np.ndarray[Any, Any]) -> Batch:
        kept = torch.from_numpy(rows % KEPT)
        return {"image": self._images[kept], "label": kept % 10}

    def fingerprint(self) -> str:
        return f"{KEPT} images"


def config_of(options: Mapping[str, Any], world_size: int = 1) -> TrainConfig:
    """The run that the options describe.

    Args:
        options: model, args (of the model), image_size, batch (of a GPU), steps, warm_up, every
            (steps between log lines), precision, storage; optionally name, jpegs (a folder of
            class folders), and changes (of the config).
    """
    jpegs = options.get("jpegs")
    evaluated = {"eval": {"every_epochs": 0}, "limit_eval_batches": 1} if jpegs else {}
    source = {"source": jpegs, "holdout": 0.02} if jpegs else {}
    made: dict[str, Any] = {
        "name": options.get("name", "gpu"),
        "storage": options["storage"],
        "epochs": 1000,
        "steps": options["warm_up"] + options["steps"],
        "batch_size": options["batch"] * world_size,
        "micro_batch": options["batch"],
        "data": {"image_size": options["image_size"], "workers": threads(world_size), **source},
        "augment": {"crop": "random", "flip": True},
        "model": {"name": options["model"], "args": options["args"]},
        "compute": {
            "precision": options["precision"],
            "channels_last": options["model"].startswith("resnet"),
        },
        **evaluated,
        "checkpoint": {"every_epochs": 0, "every_s": 0.0},
        "log": {"every_steps": options["every"], "tensorboard": False},
    }
    for section, changes in options.get("changes", {}).items():
        old = made.get(section, {})
        made[section] = {**old, **changes} if isinstance(changes, dict) else changes
    return from_dict(made)


def threads(world_size: int) -> int:
    """CPUs of this machine for each of its workers."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """`train`: images/s, MFU, the split of a step, peak memory, checkpoints."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    config = config_of(options, size)
    world = join_world(config.scaling)
    task = ImageClassification(config) if options.get("jpegs") else InMemory(config)
    events: list[Any] = []
    with LocalSession(config, world, Best("loss", "min"), events.append) as session:
        train(config, task, session)
    if not world.is_main:
        return {}
    lines = [event for event in events if isinstance(event, Train)]
    first = next(n for n, line in enumerate(lines) if line.step >= options["warm_up"])
    begun, *measured = lines[first:]
    took_s = measured[-1].seconds - begun.seconds
    split = {
        phase: sum(line.timing.split_s.get(phase, 0.0) for line in measured) / len(measured)
        for phase in {phase for line in measured for phase in line.timing.split_s}
    }
    saved = [event for event in events if isinstance(event, Checkpoint)]
    newest = checkpoint_store(run_storage(config)).latest()
    return {
        "images_per_s": (measured[-1].step - begun.step) * config.batch_size / took_s,
        "mfu": measured[-1].timing.mfu,
        "flops_per_s": measured[-1].timing.flops_per_s,
        "split_s": split,
        "peak_gib": measured[-1].timing.peak_memory_bytes / 2**30,
        "loss": measured[-1].loss,
        "checkpoints": len(saved),
        "commit_s": max((event.seconds or 0.0 for event in saved), default=0.0),
        "bits": newest.manifest.files["model.safetensors"].sha256 if newest else "",
    }


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A hand-written loop, with DDP under torchrun: autocast, fused SGD, kernels as torch chooses
    them. Its batch is in pinned memory, or comes from a DataLoader."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    config = config_of(options, size)
    world = join_world(config.scaling)
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if config.compute.channels_last else torch.contiguous_format
    model = InMemory(config).model().to(world.device, memory_format=layout).train()
    net: nn.Module = model
    if size > 1:
        net = nn.parallel.DistributedDataParallel(model, device_ids=[world.local_rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    dtype = DTYPES[options["precision"]]
    batches = _loaded(options, size) if options.get("jpegs") else _pinned(options)

    def step() -> None:
        images, labels = (each.to(world.device, non_blocking=True) for each in next(batches))
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            images = images.to(memory_format=layout).float().div(255).sub(0.45).div(0.225)
            loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    took_s = _timed(step, options, partial(_wait, world))
    rate = options["steps"] * config.batch_size / took_s
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    return {"images_per_s": rate, "peak_gib": peak / 2**30} if world.is_main else {}


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _timed(step: Callable[[], None], options: Mapping[str, Any], wait: Callable[[], None]) -> float:
    for _ in range(options["warm_up"]):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(options["steps"]):
        step()
    wait()
    return time.perf_counter() - began


def _pinned(options: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    side, count = options["image_size"], options["batch"]
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.arange(count) % 10
    if torch.cuda.is_available():
        images, labels = images.pin_memory(), labels.pin_memory()
    while True:
        yield images, labels


def _loaded(options: Mapping[str, Any], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """torchvision's ImageFolder and transforms, in the processes of a DataLoader."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomResizedCrop(options["image_size"]), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    loader: DataLoader[Any] = DataLoader(
        ImageFolder(options["jpegs"], transform),
        options["batch"],
        shuffle=True,
        num_workers=threads(size),
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader


def loader(options: Mapping[str, Any]) -> dict[str, Any]:
    """This loader alone, on all CPUs, without a GPU."""
    config = config_of(options)
    data = ImageClassification(config).train_data()
    world = World(0, 1, 0, torch.device("cpu"), threads(1))
    total = options["warm_up"] + options["steps"]
    steps = train_loader(config, data, plan_of(config, data), world).steps(0, total)
    took_s = _timed(lambda: void(next(steps)), options, lambda: None)
    steps.close()
    return {"images_per_s": options["steps"] * config.batch_size / took_s}


def void(_: object) -> None: ...


JOBS = {"ours": ours, "plain": plain, "loader": loader}


def main() -> None:
    job, options = sys.argv[1], json.loads(sys.argv[2])
    found = JOBS[job](options)
    if found:
        print(json.dumps({k: v for k, v in found.items() if not _is_nan(v)}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


if __name__ == "__main__":
    main()
