"""Chooses the values of fields that say auto, once, as a run begins; see config/automatic.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, run_storage
from raytrain_ddp.config.automatic import (
    settled_as,
    settled_as_begun,
    settled_without_gpu,
    unsettled,
)
from raytrain_ddp.config.recipe import parse
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.task_check import train_data_of
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.optimizer.several_optimizers import turns_of
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of
from raytrain_ddp.training.runtime.determinism import naming_nondeterministic
from raytrain_ddp.training.runtime.world import World, device_name, from_all_ranks, set_up
from raytrain_ddp.training.start.initial_model import initial_model
from raytrain_ddp.training.steps.device_feed import plan_of, train_loader
from raytrain_ddp.training.steps.warm_up import Forward

_MEMORY = 0.9  # of a GPU; the rest is for NCCL, the driver, and what fragments


def settled(config: TrainConfig, world: World) -> tuple[TrainConfig, list[str]]:
    """The config without auto, and notes about what was chosen. On GPUs all ranks take part."""
    names = unsettled(config)
    if not names:
        return config, []
    workers = max(world.size, config.scaling.worker_range()[1])
    if world.device.type != "cuda":
        config = settled_without_gpu(config, workers)
        limit = "on CPUs, where memory is not the limit, at most 32"
        return config, [_micro_batch_note(config, limit)] * ("micro_batch" in names)
    has_bf16 = all(from_all_ranks(_has_bf16(world.device), world))
    gpu = device_name(world.device)
    config = settled_as(
        config,
        {"compute.precision": "bf16" if has_bf16 else "fp32", "compute.channels_last": has_bf16},
    )
    notes = []
    if {"compute.precision", "compute.channels_last"} & {*names}:
        layout = "channels_last" if config.compute.channels_last else "contiguous"
        notes.append(f"On {gpu}: {config.compute.precision}, {layout} images (auto).")
    if "micro_batch" in names:
        sizes = config.micro_batches(workers)
        if config.ddp.sync_batchnorm:  # takes a slot for each worker
            sizes = [size for size in sizes if size * world.size == config.batch_size]
        with _limited_memory(world.device, config.scaling.gpus_per_worker):
            try:
                size = largest_that_fits(config, world, sizes)
            except torch.OutOfMemoryError:  # not even the model
                size = 0
            size = min(from_all_ranks(size, world))
        if not size:
            raise ConfigError(
                f"micro_batch = 'auto': not even {min(sizes, default=1)} samples fit the memory of "
                f"{gpu}: use a smaller model, smaller images, or --compute.precision bf16."
            )
        config = settled_as(config, {"micro_batch": size})
        notes.append(_micro_batch_note(config, f"the largest that fits {gpu}"))
    return config, notes


def as_begun(config: TrainConfig) -> TrainConfig:
    """The config with what an earlier start of this command has settled."""
    if not unsettled(config):
        return config
    with suppress(FileNotFoundError, ValueError):  # not TOML: torn
        return settled_as_begun(config, parse(run_storage(config).read(CONFIG_FILE).decode()))
    return config


def _micro_batch_note(config: TrainConfig, why: str) -> str:
    return (
        f"micro_batch = {config.micro_batch} (auto: {why}); a step has {config.slots} slots, and "
        f"batch norm sees {config.micro_batch} samples. The run keeps it on any number of workers."
    )


# ------------------------------------------------------------------ what fits


def largest_that_fits(config: TrainConfig, world: World, sizes: Sequence[int]) -> int:
    """The first of the sizes, from large to small, whose passes fit this worker's memory; 0: none.

    Tries them with the task's own model, data and optimizer, which are thrown away. Each rank does
    the same, alone. Does not compile: that needs no more memory, and would do so for each size.
    """
    if not sizes:
        return 0
    tried = replace(config, compute=replace(config.compute, compile=False))
    set_up(world, tried.compute)
    alone = replace(world, rank=0, size=1)
    task = load_task(replace(tried, micro_batch=sizes[0]))
    data = train_data_of(task, tried.seed)
    with closing(data):
        model = initial_model(tried, task, alone)
        optimizer = optimizer_of(task, model, tried)
        names = turns_of(task, optimizer, range(1))(0)
        loader = train_loader(tried, data, plan_of(tried, data), alone)
        loader = replace(loader, threads=LoaderThreads(0), pin=False)

        def passes(size: int) -> None:
            batch = loader.any_batch(size, tried.data.grow_epochs)
            kept = _kept(tried, model, world, size)
            for _ in range(2):  # the second has the state of the optimizer
                for name in names:
                    Forward(tried, task, model, model, world, name)(batch)[0].backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            del kept

        with naming_nondeterministic(model):
            return next((size for size in sizes if _fits(passes, size)), 0)


def _fits(passes: Callable[[int], None], size: int) -> bool:
    try:
        passes(size)
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU
    return True


def _kept(config: TrainConfig, model: nn.Module, world: World, size: int) -> list[torch.Tensor]:
    """Memory that the run takes besides, each as large as the gradients: the buckets of DDP; the
    average of the weights; compressed gradients; with exact the partial sums of slots."""
    slots = -(-config.batch_size // size // max(1, world.size))
    copies = (world.size > 1) + (config.ema.decay > 0) + (config.ddp.compression != "none")
    copies += slots.bit_length() if config.exact else 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]


@contextmanager
def _limited_memory(device: torch.device, share: float) -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(_MEMORY * share, device)
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.reset_peak_memory_stats(device)


def _has_bf16(device: torch.device) -> bool:
    """In hardware: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
