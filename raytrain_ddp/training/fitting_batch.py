"""``fit --find-micro-batch``: finds the largest micro-batch that fits in the memory of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import nn

from raytrain_ddp.config.automatic import settled
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.rehearsal import take_step
from raytrain_ddp.training.runtime.world import World, device_name, has_bf16, set_up
from raytrain_ddp.training.steps.warm_up import naming_remedy

_MEMORY = 0.9  # of a GPU; the rest is for NCCL, the driver, and what fragments


def find_micro_batch(config: TrainConfig, workers: int) -> int:
    """The largest size that gives each of `workers` a slot and fits on this machine's first GPU.

    Raises:
        PreflightError: there is no GPU. ConfigError: no size fits its memory.
    """
    if not torch.cuda.is_available():
        raise PreflightError(
            "--find-micro-batch: this machine has no GPU. On CPUs, memory is not the limit."
        )
    world = World(0, workers, 0, torch.device("cuda", 0), 1)
    config = settled(config, has_bf16(world.device))
    torch.cuda.set_per_process_memory_fraction(_MEMORY * config.scaling.gpus_per_worker)
    try:
        size = largest_that_fits(config, world, config.micro_batches(workers))
    except torch.OutOfMemoryError:  # not even the model
        size = 0
    if not size:
        raise ConfigError(
            f"--find-micro-batch: no size fits the memory of {device_name(world.device)}: use a "
            "smaller model, smaller images, or --compute.precision bf16."
        )
    return size


def largest_that_fits(config: TrainConfig, world: World, sizes: Sequence[int]) -> int:
    """The first of the sizes, from large to small, whose passes fit this worker's memory; 0: none.

    Tries them with the task's own model, data and optimizer, which are then discarded. Does not
    compile the model: that needs no more memory, and would be repeated for each size.
    """
    if not sizes:
        return 0
    plain = replace(config.compute, compile=False)
    alone_here = replace(config.data, workers=0)
    tried = replace(config, micro_batch=sizes[0], compute=plain, data=alone_here)
    set_up(world, tried.compute)
    build = Build(tried, replace(world, rank=0, size=1))
    with closing(build.data):

        def passes(size: int) -> None:
            batch = build.loader.any_batch(size, tried.data.grow_epochs)
            kept = _kept(tried, build.model, world, size)
            for number in range(2):  # the second has the state of the optimizer
                take_step(build, batch, number)
            del kept

        with naming_remedy():
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
    """Memory that the run needs in addition, each as large as the gradients: the buckets of DDP;
    the average of the weights; compressed gradients; with exact, the partial sums of slots."""
    slots = -(-config.batch_size // size // max(1, world.size))
    copies = (world.size > 1) + (config.ema.decay > 0) + (config.ddp.compression != "none")
    copies += slots.bit_length() if config.exact else 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
