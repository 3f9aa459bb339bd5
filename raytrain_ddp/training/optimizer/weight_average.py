"""Averaged weights, which are evaluated and exported in place of those that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.config.field_types import require
from raytrain_ddp.config.sections import EmaConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.gradients.buffer_sync import REALS, buffers_of, flat, spread
from raytrain_ddp.training.optimizer.task_optimizer import averages, parameters_of


class OptimizerAverage:
    """That of an optimizer with `train()` and `eval()`, such as schedule-free ones; it is computed
    from the weights and the optimizer's state.

    Attributes:
        values: its tensors, if they are state of their own, by name; equal on all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self.values: dict[str, Tensor] = {}

    def restart(self) -> None:
        """Makes the average that of the model as it is."""

    def follow(self, refused: Tensor, step: int) -> None:
        """Follows `step` (from 1), unless it was refused; a GPU is not waited for."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights; afterward, its own again, to the bit."""
        parameters = parameters_of(self._optimizer)
        homes = [parameter.data for parameter in parameters]
        own = [home.clone() for home in homes]
        self._optimizer.eval()
        try:
            yield
        finally:
            self._optimizer.train()
            torch._foreach_copy_(homes, own)  # train() would round
            for parameter, home in zip(parameters, homes, strict=True):
                parameter.data = home

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, by all names of the model's `state_dict()`."""
        with self.in_place():
            return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}


class WeightAverage:
    """The average of parameters and floating-point buffers over the applied steps. Others, such as
    counters and float8, which has no arithmetic, are copied from the newest step. So are values
    that are not finite now or in the average, as in masks. (Polyak averaging; timm's ModelEmaV3 is
    the same, but moves in refused steps, too, and averages of inf are nan.)

    Raises:
        ConfigError: a trained weight has too few bits for averages.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._config, self._model = config, model
        self.on_device = any(parameter.is_cuda for parameter in model.parameters())
        stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        self._parameters = [(n, p) for n, p in model.named_parameters() if id(p) in stored]
        self._buffers = [place for place in buffers_of(model) if id(place.found()) in stored]
        for name, parameter in self._parameters:
            if parameter.requires_grad and parameter.element_size() < 4:
                raise ConfigError(
                    f"ema.decay = {config.decay}: {name} is {parameter.dtype}, too coarse for an "
                    "average; keep weights in float32 (--compute.precision sets that of kernels)."
                )
        self.restart()

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model by name; a forward pass may replace a buffer."""
        weights = {name: parameter.detach() for name, parameter in self._parameters}
        return weights | {place.name: place.tensor() for place in self._buffers}

    def restart(self) -> None:
        now = self._tensors()
        self.values = {name: tensor.clone() for name, tensor in now.items()}
        buffers = {place.name for place in self._buffers}
        real = [name for name, tensor in now.items() if tensor.dtype in REALS]
        self._moving = [name for name in real if name not in buffers]
        self._newest = [name for name in now if name not in {*real}]
        self._by_type: dict[torch.dtype, list[str]] = {}
        for name in (name for name in real if name in buffers):
            self._by_type.setdefault(now[name].dtype, []).append(name)

    def decay(self, step: int) -> float:
        """The decay in `step` (from 1); with a warm-up, at most (1 + step) / (10 + step)."""
        limit = (1 + step) / (10 + step) if self._config.warmup else 1.0
        return min(self._config.decay, limit)

    @torch.no_grad()
    def follow(self, refused: Tensor, step: int) -> None:
        """Moves toward the model after `step`."""
        now, weight = self._tensors(), 1 - self.decay(step)
        means = [self.values[name] for name in self._moving]
        targets = [now[name] for name in self._moving]
        if self.on_device:
            change = torch._foreach_sub(targets, means)
            torch._foreach_mul_(change, torch.where(refused, 0.0, weight))
            torch._foreach_add_(means, change)
        elif not refused:
            torch._foreach_lerp_(means, targets, weight)
        for names in self._by_type.values():
            kept = [self.values[name] for name in names]
            mean, target = flat(kept), flat(now[name] for name in names)
            moved = torch.lerp(mean, target, (~refused).to(mean) * weight)
            spread(torch.where(mean.isfinite() & target.isfinite(), moved, target), kept)
        if self._newest:
            kept = [self.values[name] for name in self._newest]
            torch._foreach_copy_(kept, [now[name] for name in self._newest])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        now = self._tensors()
        own = {name: tensor.clone() for name, tensor in now.items()}
        with torch.no_grad():
            torch._foreach_copy_([*now.values()], [self.values[name] for name in now])
        try:
            yield
        finally:
            with torch.no_grad():
                now = self._tensors()
                torch._foreach_copy_([*now.values()], [own[name] for name in now])

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, also by the names of tied weights; extra states are the model's own."""
        stored = self._model.state_dict(keep_vars=True)
        names = {id(parameter): name for name, parameter in self._parameters}
        names |= {id(place.found()): place.name for place in self._buffers}
        return {
            name: self.values[names[id(each)]] if id(each) in names else each.detach()
            for name, each in stored.items()
        }


Average = OptimizerAverage | WeightAverage
"""Weights that differ from the trained ones, in the same model."""


def average_of(model: nn.Module, optimizer: Optimizer, config: EmaConfig) -> Average | None:
    """The weights that are evaluated in place of the model's; None if there are none.

    Raises:
        ConfigError: there would be two averages, or a trained weight has too few bits.
    """
    if not averages(optimizer):
        return WeightAverage(model, config) if config.decay else None
    rule = f"the {type(optimizer).__name__} averages the weights itself: remove it"
    require(not config.decay, "ema.decay", config.decay, rule)
    return OptimizerAverage(model, optimizer)
