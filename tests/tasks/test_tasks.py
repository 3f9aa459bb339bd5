"""Invalid return values, missing methods, and unused ones of a task are named before the first
step; what the first check and evaluations leave as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torchmetrics as tm
from processes import Group, Raised
from tiny import TinyNet, TinyTask, bits, kept_steps, plain, run_tiny, tiny_arrays, tiny_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from raytrain_ddp import ArraySource, Data, Task, TrainConfig, fit_locally
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.errors import ConfigError, RaytrainError, TaskError
from raytrain_ddp.tasks.task_loading import load_task, task_of


def own(**methods: Any) -> type[TinyTask]:
    """A task class with other methods or attributes."""
    for name, method in methods.items():
        if isinstance(method, FunctionType):
            method.__qualname__ = f"Mine.{name}"
    return type("Mine", (TinyTask,), {"__module__": __name__, **methods})


def loss(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    def changed(self: TinyTask, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return change(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))

    return {"loss": changed}


def metrics(make: Callable[[], Any]) -> dict[str, Any]:
    return {"metrics": lambda self: make()}


class Forgetful(tm.Metric):
    """Computes from an attribute that is not a state."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")
        self.total = torch.zeros(())

    def update(self, values: Tensor) -> None:
        self.count += len(values)
        self.total += values.sum()

    def reset(self) -> None:
        super().reset()
        self.total = torch.zeros(())

    def compute(self) -> Tensor:
        return self.total + self.count


class NoSource:
    rows = 3


def wrapped() -> Any:
    return {"loss": tm.MeanMetric(), "top1": tm.wrappers.Running(tm.MeanMetric())}


def mean(**others: Any) -> Callable[[], Any]:
    return lambda: {"loss": tm.MeanMetric(), "top1": tm.MeanMetric(), **others}


SET = TensorDataset(torch.zeros(8, 1, 4, 4), torch.zeros(8))
EMPTY = Data(ArraySource({"x": tiny_arrays(1, 0)["x"][:0]}), lambda r, _: r)
# Methods, what the message names besides the last of them, the exit status.
WRONG: list[tuple[dict[str, Any], str, int]] = [
    (loss(lambda x: x.expand(3)), "(3,)", 1),
    (loss(lambda x: None), "None", 1),
    (loss(lambda x: x.detach()), "gradient", 1),
    ({"optimizer": lambda self, model: torch.optim.LBFGS(model.parameters())}, "LBFGS", 1),
    ({"schedule": lambda self, step: float("nan")}, "nan", 1),
    ({"model": lambda self: TinyNet().requires_grad_(False)}, "frozen", 1),
    ({"model": lambda self: TinyNet}, "TinyNet()", 1),
    ({"model": lambda self: None}, "None", 1),
    ({"train_data": lambda self: [1, 2]}, "MapSource(dataset)", 1),
    ({"train_data": lambda self: DataLoader(SET)}, "MapSource(loader.dataset)", 1),
    ({"eval_data": lambda self: [1, 2]}, "MapSource(dataset)", 1),
    ({"eval_data": lambda self: Data(NoSource(), id)}, "NoSource", 1),  # type: ignore[arg-type]
    ({"train_data": lambda self: EMPTY}, "training set", 4),
    (metrics(dict), "eval_data()", 1),
    (metrics(mean(loss=tm.MeanMetric)), "'loss'", 1),
    ({"evaluate": lambda self, model, batch, metrics: {"top1": 0.5}}, "dict", 1),
    ({**metrics(mean()), "evaluate": lambda self, *_: None}, "'loss'", 1),
    (metrics(wrapped), "'top1'", 1),
    (metrics(mean(loss=Forgetful())), "'loss'", 1),
    ({"monitor": "lost"}, "'lost'", 1),
    (metrics(mean(loss=tm.CatMetric())), "(8,)", 1),
]


@pytest.mark.parametrize(("methods", "named", "status"), WRONG)
def test_an_invalid_return_value_is_named_with_its_place_before_the_first_step(
    methods: dict[str, Any], named: str, status: int, tmp_path: Path
):
    with pytest.raises(RaytrainError) as raised:
        dry_run(tiny_config(tmp_path, "wrong", task=own(**methods)))
    assert raised.value.exit_status == status
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    if status == 1:
        assert isinstance(raised.value, TaskError)
        name, method = [*methods.items()][-1]
        assert name in str(raised.value)
        if callable(method):  # the user's own place comes first
            assert str(raised.value).startswith(f"{__file__}:")


class NoSuchMonitor(TinyTask):
    monitor = "accuracy"


# ------------------------------------------------------------------ no side effects


class Drawing(TinyTask):
    """Its evaluation draws from the global generators and changes buffers of the model."""

    def evaluate(self, model: nn.Module, batch: Any, metrics: Mapping[str, Any]) -> None:
        torch.rand(3)
        model.norm.running_mean += 1
        super().evaluate(model, batch, metrics)


def test_evaluations_and_their_rehearsal_do_not_change_the_bits_and_a_resumed_run_has_one(
    workers: Group, tmp_path: Path
):
    """On three ranks, stopped and resumed."""
    found = []
    for kind in (TinyTask, Drawing):
        config = tiny_config(tmp_path, kind.__name__, epochs=1)
        for stop in (7, 0):
            ran = workers(3, run_tiny, plain(config), None, stop, 0, None, kind)
            phases = [event["name"] for event in ran[0].events if event["kind"] == "phase"]
            assert ("rehearsing two steps" in phases) == (stop == 7)
        found.append((bits(config), ran[0].digest))
    assert found[0] == found[1]
    longer = tiny_config(tmp_path, "Drawing", epochs=2)
    ended = workers.outcomes(3, run_tiny, plain(longer), None, 0, 0, None, NoSuchMonitor)
    assert all(isinstance(outcome, Raised) and outcome.exit_status == 1 for outcome in ended)
    assert len({outcome.text.rpartition("TaskError: ")[2] for outcome in ended}) == 1
    assert kept_steps(longer) == [7, 10]


def test_what_is_odd_but_possible_is_noted(tmp_path: Path):
    task = own(**metrics(mean(extra=tm.MeanMetric())), model=lambda self: TinyNet().eval())
    config = tiny_config(tmp_path, "noted", task=task, epochs=1, limit_train_batches=1)
    fit_locally(config)
    noted = (tmp_path / "noted" / "events.jsonl").read_text()
    assert "'extra'" in noted  # never updated
    assert "evaluation mode" in noted


# ------------------------------------------------------------------ the class


class Bare(Task):
    """The minimal task."""

    def model(self) -> nn.Module:
        return TinyNet()

    def train_data(self) -> Data:
        return TinyTask(TrainConfig()).train_data()

    def eval_data(self) -> Data | None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Any]:
        return {}

    def evaluate(self, model: nn.Module, batch: Any, metrics: Any) -> None: ...


class Lacking(Task):
    def model(self) -> nn.Module:
        return TinyNet()

    def train_datas(self) -> None: ...


class Late(Bare):
    def __init__(self, config: TrainConfig) -> None:
        self.moniter = "top1"


def with_method(name: str, method: Any = lambda self, *_: None) -> type:
    return type("Mine", (Bare,), {"__module__": __name__, name: method})


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Lacking, "train_data() eval_data() loss() evaluate() 'train_datas'"),
        (with_method("evaluate", lambda self, model, batch: None), "Mine.evaluate batch, metrics)"),
        (type("NotCallable", (Bare,), {"metrics": {"loss": 1}}), "NotCallable.metrics callable"),
        (with_method("__init__", lambda self: None), "Mine config"),
        (Late, "Late.moniter 'monitor'"),
        (int, "int"),
        (type("NoLoss", (Bare,), {"loss": None}), "NoLoss loss()"),
        (with_method("configure_optimizers"), "Mine.configure_optimizers optimizer(model)"),
        (with_method("on_train_epoch_end"), "Mine.on_train_epoch_end"),
        (with_method("metric"), "Mine.metric 'metrics'"),
    ],
)
def test_a_class_that_is_not_a_task_or_has_what_nothing_uses_is_refused(kind: Any, named: str):
    with pytest.raises(TaskError) as raised:
        load_task(TrainConfig(task=kind))
    assert [word for word in named.split() if word not in str(raised.value)] == []


class Helped(Bare):
    widths = (3, 4)

    def __init__(self, config: TrainConfig) -> None:
        self.batch_size = config.batch_size

    def plot(self) -> None: ...


def test_helper_methods_are_accepted_and_no_constructor_is_needed():
    for kind in (Helped, Bare, lambda config: Bare()):
        assert isinstance(load_task(TrainConfig(task=kind)), Bare)


class Optioned(Bare):
    def __init__(
        self, config: TrainConfig, rows: str, noise: float = 1.0, depth: int = 2, flip: bool = False
    ) -> None:
        self.unit = str((rows, noise, depth, flip))


class Needing(Bare):
    def __init__(self, config: TrainConfig, rows: str) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (Optioned, {"rowz": "5"}, "'rowz' 'rows'"),
        (Optioned, {"noise": "5"}, "'rows'"),
        (Optioned, {"rows": "5", "noise": "x"}, "noise 'x'"),
        (Optioned, {"rows": "5", "flip": "1"}, "flip '1'"),
        (Bare(), {"rows": "5"}, "task_options"),
        (Needing, {}, "required argument: 'rows'. Its options: rows."),  # without a guess
    ],
)
def test_task_options_that_a_task_does_not_have_are_refused(
    kind: Any, options: dict[str, str], named: str
):
    with pytest.raises(ConfigError) as raised:
        task_of(TrainConfig(task=kind, task_options=options))
    assert [word for word in named.split() if word not in str(raised.value)] == []


def test_task_options_are_passed_with_the_types_of_the_constructor():
    given = {"rows": "5", "noise": "0.5", "depth": "3", "flip": "true"}
    task = load_task(TrainConfig(task=Optioned, task_options=given))
    assert task.unit == str(("5", 0.5, 3, True))


# ------------------------------------------------------------------ evaluation mode


class Backbone(nn.Module):
    """`rest` is put in evaluation mode, and `kept` is by its own `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.kept, self.norm = (nn.BatchNorm2d(1) for _ in range(3))
        self.rest.eval()
        self.head = nn.Linear(16, 5)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.kept.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert not self.rest.training | self.kept.training
        logits: Tensor = self.head(self.norm(self.kept(self.rest(x))).flatten(1))
        return logits


def train_resting(rank: int, size: int, config: Mapping[str, Any]) -> dict[str, Any]:
    model = Backbone()
    run_tiny(rank, size, config, {"rows": 35}, kind=own(made=model, model=lambda self: model))
    return {name: each.sum().item() for name, each in model.named_buffers()}


def test_modules_put_in_evaluation_mode_stay_in_it(workers: Group, tmp_path: Path):
    """In training, after evaluations, and in a slot without samples, which the last step has."""
    config = tiny_config(tmp_path, "resting", epochs=2, exact=True)
    for found in workers(3, train_resting, plain(config)):
        for name in ("rest", "kept"):  # unchanged
            assert found[f"{name}.running_mean"] == found[f"{name}.num_batches_tracked"] == 0
        assert found["norm.num_batches_tracked"] == 4
