"""Trial steps of a task's optimizer, before the first step: what it does must be repeatable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raytrain_ddp.checkpoint.snapshot import flatten_state, unflatten_state
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.optimizer.optimizer_state import averages, load_optimizer, parameters_of
from raytrain_ddp.training.runtime.seeding import keeping_generators, seed_slot


def problem_of(optimizer: Optimizer, config: TrainConfig) -> str:
    """Why it cannot be used; "" if it can. Its steps have no side effects: its state must be
    storable, and whole, so that a resumed run takes the same steps.

    Raises:
        Exception: a step fails, or the state cannot be stored.
    """
    trial = _Trial(optimizer, config)
    with keeping_generators(trial.parameters[0].device):
        trial.step(0)
        middle, weights = _stored(optimizer), _copies(trial.parameters)
        trial.step(1)
        gone_on = _copies(trial.parameters)
        trial.begin_again(middle, weights)
        trial.step(1)
        resumed = _copies(trial.parameters)
    if not all(map(_same_bits, resumed, gone_on)):
        return "keeps state outside its state_dict(), so a resumed run would differ"
    trial.undo()
    return ""


class _Trial:
    def __init__(self, optimizer: Optimizer, config: TrainConfig) -> None:
        groups = optimizer.param_groups
        self._optimizer, self._config = optimizer, config
        self.parameters = parameters_of(optimizer)
        self.trained = [each for each in self.parameters if each.requires_grad]
        self._homes = [each.data for each in self.parameters]
        self._initial, self._blank = _copies(self._homes), _stored(optimizer)
        self._names = [{*group} for group in groups]
        self._rates = [group["lr"] for group in groups]
        if averages(optimizer):
            optimizer.train()  # type: ignore[attr-defined]

    def step(self, number: int) -> None:
        seed_slot(self.parameters[0].device, self._config.seed, number, self._config.slots)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self.trained:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._optimizer.step()

    def begin_again(self, state: Any, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, weights, strict=True):
                parameter.copy_(value)
        load_optimizer(self._optimizer, deepcopy(state))  # it becomes its own

    def undo(self) -> None:
        optimizer = self._optimizer
        load_optimizer(optimizer, self._blank)
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            for name in group.keys() - names:  # such as a counter, added by a step
                del group[name]
        if averages(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        for parameter, home, value in zip(self.parameters, self._homes, self._initial, strict=True):
            parameter.data = home.copy_(value)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """On the CPU, as a GPU may have no room for them."""
    return [each.detach().to("cpu", copy=True) for each in tensors]


def _stored(optimizer: Optimizer) -> Any:
    """Its state as a checkpoint returns it."""
    tensors, rest = flatten_state(optimizer.state_dict())
    copies = dict(zip(tensors, _copies([*tensors.values()]), strict=True))
    return unflatten_state(copies, json.loads(json.dumps(rest)))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())
