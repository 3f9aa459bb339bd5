"""Builds the optimizer, and computes the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.param_groups import param_groups


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """SGD or AdamW over the groups of `param_groups`.

    Fused, as only fused optimizers skip a step on the device: if their `found_inf` is 1.
    """
    groups = param_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    sgd = torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    if config.momentum:
        allocate_momentum(sgd, (p for p in model.parameters() if p.requires_grad))
    return sgd


def allocate_momentum(sgd: torch.optim.SGD, parameters: Iterable[nn.Parameter]) -> None:
    """SGD does so in the first step, but a refused step leaves it unset. The order of parameters is
    that of the state in a checkpoint."""
    for parameter in parameters:
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then the schedule."""
    schedule, peak = config.schedule, config.optim.lr
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    total = config.total_steps(steps_per_epoch)
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.gamma ** int(step / (schedule.step_epochs * steps_per_epoch))
    done = min(1.0, (step - warmup) / max(1.0, total - warmup))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_lr + (1 - schedule.final_lr) * cosine)
