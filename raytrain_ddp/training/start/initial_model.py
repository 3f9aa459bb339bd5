"""The model with which a process starts or continues."""

from __future__ import annotations

import torch
from torch import nn

from raytrain_ddp.checkpoint.run_folder import newest_manifest, run_storage
from raytrain_ddp.checkpoint.snapshot import unstorable
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_parts import begin_training
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import model_of, require_dense
from raytrain_ddp.training.gradients.buffer_sync import own_memory
from raytrain_ddp.training.gradients.reduction import broadcast_model, require_same_model
from raytrain_ddp.training.runtime.seeding import seed_all
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Kept


def model_for(
    config: TrainConfig, task: Task, world: World, kept: Kept | None, is_begun: bool = False
) -> nn.Module:
    """The kept model, or the initial one; all ranks take part.

    Args:
        is_begun: see `initial_model`.

    Raises:
        ConfigError: it differs from rank 0's, or cannot be stored.
    """
    if kept is not None and kept.model is not None:
        kept.model.zero_grad()  # frees the old gradients
        require_same_model(kept.model, world)
        return kept.model
    model = initial_model(config, task, world, is_begun)
    for name, kind in unstorable(model.state_dict()).items():
        raise ConfigError(  # before hours of training, not at the first checkpoint
            f"the model's {name} ({kind}) cannot be stored in a checkpoint: use a dtype that "
            "safetensors supports (get_extra_state() may return such a tensor), "
            "torch.view_as_real for complex numbers, or persistent=False for a buffer that a "
            "resumed run does not need."
        )
    return model


def initial_model(
    config: TrainConfig, task: Task, world: World, is_begun: bool = False
) -> nn.Module:
    """The model on this worker's device, not wrapped; all ranks take part if there are several.
    For a task's own optimizer, which may keep something of them, all have rank 0's weights.

    Args:
        is_begun: other weights follow. Otherwise, they do if the run has a checkpoint.
    """
    seed_all(config.seed)
    # A resumed run needs no pretrained weights: its own follow.
    is_new = not is_begun and newest_manifest(run_storage(config)) is None
    model = model_of(task, is_new)
    if not config.exact and getattr(task, "optimizer", None) is None:
        require_dense(task, model)  # else the gradients are dense, or the task's optimizer decides
    begin_training(model)
    own_memory(model)
    if config.ddp.sync_batchnorm and world.size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = placed(config, model, world.device)
    require_same_model(model, world)
    if getattr(task, "optimizer", None) is not None:
        broadcast_model(model, world, is_loaded=False)
    return model


def placed(config: TrainConfig, model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device, in the layout and the form of the config."""
    if config.compute.channels_last is True:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(device)
    if config.compute.compile:
        model.compile()
    return model
