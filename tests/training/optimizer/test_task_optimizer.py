"""A task's own optimizer and schedule: any class, with the same bits after a stop and a skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group, Raised
from tiny import (
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    newest,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config import effects
from raytrain_ddp.config.sections import ComputeConfig, OptimConfig, ScheduleConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan
from raytrain_ddp.errors import CheckpointError, TaskError
from raytrain_ddp.training.optimizer.lr_schedule import (
    LearningRates,
    build_optimizer,
    learning_rate,
)
from raytrain_ddp.training.optimizer.optimizer_state import load_optimizer, skips_on_device
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of, replaced_fields

ROWS, STEPS = 75, 3  # steps per epoch
SKIP = OptimConfig(lr=0.02, nonfinite="skip")


class Lion(torch.optim.Optimizer):
    """Like third-party optimizers (arXiv:2302.06675): state that is created late and is not only
    tensors, numbers in the groups, and weights whose `data` is replaced."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "k": 0, "mode": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (one, two), group["k"] = group["betas"], group["k"] + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, average=None, history=[], master=parameter.double())
                average = state["average"]
                average = torch.zeros_like(parameter) if average is None else average
                update = (average * one + parameter.grad * (1 - one)).sign()
                noise = torch.rand(()) * 1e-3  # like stochastic rounding
                state["master"] = state["master"] - group["lr"] * (update + noise).double()
                parameter.data = state["master"].float()
                state["average"] = average * two + parameter.grad * (1 - two)
                state["steps"] += 1
                state["history"] = [*state["history"], float(noise)][-2:]


Make = Callable[[nn.Module], Any]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "sgd-foreach": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, foreach=True
    ),
    "sgd-fused-dampened": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, dampening=0.5, fused=True
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adam-fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "adagrad-fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "lion": lambda model: Lion(model.parameters(), lr=0.01),
    "muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.01),
    "groups": lambda model: [
        {"params": list(model.hidden.parameters()), "lr": 0.5, "lr_scale": 0.1},
        {"params": [*model.conv.parameters(), *model.head.parameters()], "weight_decay": 0.1},
    ],
}


class Given(TinyTask):
    """Uses the optimizer of that name in `OPTIMIZERS`."""

    def __init__(self, config: TrainConfig, name: str, **options: Any) -> None:
        super().__init__(config, rows=ROWS, norm=False, **options)
        self._name = name

    def model(self) -> nn.Module:
        if self._name == "muon":  # for matrices only
            self.made: Any = nn.Sequential(nn.Flatten(), nn.Linear(16, 5, bias=False))
            return self.made
        return super().model()

    def optimizer(self, model: nn.Module) -> Any:
        return OPTIMIZERS[self._name](model)


class ScheduledTask(Given):
    def schedule(self, step: int) -> float:
        return 1 / (1 + step)


def plain_loop_weights(config: TrainConfig, name: str, bad_row: int) -> dict[str, Tensor]:
    """The weights after a plain torch loop that skips steps with the bad row."""
    torch.manual_seed(config.seed)
    model = TinyNet(norm=False) if name != "muon" else Given(config, name).model()
    optimizer = OPTIMIZERS[name](model)
    if isinstance(optimizer, list):
        head = {"weight_decay": config.optim.weight_decay, "lr": config.optim.lr}
        optimizer[0]["lr"] *= optimizer[0]["lr_scale"]
        groups = [{**head, **group} for group in optimizer]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    arrays = {name: torch.from_numpy(array) for name, array in tiny_arrays(ROWS, 0).items()}
    blocks = ArraySource(tiny_arrays(ROWS, 0), rows_per_block=16).blocks
    plan = Plan(ROWS, config.slots, config.micro_batch)
    for epoch in range(config.epochs):
        order = EpochOrder(blocks, "full", config.seed, epoch)
        for step in range(plan.steps_per_epoch):
            spans = [order.read(*plan.span(step, slot)) for slot in range(config.slots)]
            batch = torch.cat([torch.from_numpy(span) for span in spans])
            model.zero_grad()
            cross_entropy(model(arrays["x"][batch]), arrays["y"][batch]).backward()
            factor = learning_rate(config, epoch * STEPS + step, STEPS) / config.optim.lr
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if bad_row not in batch:
                optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("sgd", "adagrad-fused")])
def test_with_any_optimizer_a_stopped_run_with_skipped_steps_ends_with_the_same_bits(
    name: str, workers: Group, tmp_path: Path
):
    """The weights are also those of a plain torch loop."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    options = {"name": name, "nan_row": 7}  # one step of each epoch is refused
    schedule = ScheduleConfig(warmup_epochs=1.0)
    made = {"epochs": 3, "optim": SKIP, "schedule": schedule}
    whole = tiny_config(tmp_path, "whole", **made)
    ran = workers(3, run_tiny, plain(whole), options, 0, 0, None, Given)
    assert {worker.outcome.step for worker in ran} == {9}
    assert len({worker.digest for worker in ran}) == 1
    assert "'nonfinite': 3" in str(log(ran)[-1])

    config = tiny_config(tmp_path, "stopped", **made)
    for stop in (1, 5, 0):
        workers(3, run_tiny, plain(config), options, stop, 0, None, Given)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
    if name != "lion":  # it draws random numbers
        for key, tensor in plain_loop_weights(whole, name, 7).items():
            torch.testing.assert_close(weights(whole)[key], tensor, rtol=1e-4, atol=1e-5)


def log(ran: list[WorkerResult]) -> list[Mapping[str, Any]]:
    return [event for event in ran[0].events if event["kind"] == "train"]


@pytest.mark.parametrize("name", ["adam", "lion"])
def test_with_any_optimizer_a_killed_and_resized_run_ends_with_the_same_bits_if_exact(
    name: str, workers: Group, tmp_path: Path
):
    options = {"name": name}
    alone = tiny_config(tmp_path, "alone", epochs=2, exact=True)
    workers(1, run_tiny, plain(alone), options, 0, 0, None, ScheduledTask)
    config = tiny_config(tmp_path, "three", epochs=2, exact=True)
    *_, last = workers.outcomes(3, run_tiny, plain(config), options, 0, 5, None, ScheduledTask)
    assert last == Died(9)
    ran = workers(2, run_tiny, plain(config), options, 0, 0, None, ScheduledTask)
    assert ran[0].start_step == STEPS
    assert bits(config) == bits(alone)


def test_fp16_gradients_are_unscaled_for_an_optimizer_without_scaler_support(
    workers: Group, tmp_path: Path
):
    both = []
    for precision in ("fp32", "fp16"):
        compute = ComputeConfig(precision=precision)
        config = tiny_config(tmp_path, precision, epochs=1, compute=compute)
        workers(3, run_tiny, plain(config), {"name": "adam"}, 0, 0, None, Given)
        both.append(weights(config))
    for key, tensor in both[0].items():
        torch.testing.assert_close(tensor, both[1][key], rtol=0.1, atol=0.02)


# ------------------------------------------------------------------ invalid optimizers


class UnsavedCounter(Lion):
    """Has a number that is not in state_dict()."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * self.count


class NeedsClosure(Lion):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"


class Coded(Lion):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["kind"] = Path


REFUSED: dict[str, tuple[Make, str]] = {
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), "the LBFGS needs a closure"),
    "sam": (lambda m: NeedsClosure(m.parameters()), "SAM needs a closure"),
    "none": (lambda m: None, "returned None; expected a torch.optim.Optimizer"),
    "class": (lambda m: torch.optim.Adam, "returned the class Adam"),
    "some": (lambda m: torch.optim.Adam(m.head.parameters()), "lacks conv.weight and 3 more"),
    "others": (
        lambda m: torch.optim.Adam([*m.parameters(), nn.Parameter(torch.zeros(2))]),
        "parameters that are not the model's",
    ),
    "group": (lambda m: [{"weights": m.parameters()}], "expected parameter groups"),
    "misspelled": (
        lambda m: [{"params": [*m.parameters()], "lrr": 0.1}],
        "knows no 'lrr'. Did you mean 'lr'",
    ),
    "no lr": (lambda m: Lion(m.parameters(), lr=None), "has no learning rate"),  # type: ignore
    "negative": (
        lambda m: [{"params": [*m.parameters()], "lr": -0.1}],
        "the SGD has the learning rate -0.1 for a group",
    ),
    "text": (lambda m: [{"params": [*m.parameters()], "lr": "0.1"}], "the learning rate '0.1'"),
    "forgetful": (lambda m: UnsavedCounter(m.parameters()), "outside its state_dict()"),
    "coded": (lambda m: Coded(m.parameters()), "a state that cannot be stored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_optimizer_is_refused_in_one_line_before_the_first_step(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    make, reported = REFUSED[name]
    monkeypatch.setitem(OPTIMIZERS, name, make)
    config = TrainConfig()
    task = Given(config, name)
    with pytest.raises(TaskError) as raised:
        optimizer_of(task, task.model(), config)
    (line,) = str(raised.value).splitlines()
    assert reported in line
    assert line.startswith(f"{__file__}:")
    assert "in Given.optimizer: " in line


def test_the_trial_of_an_optimizer_changes_no_weights_state_or_random_numbers():
    config, task = TrainConfig(), Given(TrainConfig(), "lion")
    model = task.model().to(memory_format=torch.channels_last)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    optimizer = optimizer_of(task, model, config)
    assert torch.equal(torch.rand(1), drawn)
    assert not optimizer.state
    assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["lr"]) == (0, 0.01)
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_state_of_another_optimizer_is_not_loaded():
    first, second = TinyNet(norm=False), TinyNet(norm=False)
    saved = build_optimizer(first, OptimConfig()).state_dict()
    with pytest.raises(CheckpointError, match=r"not the one of the checkpoint: .*groups"):
        load_optimizer(torch.optim.SGD(second.parameters()), saved)


def test_loaded_moments_keep_their_dtype_and_the_choice_of_kernels_is_not_loaded():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Lion([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.state[weight] = {"moment": torch.full((3,), 1.001), "codes": torch.arange(3)}
    other = Lion([nn.Parameter(weight.detach().clone())])
    load_optimizer(other, optimizer.state_dict())
    (state,) = other.state.values()
    assert torch.equal(state["moment"], torch.full((3,), 1.001))
    assert torch.equal(state["codes"], torch.arange(3))
    fused = torch.optim.Adam([weight], fused=True)
    load_optimizer(fused, torch.optim.Adam([weight], foreach=True).state_dict())
    assert (fused.param_groups[0]["fused"], fused.param_groups[0]["foreach"]) == (True, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("groups", True), ("adam-fused", True), ("adagrad-fused", True), ("lion", False)),
        *(("sgd", False), ("adamw", False), ("sgd-fused-dampened", False)),
    ],
)
def test_only_fused_torch_optimizers_skip_steps_on_the_device(name: str, expected: bool):
    task = Given(TrainConfig(), name)
    optimizer = optimizer_of(task, task.model(), TrainConfig())
    if name == "adagrad-fused" and not hasattr(optimizer, "_step_supports_amp_scaling"):
        expected = False  # fused Adagrad in older versions of torch
    assert skips_on_device(optimizer) is expected


def test_fields_replaced_by_the_optimizer_or_schedule_of_a_task_are_reported(tmp_path: Path):
    schedule, optim = ScheduleConfig(name="step", gamma=0.5), OptimConfig(lr=0.4, clip_norm=1.0)
    config = tiny_config(
        tmp_path, "reported", task="mine", epochs=1, optim=optim, schedule=schedule
    )
    assert effects.unread_notes(config, {"optim.lr"}, ["schedule.gamma", "optim.lr"]) == [
        "schedule.gamma = 0.5 is set, but mine does not read it."
    ]
    for name, kind, expected in (
        ("adam", Given, {"optim.lr", "optim.name"}),
        ("groups", ScheduledTask, {"schedule.gamma"}),
        ("groups", Given, set()),
    ):
        task = kind(config, name)
        found = replaced_fields(task, optimizer_of(task, task.model(), config), config)
        groups = {"optim.head_lr", "optim.groups", "optim.layer_decay"}
        assert expected | groups <= {*found}
        assert bool(expected) == bool({*found} - groups - {"optim.decay_norms", "optim.decay_bias"})


# ------------------------------------------------------------------ schedules


def rates_of(schedule: Callable[[int], Any] | None, name: str = "sgd") -> LearningRates:
    config = TrainConfig(schedule=ScheduleConfig(name="constant", warmup_epochs=0.0))
    task = Given(config, name)
    if schedule is not None:
        task.schedule = schedule  # type: ignore[attr-defined]
    return LearningRates(task, optimizer_of(task, task.model(), config), config, 1)


def test_the_schedule_multiplies_the_peak_learning_rate_of_each_group():
    assert rates_of(None, "groups")(3) == pytest.approx([0.5 * 0.1, 0.1])
    assert rates_of(lambda step: step / 10)(3) == pytest.approx([0.02 * 0.3])
    assert rates_of(lambda step: (1, 0.5), "groups")(3) == pytest.approx([0.05, 0.05])


def test_the_learning_rate_of_the_configured_optimizer_equals_the_schedule_bit_for_bit():
    config = TrainConfig(optim=OptimConfig(lr=0.3))
    task = TinyTask(config)
    rates = LearningRates(task, optimizer_of(task, task.model(), config), config, 7)
    for step in range(84):
        assert rates(step) == [learning_rate(config, step, 7)] * 2


@pytest.mark.parametrize(
    ("schedule", "reported"),
    [
        (lambda step: math.nan if step == 11 else 1.0, "returned nan for step 11"),
        (lambda step: 1 - step / 5, "returned -0.1"),
        (lambda step: None, "returned None for step 0"),
        (lambda step: [1.0, 2.0], "expected a finite factor"),
        (lambda step: torch.ones(2), "returned tensor"),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_line_before_the_first_step(
    schedule: Callable[[int], Any], reported: str
):
    with pytest.raises(TaskError) as raised:
        rates_of(schedule)
    (line,) = str(raised.value).splitlines()
    assert reported in line


class Broken(TinyTask):
    def schedule(self, step: int) -> float:
        return math.nan if step == 4 else 1.0


def test_a_schedule_that_gives_nan_is_refused_by_all_ranks_before_the_first_step(
    workers: Group, tmp_path: Path
):
    ended = workers.outcomes(
        3, run_tiny, plain(tiny_config(tmp_path, "nan")), None, 0, 0, None, Broken
    )
    assert all(isinstance(each, Raised) and each.name == "TaskError" for each in ended)
    assert all("in Broken.schedule: returned nan for step 4" in each.text for each in ended)
    assert not (tmp_path / "nan" / "checkpoints").exists()


def test_the_logged_learning_rates_follow_the_schedule_of_the_task(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "logged", epochs=1)
    ran = workers(1, run_tiny, plain(config), {"name": "adam"}, 0, 0, None, ScheduledTask)
    assert [r["lr"] for r in log(ran)] == pytest.approx([0.01, 0.01 / 2, 0.01 / 3])
