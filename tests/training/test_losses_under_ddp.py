"""What DDP does not support in a task: it works, or all ranks refuse it and none waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, Raised
from tiny import TinyTask, plain, run_tiny, tiny_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.sections import ComputeConfig, DdpConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch


class Holding(TinyTask):
    """Uses the model that it created, not the one that it receives."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(self.made(batch["x"]), batch["y"])


class Method(TinyTask):
    def model(self) -> nn.Module:
        made = super().model()
        made.of_batch = lambda batch: cross_entropy(made(batch["x"]), batch["y"])  # type: ignore[assignment]
        return made

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model.of_batch(batch)  # type: ignore[operator,no-any-return]


class Unused(TinyTask):
    def model(self) -> nn.Module:
        made = super().model()
        made.extra = nn.Linear(3, 3)
        return made


def ran(rank: int, size: int, config: Any, kind: type[TinyTask]) -> str:
    return run_tiny(rank, size, config, kind=kind).digest


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Holding, "Holding.loss"), (Method, "model.of_batch"), (Unused, "extra.weight, extra.bias")],
)
def test_models_and_losses_that_ddp_does_not_support_are_refused_by_all_ranks(
    workers: Group, tmp_path: Path, kind: type[TinyTask], named: str
) -> None:
    for end in workers.outcomes(3, ran, plain(tiny_config(tmp_path, "run")), kind):
        assert isinstance(end, Raised)
        assert end.name in ("ConfigError", "TaskError")
        assert named in end.text


@pytest.mark.parametrize("kind", [Holding, Method])
def test_losses_that_bypass_ddp_work_with_exact_and_with_one_worker(
    workers: Group, tmp_path: Path, kind: type[TinyTask]
) -> None:
    exact = plain(tiny_config(tmp_path, "exact", epochs=1, exact=True))
    assert len({*workers(3, ran, exact, kind)}) == 1
    workers(1, ran, plain(tiny_config(tmp_path, "alone", epochs=1)), kind)


class Drops(TinyTask):
    """Its model does not use some parameters in each step, on each rank."""

    def __init__(self, config: TrainConfig, first: int = 1) -> None:
        super().__init__(config)
        self.first = first  # the first step in which a parameter may be unused

    def model(self) -> nn.Module:
        made = super().model()
        made.extra = nn.Linear(24, 24)
        made.dropout.register_forward_hook(self.add)  # before the head
        return made

    def add(self, module: nn.Module, _: Any, features: Tensor) -> Tensor:
        return features + self.made.extra(features) if self.uses(module.training) else features

    def at(self) -> bool:
        """Whether it is this step or a later one."""
        assert self.membership is not None
        return self.membership.step >= self.first

    def uses(self, training: bool) -> bool:
        return not (training and self.at()) or bool(torch.rand(()) < 0.5)


class DropsOnOneRank(Drops):
    """So does a branch that depends on the data."""

    def uses(self, training: bool) -> bool:
        return not (training and self.at() and torch.distributed.get_rank() == 1)


class DropsOnAll(Drops):
    def uses(self, training: bool) -> bool:
        return not (training and self.at())


def dropped(
    rank: int, size: int, config: Any, kind: type[Drops], first: int, at: int = 0
) -> tuple[str, int]:
    result = run_tiny(rank, size, config, {"first": first}, kind=kind, stop_at=at)
    return result.digest, result.outcome.step


@pytest.mark.parametrize(
    ("kind", "first", "changes"),
    [
        (Drops, 0, {}),  # already in the warm-up
        (DropsOnOneRank, 1, {"micro_batch": 4}),
        (DropsOnOneRank, 5, {"micro_batch": 4, "ddp": DdpConfig(gradient_as_bucket_view=False)}),
        (DropsOnOneRank, 5, {"ddp": DdpConfig(compression="bf16", bucket_cap_mb=0.001)}),
        (DropsOnAll, 4, {"ddp": DdpConfig(static_graph=True)}),
        (DropsOnAll, 4, {"compute": ComputeConfig(precision="fp16")}),
    ],
)
def test_parameters_that_a_rank_does_not_use_in_a_step_are_named_at_once_by_all_ranks(
    workers: Group, tmp_path: Path, kind: type[Drops], first: int, changes: dict[str, Any]
) -> None:
    config = plain(tiny_config(tmp_path, "run", **changes))
    began = time.monotonic()
    ends = workers.outcomes(3, dropped, config, kind, first)
    assert time.monotonic() - began < 20, "no rank waits for another one until a time limit"
    assert {(end.name, end.exit_status) for end in ends} == {("ConfigError", 2)}
    (line,) = {end.text.strip().splitlines()[-1] for end in ends}
    assert "extra.weight" in line
    assert "--ddp.find-unused-parameters" in line
    assert not first or f"in step {first}" in line
    assert kind is not DropsOnOneRank or "rank 1" in line


@pytest.mark.parametrize("kind", [Drops, DropsOnOneRank])
def test_unused_parameters_may_vary_with_find_unused_parameters(
    workers: Group, tmp_path: Path, kind: type[Drops]
) -> None:
    ddp = DdpConfig(find_unused_parameters=True)
    config = tiny_config(tmp_path, "run", epochs=1, ddp=ddp)
    assert len({*workers(3, dropped, plain(config), kind, 1)}) == 1
    if kind is Drops:  # the other depends on the number of workers
        exact = [tiny_config(tmp_path, f"exact-{n}", epochs=1, exact=True, ddp=ddp) for n in "13"]
        ends = [workers(n, dropped, plain(c), kind, 0) for n, c in zip((1, 3), exact, strict=True)]
        assert len({end for each in ends for end in each}) == 1
