"""Features of users' models, optimizers, and branches that the built-in ones do not have."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from raytrain_ddp import Data, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.config.effects import step_notes
from raytrain_ddp.config.input_sections import DataConfig
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
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.errors import ConfigError, DataError, TaskError
from raytrain_ddp.events import Train
from raytrain_ddp.tasks.model_parts import evaluating, freeze, head_of
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import model_of, require_dense
from raytrain_ddp.training.gradients.buffer_sync import SlotBuffers
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.optimizer.param_groups import decayed_parameters
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of, replaced_fields
from raytrain_ddp.training.optimizer.weight_average import WeightAverage
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.early_stop import seconds_trained

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


class Adapting(Regression):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Adapted(5, 8), nn.ReLU(), Adapted(8, 1))


def test_an_adapter_that_is_merged_for_evaluations_is_trained(tmp_path: Path):
    model = Adapting(None).model()  # type: ignore[arg-type]
    model[1].eval()  # type: ignore[operator]
    with evaluating(model):
        assert all(part.merged for part in (model[0], model[2]))  # type: ignore[index]
    assert not any(part.merged for part in (model[0], model[2]))  # type: ignore[index]
    assert [part.training for part in model.modules()] == [True, True, False, True]
    result = fit_locally(config(tmp_path, "lora", Adapting, epochs=3))
    losses = [r["metrics"]["mse"] for r in result.history if r["kind"] == "eval"]
    assert losses[-1] < 0.95 * losses[0]
    (trained,) = (tmp_path / "lora/checkpoints").glob("step-00000015-*/model.safetensors")
    assert load_file(trained)["0.b"].abs().max() > 0.01


class Counting(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        from timm.optim import Adan

        return Adan(model.parameters(), lr=0.01)


def test_a_trial_step_does_not_change_the_step_counter_of_an_optimizer():
    model = nn.Linear(3, 1)
    made = optimizer_of(Counting(TrainConfig()), model, TrainConfig())
    assert "step" not in made.param_groups[0]
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    assert made.param_groups[0]["step"] == 1


class Grouped(Regression):
    def optimizer(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}]


def test_fields_for_groups_are_reported_as_replaced_if_the_task_returns_groups():
    task, own = Grouped(TrainConfig()), nn.Linear(3, 1)
    made = optimizer_of(task, own, TrainConfig())
    assert {"optim.head_lr", "optim.groups", "optim.layer_decay"} <= {
        *replaced_fields(task, made, TrainConfig())
    }


# ------------------------------------------------------------------ branches


class Optioned(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=self._decay, fused=True)


def test_a_branch_uses_the_new_options_of_the_tasks_optimizer(tmp_path: Path):
    fit_locally(config(tmp_path, "base", Optioned, epochs=1))
    options = {"task_options": {"decay": "5"}}
    changed = config(tmp_path, "branch", Optioned, epochs=2, **options)
    fit_locally(changed, resume_from=tmp_path / "base")
    (state,) = (tmp_path / "branch/checkpoints").glob("step-00000010-*/state.json")
    assert '["weight_decay", 5.0]' in state.read_text()
    assert '["betas", {"tuple": [0.9, 0.999]}]' in state.read_text()


def test_a_resumed_run_reports_optimizer_options_kept_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fit_locally(config(tmp_path, "run", Optioned, epochs=1))
    text = io.StringIO()
    display = Display(Console(file=text, width=300), live=False)

    def edited(_: Task, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, fused=True)

    monkeypatch.setattr(Optioned, "optimizer", edited)
    fit_locally(config(tmp_path, "run", Optioned, epochs=2), display=display)
    assert (
        "continues with weight_decay = 0.0 (now 0.5), as the checkpoint has it" in text.getvalue()
    )


def test_evaluations_of_the_origin_do_not_count_toward_the_patience_of_a_branch(tmp_path: Path):
    """The metric of the branch is a hundred times as large, so never better than the origin's."""
    fit_locally(config(tmp_path, "base", epochs=2))
    scaled = {"task_options": {"factor": "10"}, "stop": StopConfig(patience=2)}
    changed = config(tmp_path, "branch", epochs=8, **scaled)
    result = fit_locally(changed, resume_from=tmp_path / "base")
    assert result.step == 8 * 5
    assert result.best["step"] > 10
    ended = config(tmp_path, "ended", epochs=8, max_time="0.001s")
    assert fit_locally(ended).step < 8 * 5
    longer = config(tmp_path, "longer", epochs=8)
    assert fit_locally(longer, resume_from=tmp_path / "ended").step == 8 * 5


def test_the_trained_time_is_right_for_log_lines_of_any_length():
    log = [Train(step=n, seconds=0.5 + n / 100, seconds_total=0.5 * n) for n in range(1, 5)]
    assert seconds_trained(log) == 2.0
    assert seconds_trained([Train(step=1, seconds=3.0), *log]) == 2.0


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


def test_weight_decay_depends_on_the_kind_of_module():
    parts: dict[str, nn.Module] = {
        "norm": nn.LayerNorm([4, 6, 6]),
        "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "lstm": nn.LSTM(3, 3),
        "linear": nn.Linear(3, 3),
    }
    model = nn.ModuleDict(parts)

    def decayed(**fields: bool) -> set[str]:
        return decayed_parameters(model, OptimConfig(**fields))

    every = {name for name, _ in model.named_parameters()}
    biases = {name for name in every if "bias" in name}
    assert decayed() == every - biases - {"norm.weight"}
    assert decayed(decay_norms=True, decay_bias=True) == every
    assert decayed(decay_norms=True) == every - biases


def test_the_step_schedule_drops_exactly_at_the_first_step_of_a_period():
    for tenths in range(1, 100):
        schedule = ScheduleConfig(
            name="step", step_epochs=tenths / 10, gamma=0.1, warmup_epochs=0.0
        )
        made = TrainConfig(optim=OptimConfig(lr=1.0), schedule=schedule)
        for step in range(200):
            periods = int(step / (Fraction(tenths, 10) * 50))
            assert learning_rate(made, step, 50) == pytest.approx(0.1**periods)


def test_settings_in_epochs_that_steps_do_not_reach_are_noted():
    made = TrainConfig(
        steps=10,
        schedule=ScheduleConfig(warmup_epochs=1.0),
        data=DataConfig(source="x", image_size=64, start_size=32, grow_epochs=5),
    )
    notes = step_notes(made, 23)
    fields = ("schedule.warmup_epochs", "data.grow_epochs")
    assert [note.split(" = ")[0] for note in notes] == [*fields]
    assert "10 are 0.435 epochs" in notes[0]
    assert step_notes(TrainConfig(steps=460), 23) == []
    assert step_notes(TrainConfig(), 23) == []


# ------------------------------------------------------------------ losses and modules


class PhysicsInformed(Regression):
    """A physics-informed loss: the gradient of the outputs with respect to the inputs."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return (slope.sum(1) - outputs[:, 0]).square().mean()


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
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 1)),
    "script": lambda: torch.jit.script(nn.Linear(5, 1)),
}


class Modelled(Regression):
    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config)
        self._kind = kind

    def model(self) -> nn.Module:
        made: nn.Module = MODELS[self._kind]()
        return made


def test_a_loss_may_compute_gradients(tmp_path: Path):
    assert fit_locally(config(tmp_path, "informed", PhysicsInformed, epochs=1)).step == 5


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("kind", MODELS)
def test_unusual_models_train_with_the_default_settings(kind: str, tmp_path: Path):
    made = config(tmp_path, "run", Modelled, epochs=2, task_options={"kind": kind})
    result = fit_locally(made)
    losses = [r["metrics"]["mse"] for r in result.history if r["kind"] == "eval"]
    assert losses[1] < losses[0]


class Queue(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(5, 1), nn.BatchNorm1d(5)
        self.register_buffer("queue", torch.zeros(size, 5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue = x.detach()[: max(1, len(self.queue))]
        return self.net(self.norm(x))


class Queued(Regression):
    size = 8

    def model(self) -> nn.Module:
        return Queue(self.size)


class Growing(Queued):
    size = 0


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
    for name, epochs in (("whole", (3,)), ("resumed", (1, 3))):
        for count in epochs:
            made = config(tmp_path, name, Observing, epochs=count, ema=EmaConfig(decay=0.9))
            fit_locally(made)
        (folder,) = (tmp_path / name / "checkpoints").glob("step-00000015-*")
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


def test_buffers_that_should_perhaps_not_be_averaged_are_named(tmp_path: Path):
    text = io.StringIO()
    display = Display(Console(file=text, width=300), live=False)
    fit_locally(config(tmp_path, "queue", Queued, epochs=1), display=display)
    assert "forward passes change the buffers queue: each step" in text.getvalue()
    with pytest.raises(ConfigError, match="buffer queue changes its size in a forward pass"):
        fit_locally(config(tmp_path, "growing", Growing, epochs=1))


class Undefined(Regression):
    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        metrics["mse"].update(torch.tensor([math.nan]), torch.ones(1))


class Compiled(Regression):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return torch.compile(super().model(), backend="eager")  # type: ignore[return-value]


@pytest.mark.filterwarnings("error:Using `torch.compile")
def test_a_model_compiled_by_the_task_trains_and_its_parameter_names_are_noted(tmp_path: Path):
    text = io.StringIO()
    display = Display(Console(file=text, width=300), live=False)
    result = fit_locally(config(tmp_path, "run", Compiled, epochs=1), display=display)
    assert "names in checkpoints contain _orig_mod. (_orig_mod.0.weight)" in text.getvalue()
    plainly = fit_locally(config(tmp_path, "plain", epochs=1))
    assert result.last["mse"] == pytest.approx(plainly.last["mse"])


def test_a_monitored_metric_that_is_nan_is_noted(tmp_path: Path):
    text = io.StringIO()
    display = Display(Console(file=text, width=300), live=False)
    fit_locally(config(tmp_path, "nan", Undefined, epochs=1), display=display)
    assert "mse is not a number after step 5: this checkpoint cannot be the best" in text.getvalue()


def test_lazy_layers_and_sparse_gradients_are_refused():
    task = Regression(TrainConfig())
    task.model = lambda: nn.Sequential(nn.LazyLinear(1))  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"without lazy layers. 0 has no weights yet"):
        model_of(task)
    with pytest.raises(TaskError, match=r"dense gradients. Embedding has sparse gradients"):
        require_dense(task, nn.Embedding(3, 1, sparse=True))


# ------------------------------------------------------------------ data


def test_array_source_accepts_data_frames_and_their_columns():
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 2]}).sample(frac=1, random_state=0)
    for arrays in (frame, {"x": frame["x"], "y": frame["y"]}):
        records = ArraySource(arrays).read(np.arange(3))
        assert records["y"].tolist() == frame["y"].tolist()
        assert records["x"].tolist() == frame["x"].tolist()
    with pytest.raises(DataError, match=r"ArraySource\(ndarray\): give arrays by name"):
        ArraySource(np.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MapSource, IterableSource])
def test_data_loaders_data_frames_and_dicts_of_splits_are_refused_with_a_remedy(kind: Any):
    rows = TensorDataset(torch.zeros(4, 1))
    for given, message in (
        (DataLoader(rows), r"DataLoader makes batches: pass its data set \(loader.dataset\)"),
        (pd.DataFrame({"x": [1]}), r"DataFrame: use ArraySource\(frame\)"),
        (type("DatasetDict", (dict,), {})(), "several splits: choose one"),
    ):
        with pytest.raises(DataError, match=message):
            kind(given)
