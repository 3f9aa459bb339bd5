"""Features of users' models, optimizers, and branches that the built-in ones do not have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from raytrain_ddp import Data, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    EmaConfig,
    LogConfig,
    ScheduleConfig,
    StopConfig,
)
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.iterable_source import IterableSource
from raytrain_ddp.data.loading.sources import MapSource
from raytrain_ddp.errors import DataError
from raytrain_ddp.tasks.model_parts import evaluating, freeze, head_of
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.gradients.buffer_sync import SlotBuffers
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.optimizer.weight_average import WeightAverage
from raytrain_ddp.training.runtime.world import World

X = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Regression(Task):
    monitor, goal = "mse", "min"

    def __init__(self, config: TrainConfig, factor: float = 1.0, decay: float = 0.0) -> None:
        self._factor, self._decay = factor, decay

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def train_data(self) -> Data:
        return Data(ArraySource({"x": X.numpy(), "y": Y.numpy()}), _tensors)

    def eval_data(self) -> Data:
        return self.train_data()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mse_loss(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Any]:
        from torchmetrics import MeanSquaredError

        return {"mse": MeanSquaredError()}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        outputs = model(batch["x"]).contiguous()
        metrics["mse"].update(outputs * self._factor, batch["y"] * self._factor)


def _tensors(records: dict[str, Any], _: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(records[name]) for name in ("x", "y")}


def config(folder: Path, name: str, task: Any = Regression, **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "batch_size": 16,
        "micro_batch": 8,
        "optim": OptimConfig(lr=0.01, momentum=0.0, nesterov=False, weight_decay=0.0),
        "schedule": ScheduleConfig(name="constant", warmup_epochs=0.0),
        "checkpoint": CheckpointConfig(every_s=0.0),
        "log": LogConfig(tensorboard=False),
    }
    return TrainConfig(name=name, storage=str(folder), task=task, **{**usual, **changes})


class Adapted(nn.Linear):
    """A linear layer with an adapter that `train` merges into its weights for evaluations, like
    loralib's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (self.b.data @ self.a.data) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.a.T @ self.b.T


def test_an_adapter_is_merged_for_evaluations_only():
    model = nn.Sequential(Adapted(5, 8), nn.ReLU(), Adapted(8, 1))
    model[1].eval()
    with evaluating(model):
        assert all(part.merged for part in (model[0], model[2]))
    assert not any(part.merged for part in (model[0], model[2]))
    assert [part.training for part in model.modules()] == [True, True, False, True]


# ------------------------------------------------------------------ branches


class Optioned(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=self._decay, fused=True)


def test_a_branch_uses_the_new_options_of_the_tasks_optimizer(tmp_path: Path):
    fit_locally(config(tmp_path, "base", Optioned, epochs=1))
    options = {"task_options": {"decay": "5"}}
    changed = config(tmp_path, "branch", Optioned, epochs=2, **options)
    fit_locally(changed, resume_from=tmp_path / "base", allow_change=["task_options"])
    (state,) = (tmp_path / "branch/checkpoints").glob("step-00000010-*/state.json")
    assert '["weight_decay", 5.0]' in state.read_text()
    assert '["betas", {"tuple": [0.9, 0.999]}]' in state.read_text()


def test_evaluations_of_the_origin_do_not_count_toward_the_patience_of_a_branch(tmp_path: Path):
    """The metric of the branch is a hundred times as large, so never better than the origin's."""
    fit_locally(config(tmp_path, "base", epochs=2))
    scaled = {"task_options": {"factor": "10"}, "stop": StopConfig(patience=2)}
    changed = config(tmp_path, "branch", epochs=8, **scaled)
    result = fit_locally(changed, resume_from=tmp_path / "base", allow_change=["task_options"])
    assert result.step == 8 * 5
    assert result.best["step"] > 10
    ended = config(tmp_path, "ended", epochs=8, max_time="0.001s")
    assert fit_locally(ended).step < 8 * 5
    longer = config(tmp_path, "longer", epochs=8)
    assert fit_locally(longer, resume_from=tmp_path / "ended").step == 8 * 5


# ------------------------------------------------------------------ models


class HeadFirst(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(8, classes)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())


def test_a_head_registered_before_the_backbone_is_recognized():
    model = HeadFirst()
    assert head_of(model) == ["head.weight", "head.bias"]
    freeze(model, ["backbone"])
    assert [n for n, p in model.named_parameters() if p.requires_grad] == head_of(model)


def test_a_mask_with_inf_is_not_averaged():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
    model.register_buffer("running", torch.zeros(3))
    average = WeightAverage(model, EmaConfig(decay=0.5, warmup=False))
    model.running += 1  # type: ignore[operator]
    average.follow(torch.tensor(False), 1)
    assert torch.equal(average.values["mask"], model.mask)  # type: ignore[arg-type]
    assert torch.equal(average.values["running"], torch.full((3,), 0.5))


def test_the_step_schedule_drops_exactly_at_the_first_step_of_a_period():
    for tenths in (1, 7, 14, 33, 99):
        schedule = ScheduleConfig(
            name="step", step_epochs=tenths / 10, gamma=0.1, warmup_epochs=0.0
        )
        made = TrainConfig(optim=OptimConfig(lr=1.0), schedule=schedule)
        for step in range(200):
            periods = int(step / (Fraction(tenths, 10) * 50))
            assert learning_rate(made, step, 50) == pytest.approx(0.1**periods)


# ------------------------------------------------------------------ losses and modules


class InputGradient(nn.Module):
    """Computes gradients in evaluations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = x.clone().requires_grad_() * 1
            (slope,) = torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)
        return self.net(x) + 0 * slope.sum()


class LearnedQueries(nn.Module):
    """The input of a module is a learned parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.embed = nn.Parameter(torch.zeros(2, 8)), nn.Linear(1, 8)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        return self.out(self.decoder(queries, self.embed(x[..., None])).mean(1))


MODELS: dict[str, Any] = {
    "scored": InputGradient,
    "queried": LearnedQueries,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)),
}


class Modelled(Regression):
    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config)
        self._kind = kind

    def model(self) -> nn.Module:
        made: nn.Module = MODELS[self._kind]()
        return made


@pytest.mark.parametrize("kind", MODELS)
def test_unusual_models_train_with_the_default_settings(kind: str, tmp_path: Path):
    made = config(tmp_path, "run", Modelled, epochs=2, task_options={"kind": kind})
    result = fit_locally(made)
    losses = [r["metrics"]["mse"] for r in result.history if r["kind"] == "eval"]
    assert losses[1] < losses[0]


class Observed(nn.Module):
    """An observer, as in quantization-aware training: the range of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("unused", torch.tensor([math.inf, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low = torch.minimum(self.low, x.detach().min())
        return self.net(x)


class Observing(Regression):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Observed()


def test_an_observed_range_that_starts_at_inf_is_resumed_with_the_same_bits(tmp_path: Path):
    states = {}
    for name, epochs in (("whole", (2,)), ("resumed", (1, 2))):
        for count in epochs:
            made = config(tmp_path, name, Observing, epochs=count, ema=EmaConfig(decay=0.9))
            fit_locally(made)
        (folder,) = (tmp_path / name / "checkpoints").glob("step-00000010-*")
        states[name] = [load_file(each) for each in sorted(folder.glob("*.safetensors"))]
    assert len(states["whole"]) > 1
    for whole, resumed in zip(states["whole"], states["resumed"], strict=True):
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert -4 < states["whole"][0]["low"] < -1
    assert states["whole"][0]["unused"].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("exact_slots", [0, 4])
def test_a_nonfinite_buffer_gets_the_mean_once_all_slots_are_finite(exact_slots: int):
    model = Observed()
    alone = World(0, 1, 0, torch.device("cpu"), threads=1)
    buffers = SlotBuffers(model, alone, exact_slots=exact_slots, with_loss=True)

    def low_after(*lows: float, weights: Sequence[float] = (0.25,) * 4) -> float:
        buffers.begin()
        for slot, (low, weight) in enumerate(zip(lows, weights, strict=True)):
            buffers.rewind()
            model.low = torch.tensor(float(low))
            buffers.add(slot, weight, torch.ones(()))
        buffers.finish(~buffers.agree()[1].isfinite())
        return model.low.item()

    last_is_skipped = (0.5, 0.25, 0.25, 0.0)
    assert low_after(1, 2, math.inf, 3) == math.inf  # one slot has not set it
    assert low_after(1, 2, 3, 5, weights=last_is_skipped) == math.inf
    assert low_after(1, 2, 3, 6) == 3
    assert low_after(1, 2, 3, 9, weights=last_is_skipped) == 1.75
    assert low_after(1, 2, math.inf, 3) == 1.75  # refused


# ------------------------------------------------------------------ data


def test_array_source_accepts_data_frames_tensors_and_lists():
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 2]}).sample(frac=1, random_state=0)
    columns = {name: frame[name] for name in ("x", "y")}
    lists = {"x": torch.tensor(frame["x"].tolist()), "y": frame["y"].tolist()}
    for arrays in (frame, columns, lists):
        records = ArraySource(arrays).read(np.array([2, 0]))
        assert records["y"].tolist() == frame["y"].iloc[[2, 0]].tolist()
        assert records["x"].tolist() == frame["x"].iloc[[2, 0]].tolist()


def test_a_wrong_source_is_refused_with_the_right_one():
    rows = TensorDataset(torch.zeros(4, 1))
    with pytest.raises(DataError, match="by name"):
        ArraySource(np.zeros(3))  # type: ignore[arg-type]
    for kind in (MapSource, IterableSource):
        for given, remedy in (
            (DataLoader(rows), "loader.dataset"),
            (pd.DataFrame({"x": [1]}), "ArraySource"),
            (type("DatasetDict", (dict,), {})(), "choose one"),
        ):
            with pytest.raises(DataError, match=remedy):
                kind(given)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="IterableSource"):
        MapSource(number for number in range(3))  # type: ignore[arg-type]
