"""Invalid return values, missing methods, and unused ones of a task are named before the first
step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, Raised
from tiny import TinyNet, TinyTask, bits, kept_steps, plain, run_tiny, tiny_arrays, tiny_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from raytrain_ddp import ArraySource, Data, Task, TrainConfig, fit_locally
from raytrain_ddp.config.sections import CheckpointConfig
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.errors import ConfigError, DataError, RaytrainError, TaskError
from raytrain_ddp.tasks.task_loading import load_task, task_of
from raytrain_ddp.training import prepare as preparing

HERE = Path(__file__).name


def own(**methods: Any) -> type[TinyTask]:
    """A task class with other methods or attributes."""
    return type("Mine", (TinyTask,), {"__module__": __name__, **methods})


def loss_of(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def loss(self: TinyTask, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return change(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))

    return loss


def frozen(self: TinyTask) -> nn.Module:
    return TinyNet().requires_grad_(False)


def metrics_of(make: Callable[[], Any]) -> Callable[..., Any]:
    def metrics(self: TinyTask) -> Any:
        return make()

    return metrics


def returns(value: Any) -> Callable[..., Any]:
    def given(self: TinyTask) -> Any:
        return value

    return given


def _torchmetrics() -> Any:
    import torchmetrics

    return torchmetrics


class _NoMerge:
    """A legacy metric whose states cannot be merged."""

    metric_state: Mapping[str, Tensor] = {}

    def to(self, _: object) -> None: ...
    def reset(self) -> None: ...
    def update(self, _: Tensor) -> None: ...
    def compute(self) -> Tensor:
        return torch.zeros(())


def forgetful() -> Any:
    """A metric that computes from attributes that are not states."""

    class Forgetful(_torchmetrics().Metric):  # type: ignore[misc]
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

    return {"loss": Forgetful(), "top1": _torchmetrics().MeanMetric()}


def _wrapped() -> Any:
    tm = _torchmetrics()
    inner = tm.classification.MulticlassAccuracy(5, average=None)
    return {"loss": tm.MeanMetric(), "top1": tm.wrappers.ClasswiseWrapper(inner)}


@dataclass
class NoSource:
    rows: int = 3


SET = TensorDataset(torch.zeros(8, 1, 4, 4), torch.zeros(8))
EMPTY = Data(ArraySource({"x": tiny_arrays(1, 0)["x"][:0]}), lambda r, _: r)

# The mistake, its method, the expected message, the exit status.
WRONG: list[tuple[str, dict[str, Any], str, int]] = [
    ("float", {"loss": loss_of(lambda x: x.item())}, "in .*loss: returned a float, 1", 1),
    ("vector", {"loss": loss_of(lambda x: x.expand(3))}, r"shape \(3,\), float32.*mean over", 1),
    ("dict", {"loss": loss_of(lambda x: {"loss": x})}, "a dict.*Return the loss, or", 1),
    ("tuple", {"loss": loss_of(lambda x: (x, 1))}, "a tuple.*Return the loss, or", 1),
    (
        "optimizer",
        {"optimizer": lambda self, model: torch.optim.LBFGS(model.parameters())},
        "the LBFGS needs a closure",
        1,
    ),
    ("schedule", {"schedule": lambda self, step: float("nan")}, "returned nan for step 0", 1),
    ("none", {"loss": loss_of(lambda x: None)}, "returned None; expected a floating", 1),
    ("detached", {"loss": loss_of(lambda x: x.detach())}, "depends on the model.*detached", 1),
    ("integer", {"loss": loss_of(lambda x: x.detach().long())}, r"shape \(\), int64", 1),
    ("bool", {"loss": loss_of(lambda x: x > 0)}, r"shape \(\), bool", 1),
    ("frozen", {"model": frozen}, "in frozen: .*All parameters are frozen", 1),
    ("no model", {"model": returns(None)}, "returned None; expected a torch.nn.Module", 1),
    ("class", {"model": returns(TinyNet)}, r"the class TinyNet; .* Return TinyNet\(\)", 1),
    ("empty model", {"model": returns(nn.Identity())}, "at least one parameter", 1),
    ("no data", {"train_data": returns(None)}, "returned None; expected a raytrain_ddp.Data", 1),
    ("dataset", {"train_data": returns(SET)}, r"TensorDataset; .*Data\(MapSource\(dataset\)", 1),
    ("loader", {"train_data": returns(DataLoader(SET))}, r"MapSource\(loader.dataset\)", 1),
    ("list", {"eval_data": returns([1, 2])}, r"a list of 2 items; .*MapSource\(dataset\)", 1),
    ("number", {"eval_data": returns(5)}, "an int, 5; expected a raytrain_ddp.Data", 1),
    ("no source", {"eval_data": returns(Data(NoSource(), id))}, "NoSource has no blocks and", 1),
    ("0 rows", {"train_data": returns(EMPTY)}, "the training set has 0 rows", 4),
    ("0 to evaluate", {"eval_data": returns(EMPTY)}, "the evaluation set has 0 rows", 4),
    (
        "no metrics",
        {"metrics": returns({})},
        "a dict of 0 items.*return None in eval_data",
        1,
    ),
    ("metrics none", {"metrics": returns(None)}, "returned None; expected a dict of", 1),
    (
        "metric",
        {"metrics": returns({"loss": 3, "top1": 4})},
        "of class int, which has no r",
        1,
    ),
    (
        "metric class",
        {"metrics": metrics_of(lambda: {"loss": _torchmetrics().MeanMetric})},
        "'loss' is a class: create an instance",
        1,
    ),
    (
        "no merge",
        {"metrics": metrics_of(lambda: {"loss": _NoMerge(), "top1": _NoMerge()})},
        r"_NoMerge, which has no merge_state\(\)",
        1,
    ),
    (
        "evaluate returns",
        {"evaluate": lambda self, model, batch, metrics: {"top1": 0.5}},
        "returned a dict of .*; expected None. It must update the metrics",
        1,
    ),
    (
        "evaluate does nothing",
        {
            "evaluate": lambda self, model, batch, metrics: None,
            "metrics": metrics_of(lambda: {"loss": _torchmetrics().MeanMetric()}),
        },
        "did not update the metric 'loss', which is the task's monitor",
        1,
    ),
    (
        "wrapper",
        {"metrics": metrics_of(_wrapped)},
        "'top1' cannot be merged.*Wrapper wraps other",
        1,
    ),
    ("forgetful", {"metrics": metrics_of(forgetful)}, "'loss' cannot be merged.*add_state", 1),
    ("monitor", {"monitor": "lost"}, "monitor is 'lost', but its metrics.*mean 'loss'", 1),
    (
        "goal",
        {"goal": "low", "loss": loss_of(lambda x: x)},
        "goal = 'low' of Mine must be min or max",
        1,
    ),
    (
        "monitor of many",
        {
            "metrics": metrics_of(
                lambda: {"loss": _torchmetrics().CatMetric(), "top1": _torchmetrics().MeanMetric()}
            )
        },
        r"whose value is not a single number \(shape \(8,\)\)",
        1,
    ),
    (
        "string value",
        {
            "metrics": metrics_of(
                lambda: {
                    "top1": _torchmetrics().MeanMetric(),
                    "loss": type(
                        "Told", (_torchmetrics().MeanMetric,), {"compute": lambda self: "x"}
                    )(),
                }
            )
        },
        "'loss' is a str; expected a number",
        1,
    ),
]


@pytest.mark.parametrize(
    ("methods", "reported", "status"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_an_invalid_return_value_of_a_task_is_named_with_its_location_before_the_first_step(
    methods: dict[str, Any], reported: str, status: int, tmp_path: Path
):
    """Also by --dry-run, with the same message; no run is started."""
    config = tiny_config(tmp_path, "wrong", task=own(**methods))
    texts = []
    for run in (dry_run, fit_locally):
        with pytest.raises(RaytrainError, match=re.compile(reported, re.DOTALL)) as raised:
            run(config)
        assert raised.value.exit_status == status
        texts.append(str(raised.value))
        if status == 1:
            assert isinstance(raised.value, TaskError)
            first = Path(texts[-1].split(":")[0])
            assert first.is_file(), texts[-1]  # the user's own place comes first
            assert first.is_relative_to(Path(__file__).parents[1])
    assert len({re.sub(r"[\d.]+", "", text) for text in texts}) == 1  # batches differ in size
    assert not kept_steps(config)


class VectorOnRanks(TinyTask):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class NoSuchMonitor(TinyTask):
    monitor = "accuracy"


@pytest.mark.parametrize("kind", [VectorOnRanks, NoSuchMonitor])
@pytest.mark.parametrize("exact", [False, True])
def test_all_ranks_refuse_an_invalid_return_value_with_the_same_error(
    kind: type[TinyTask], exact: bool, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "wrong", exact=exact)
    ended = workers.outcomes(3, run_tiny, plain(config), None, 0, 0, None, kind)
    assert [outcome.name for outcome in ended] == ["TaskError"] * 3
    assert len({outcome.text.rpartition("TaskError: ")[2] for outcome in ended}) == 1
    assert kept_steps(config) == []


def test_a_resumed_run_is_checked_as_well(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "resumed")
    workers(3, run_tiny, plain(config), None, 4)
    ended = workers.outcomes(3, run_tiny, plain(config), None, 0, 0, None, NoSuchMonitor)
    assert all(isinstance(outcome, Raised) and outcome.exit_status == 1 for outcome in ended)
    assert kept_steps(config) == [4]


# ------------------------------------------------------------------ no side effects


class Drawing(TinyTask):
    """Its evaluation draws from the global generators and changes buffers of the model."""

    def evaluate(self, model: nn.Module, batch: Any, metrics: Mapping[str, Any]) -> None:
        torch.rand(3)
        model.norm.running_mean += 1
        super().evaluate(model, batch, metrics)


def untried(session: Any) -> None:
    preparing.try_evaluation = lambda *_: None


def tried(session: Any) -> None:
    from raytrain_ddp.training.start.sanity_check import try_evaluation

    preparing.try_evaluation = try_evaluation


def test_the_initial_check_does_not_change_the_weights(workers: Group, tmp_path: Path):
    """The same bits with and without it, on three ranks, and for a resumed run."""
    found = []
    for name, prepare_session in (("without", untried), ("with", tried)):
        config = tiny_config(tmp_path, name, epochs=2)
        for stop in (7, 0):
            ran = workers(3, run_tiny, plain(config), None, stop, 0, prepare_session, Drawing)
        found.append((bits(config), ran[0].outcome.metrics, ran[0].digest))
    workers(3, run_tiny, plain(tiny_config(tmp_path, "again", epochs=1)), None, 1, 0, tried)
    assert found[0] == found[1]


def test_the_initial_check_does_not_change_the_generators(tmp_path: Path):
    import random

    import numpy as np

    from raytrain_ddp.training.runtime.world import World
    from raytrain_ddp.training.start.sanity_check import try_evaluation, try_loss

    world, config = World(0, 1, 0, torch.device("cpu"), 1), TrainConfig()
    task, model = Drawing(config), TinyNet()
    data = task.eval_data()
    assert data is not None
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = {name: torch.from_numpy(array) for name, array in tiny_arrays(8, 0).items()}
    try_loss(config, task, model, batch, world)
    try_evaluation(config, task, model, data, world, lambda _: None)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_a_metric_that_evaluate_never_updates_is_noted(tmp_path: Path):
    def metrics(self: TinyTask) -> Any:
        tm = _torchmetrics()
        return {name: tm.MeanMetric() for name in ("loss", "top1", "extra")}

    config = tiny_config(tmp_path, "noted", task=own(metrics=metrics))
    assert "evaluate: did not update the metric 'extra'" in dry_run(config)


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

    def metric(self) -> dict[str, Any]:
        return {}

    def train_datas(self) -> None: ...


class Signature(Bare):
    def evaluate(self, model: nn.Module, batch: Any) -> None:  # type: ignore[override]
        ...


class Static(Bare):
    @staticmethod
    def loss(batch: Any) -> Tensor:  # type: ignore[override]
        return batch


class NotCallable(Bare):
    loss = nn.CrossEntropyLoss  # type: ignore[assignment]
    metrics = {"loss": 1}  # type: ignore[assignment]  # noqa: RUF012


def with_method(name: str) -> type:
    return type("Mine", (Bare,), {"__module__": __name__, name: lambda self, *_: None})


def test_a_missing_method_is_named_before_anything_is_built():
    with pytest.raises(TaskError) as raised:
        task_of(TrainConfig(task=Lacking))
    reported = str(raised.value)
    assert re.match(
        rf".*{HERE}:\d+: Lacking has no train_data\(\), no eval_data\(\), no loss", reported
    )
    assert "Should 'metric' be 'metrics'?" in reported
    assert "Should 'train_datas' be 'train_data'?" in reported


@pytest.mark.parametrize(
    ("kind", "reported"),
    [
        (Signature, r"is called with \(model, batch, metrics\): too many positional"),
        (Static, r"it takes \(batch.*is called with \(model, batch\)"),
        (NotCallable, "NotCallable.metrics is a dict; expected a method"),
        (object, "object has no model"),
        (int, "int has no model"),
        (5, "int has no model"),
        (None, "NoneType has no model"),
    ],
)
def test_a_class_that_is_not_a_task_is_refused(kind: Any, reported: str):
    with pytest.raises(TaskError, match=reported):
        task_of(TrainConfig(task=kind))


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("configure_optimizers", "optimizer(model)"),
        ("configure_scheduler", "schedule(step)"),
        ("make_optimizer", "--optim"),
        ("lr_scheduler", "--schedule"),
        ("optimizer_step", "after_step(model, step)"),
        ("training_step", "loss(model, batch)"),
        ("compute_loss", "loss(model, batch)"),
        ("validation_step", "evaluate(model, batch, metrics)"),
        ("train_dataloader", "train_data()"),
        ("val_data", "eval_data()"),
        ("test_dataset", "eval_data()"),
        ("on_step_end", "after_step(model, step)"),
        ("on_train_epoch_end", "no hooks"),
        ("setup", "do it in one of them"),
        ("metric", "did you mean 'metrics'"),
        ("moniter", "did you mean 'monitor'"),
        ("per_class_metric", "did you mean 'per_class_metrics'"),
        ("max_epochs", "--epochs"),
    ],
)
def test_a_method_that_is_never_called_is_refused(name: str, reported: str):
    with pytest.raises(TaskError) as raised:
        task_of(TrainConfig(task=with_method(name)))
    assert f"nothing uses Mine.{name}: " in str(raised.value)
    assert reported in str(raised.value)


def test_helper_methods_and_attributes_are_accepted():
    class Helped(Bare):
        widths = (3, 4)

        def __init__(self, config: TrainConfig) -> None:
            self.optimizer_note = "x"
            self.batch_size = config.batch_size

        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch["x"])

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return self.forward(model, batch).sum()

        @property
        def criterion(self) -> nn.Module:
            return nn.CrossEntropyLoss()

        def evaluate(self, model: nn.Module, batch: Any, metrics: Any) -> None:
            [self.criterion(x, y) for x, y in batch]

        def plot(self) -> None: ...
        def predict(self, image: Tensor) -> Tensor:
            return image

    assert isinstance(load_task(TrainConfig(task=Helped)), Helped)


def test_an_attribute_that_nothing_reads_is_refused():
    class Late(Bare):
        def __init__(self, config: TrainConfig) -> None:
            self.moniter = "top1"

    with pytest.raises(TaskError, match=r"Late\.moniter: did you mean 'monitor'"):
        load_task(TrainConfig(task=Late))


class Optioned(Bare):
    def __init__(
        self,
        config: TrainConfig,
        rows: str,
        noise: float = 1.0,
        depth: int = 2,
        flip: bool = False,
    ) -> None:
        self._given = rows, noise, depth, flip

    @property
    def unit(self) -> str:
        return f"{self._given}"


class WithoutConfig(Bare):
    def __init__(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "error", "reported"),
    [
        (Optioned, {"rowz": "5"}, ConfigError, "no option 'rowz'. Did you mean 'rows'"),
        (Optioned, {"noise": "5"}, ConfigError, "needs 'rows': --task-options rows VALUE"),
        (Optioned, {"config": "5"}, ConfigError, "no option 'config'"),
        (Optioned, {"rows": "5", "noise": "x"}, ConfigError, "noise = 'x': must be a number"),
        (Optioned, {"rows": "5", "depth": "1.5"}, ConfigError, "depth = '1.5': must be an integer"),
        (Optioned, {"rows": "5", "flip": "1"}, ConfigError, "flip = '1': must be true or false"),
        (Bare, {"rows": "5"}, ConfigError, "Bare has no option 'rows', or any other"),
        (WithoutConfig, {}, TaskError, "must take the config as its first argument"),
        (Bare(), {"rows": "5"}, ConfigError, "the task is already an instance"),
    ],
)
def test_task_options_are_passed_or_refused(
    kind: Any, options: dict[str, str], error: type[Exception], reported: str
):
    with pytest.raises(error, match=reported):
        task_of(TrainConfig(task=kind, task_options=options))
    task_of(TrainConfig(task=Optioned, task_options={"rows": "5"}))
    given = {"rows": "5", "noise": "0.5", "depth": "3", "flip": "true"}
    task = load_task(TrainConfig(task=Optioned, task_options=given))
    assert task.unit == str(("5", 0.5, 3, True))
    assert isinstance(load_task(TrainConfig(task=Bare)), Bare)  # needs no constructor


def test_an_evaluation_set_without_rows_is_refused_before_training(tmp_path: Path):
    config = tiny_config(tmp_path, "none", task_options={"eval_rows": 0}, task=TinyTask)
    with pytest.raises(DataError, match="the evaluation set has 0 rows"):
        fit_locally(config)


# ------------------------------------------------------------------ evaluation mode


class Backbone(nn.Module):
    """Batch norm and dropout; `rest` is put in evaluation mode, and `kept` is by its own
    `train`."""

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
        assert not self.rest.training
        assert not self.kept.training
        logits: Tensor = self.head(self.norm(self.kept(self.rest(x))).flatten(1))
        return logits


class Resting(TinyTask):
    def model(self) -> nn.Module:
        self.made = Backbone()  # type: ignore[assignment]
        return self.made


def train_resting(rank: int, size: int, config: Mapping[str, Any]) -> dict[str, Any]:
    seen: list[Any] = []

    def prepare_session(session: Any) -> None:
        def look(step: int) -> None:
            seen.append([m.training for m in session.model.modules()])

        if session.wrap.__self__ is session:
            session.before_step = look if not config["exact"] else lambda step: None

    kept: dict[str, Any] = {}

    class Watching(Resting):
        def model(self) -> nn.Module:
            kept["model"] = super().model()
            return kept["model"]

    run_tiny(rank, size, config, {"rows": 35}, 0, 0, prepare_session, Watching)
    model = kept["model"]
    modes = {name: module.training for name, module in model.named_modules()}
    buffers = {name: tensor.tolist() for name, tensor in model.named_buffers()}
    return {"modes": modes, "buffers": buffers, "seen": seen}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_modules_put_in_evaluation_mode_stay_in_it(
    size: int, exact: bool, workers: Group, tmp_path: Path
):
    """In training, after evaluations, and in a slot without samples, which the last step has."""
    config = tiny_config(tmp_path, "resting", epochs=2, exact=exact)
    for found in workers(size, train_resting, plain(config)):
        expected = {"": True, "rest": False, "kept": False, "norm": True, "head": True}
        assert found["modes"] == expected
        for name in ("rest", "kept"):  # unchanged
            assert found["buffers"][f"{name}.running_mean"] == [0.0]
            assert found["buffers"][f"{name}.num_batches_tracked"] == 0
        assert found["buffers"]["norm.num_batches_tracked"] == 4
        assert all(modes == found["seen"][0] for modes in found["seen"])


def test_a_model_entirely_in_evaluation_mode_is_noted(tmp_path: Path):
    def model(self: TinyTask) -> nn.Module:
        return TinyNet().eval()

    config = tiny_config(tmp_path, "asleep", task=own(model=model), epochs=1)
    shown: list[str] = []

    class Display:
        def __enter__(self) -> Display:
            return self

        def __exit__(self, *_: object) -> None: ...
        def handle(self, event: object) -> None:
            shown.append(getattr(event, "text", ""))

        def summary(self, *_: object) -> None: ...

    fit_locally(replace(config, checkpoint=CheckpointConfig(every_s=0.0)), display=Display())  # type: ignore[arg-type]
    assert any("model() returned the whole model in evaluation mode" in text for text in shown)


def test_a_file_with_relative_imports_is_refused_with_its_module_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/base.py").write_text("class Mine: ...\n")
    (tmp_path / "package/own.py").write_text("from .base import Mine\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"relative imports.*such as package\.own:Mine\."):
        task_of(TrainConfig(task="package/own.py:Mine"))
