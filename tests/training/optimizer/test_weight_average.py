"""`--ema.decay`: the average of the weights, its bits after a restart, and what is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group
from tiny import (
    EVAL_ROWS,
    TinyNet,
    TinyTask,
    bits,
    decode_tensors,
    log_of,
    newest,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import CheckpointConfig, EmaConfig, EvalConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.optimizer.weight_average import WeightAverage, average_of

EMA = EmaConfig(decay=0.9)
NO, YES = torch.tensor(False), torch.tensor(True)


def trained(config: TrainConfig) -> dict[str, Tensor]:
    return decode_tensors(newest(config).read("trained.safetensors"))


def loss_with(weights: Mapping[str, Tensor]) -> float:
    """Of an evaluation of the tiny network with these weights."""
    model = TinyNet().eval()
    model.load_state_dict(dict(weights))
    arrays = {name: torch.from_numpy(array) for name, array in tiny_arrays(EVAL_ROWS, 1).items()}
    return cross_entropy(model(arrays["x"]), arrays["y"]).item()


def test_tied_weights_are_averaged_once_and_unstored_buffers_not_at_all():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    average = WeightAverage(model, EMA)
    assert [*average.values] == ["0.weight"]
    own = model[0].weight.detach().clone()
    average.values["0.weight"].fill_(7.0)
    with average.in_place():
        assert torch.equal(model[1].weight, torch.full((3, 3), 7.0))
    assert torch.equal(model[1].weight, own)
    assert {*average.state_dict()} == {"0.weight", "1.weight"}


def averages_and_weights(
    config: TrainConfig,
) -> list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """(average, weights) in the checkpoint of each step."""
    store = checkpoint_store(run_storage(config))
    opened = [store.open(name) for name in sorted(store.names())]
    return [
        (decode_tensors(c.read("model.safetensors")), decode_tensors(c.read("trained.safetensors")))
        for c in opened
    ]


def test_the_model_file_has_the_average_over_applied_steps_and_evaluations_use_it(
    workers: Group, tmp_path: Path
):
    """One step is refused. The loss of the evaluation is that of the model file."""
    often = CheckpointConfig(every_steps=1, every_s=0.0, keep_last=99)
    optim = OptimConfig(lr=0.05, nonfinite="skip")
    made = {"epochs": 1, "optim": optim, "checkpoint": often, "eval": EvalConfig(every_steps=5)}
    config = tiny_config(tmp_path, "averaged", ema=EMA, **made)
    ran = workers(3, run_tiny, plain(config), {"nan_row": 100})
    plainly = tiny_config(tmp_path, "plain", **made)
    workers(3, run_tiny, plain(plainly), {"nan_row": 100})
    for name, tensor in trained(config).items():  # the average does not change the training
        assert torch.equal(tensor, weights(plainly)[name])

    nonfinite = [r["nonfinite"] for r in log_of(config) if r["kind"] == "train"]
    refused = 1 + nonfinite.index(1)
    assert refused > 1
    steps = averages_and_weights(config)
    assert len(steps) == 10
    for step, (before, after) in enumerate(pairwise(steps), 2):
        decay = min(0.9, (1 + step) / (10 + step))
        for name, average in before[0].items():
            if step == refused:
                assert torch.equal(average, after[0][name])
            elif average.is_floating_point():
                expected = average.lerp(after[1][name], 1 - decay)
                torch.testing.assert_close(after[0][name], expected, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(after[0][name], after[1][name])

    evals = [record for record in log_of(config) if record["kind"] == "eval"]
    for record in evals:
        expected = loss_with(steps[record["step"] - 1][0])
        assert record["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert [record["step"] for record in evals] == [5, 10]
    assert len({worker.digest for worker in ran}) == 1


class ScheduleFree(torch.optim.Optimizer):
    """SGD as in the schedulefree package (arXiv:2405.15682): it trains y; x is to be used."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._swap(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._swap(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _swap(self, train: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else []:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train()"
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class ScheduleFreeTask(TinyTask):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters(), lr=0.05)


def test_with_a_schedule_free_optimizer_evaluated_weights_differ_from_trained_weights(
    workers: Group, tmp_path: Path
):
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    whole = tiny_config(tmp_path, "whole", epochs=2, checkpoint=often)
    ran = workers(3, run_tiny, plain(whole), None, 0, 0, None, ScheduleFreeTask)
    config = tiny_config(tmp_path, "disturbed", epochs=2, checkpoint=often)
    workers(3, run_tiny, plain(config), None, 10, 0, None, ScheduleFreeTask)
    *_, last = workers.outcomes(3, run_tiny, plain(config), None, 0, 15, None, ScheduleFreeTask)
    assert last == Died(9)
    workers(3, run_tiny, plain(config), None, 0, 0, None, ScheduleFreeTask)
    assert bits(config) == bits(whole)
    assert {*bits(whole)} == {f"{name}.safetensors" for name in ("model", "trained", "optimizer")}
    assert log_of(config) == log_of(whole)
    assert len({worker.digest for worker in ran}) == 1

    averaged = weights(whole)
    assert not torch.equal(averaged["head.weight"], trained(whole)["head.weight"])
    (*_, final) = [record for record in log_of(whole) if record["kind"] == "eval"]
    assert final["metrics"]["loss"] == pytest.approx(loss_with(averaged), rel=1e-5)


def test_two_averages_are_refused():
    model = TinyNet()
    with pytest.raises(ConfigError, match=r"ema\.decay.*ScheduleFree"):
        average_of(model, ScheduleFree(model.parameters(), lr=0.1), EMA)
    assert average_of(model, torch.optim.SGD(model.parameters()), EmaConfig()) is None
