"""A task's own optimizer and schedule: any class, with the same bits after a stop and a skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group
from tiny import (
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    newest,
    plain,
    planned,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.sections import OptimConfig, ScheduleConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import TaskError
from raytrain_ddp.training.optimizer.lr_schedule import LearningRates, learning_rate
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of

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
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
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
    for epoch in range(config.epochs):
        for step, slots in enumerate(planned(config, epoch, ROWS)):
            batch = torch.tensor([row for each in slots for row in each])
            model.zero_grad()
            cross_entropy(model(arrays["x"][batch]), arrays["y"][batch]).backward()
            factor = learning_rate(config, epoch * STEPS + step, STEPS) / config.optim.lr
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if bad_row not in batch:
                optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_any_optimizer_a_stopped_run_with_skipped_steps_ends_with_the_same_bits(
    name: str, workers: Group, tmp_path: Path
):
    """The weights are also those of a plain torch loop."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    options = {"name": name, "nan_row": 7}  # one step of each epoch is refused
    schedule = ScheduleConfig(warmup_epochs=1.0)
    made = {"epochs": 2, "optim": SKIP, "schedule": schedule}
    whole = tiny_config(tmp_path, "whole", **made)
    ran = workers(3, run_tiny, plain(whole), options, 0, 0, None, Given)
    assert len({worker.digest for worker in ran}) == 1
    assert log(ran)[-1]["nonfinite"] == 2

    config = tiny_config(tmp_path, "stopped", **made)
    for stop in (4, 0):
        workers(3, run_tiny, plain(config), options, stop, 0, None, Given)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
    if name != "lion":  # it draws random numbers
        for key, tensor in plain_loop_weights(whole, name, 7).items():
            torch.testing.assert_close(weights(whole)[key], tensor, rtol=1e-4, atol=1e-5)


def log(ran: list[WorkerResult]) -> list[Mapping[str, Any]]:
    return [event for event in ran[0].events if event["kind"] == "train"]


def test_with_any_optimizer_a_killed_and_resized_run_ends_with_the_same_bits_if_exact(
    workers: Group, tmp_path: Path
):
    options = {"name": "lion"}
    alone = tiny_config(tmp_path, "alone", epochs=2, exact=True)
    workers(1, run_tiny, plain(alone), options, 0, 0, None, ScheduledTask)
    config = tiny_config(tmp_path, "three", epochs=2, exact=True)
    *_, last = workers.outcomes(3, run_tiny, plain(config), options, 0, 5, None, ScheduledTask)
    assert last == Died(9)
    ran = workers(2, run_tiny, plain(config), options, 0, 0, None, ScheduledTask)
    assert ran[0].start_step == STEPS
    assert bits(config) == bits(alone)


# ------------------------------------------------------------------ invalid optimizers


REFUSED: dict[str, Make] = {
    "None": lambda m: None,
    "lacks parameters": lambda m: torch.optim.Adam(m.head.parameters()),
    "other parameters": lambda m: torch.optim.Adam([*m.parameters(), nn.Parameter(torch.zeros(2))]),
    "misspelled": lambda m: [{"params": [*m.parameters()], "lrr": 0.1}],
    "no learning rate": lambda m: Lion(m.parameters(), lr=None),  # type: ignore[arg-type]
    "negative": lambda m: [{"params": [*m.parameters()], "lr": -0.1}],
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_optimizer_is_refused_with_its_line_before_the_first_step(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(OPTIMIZERS, name, REFUSED[name])
    task = Given(TrainConfig(), name)
    with pytest.raises(TaskError) as raised:
        optimizer_of(task, task.model(), TrainConfig())
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{__file__}:")
    assert "Given.optimizer" in line


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


def test_an_invalid_schedule_is_refused_with_its_line_before_the_first_step():
    for schedule in (
        lambda step: math.nan if step == 11 else 1.0,
        lambda step: 1 - step / 5,
        lambda step: None,
        lambda step: [1.0, 2.0],
        lambda step: torch.ones(2),
    ):
        with pytest.raises(TaskError) as raised:
            rates_of(schedule)
        assert str(raised.value).startswith(f"{__file__}:")


def test_the_logged_learning_rates_follow_the_schedule_of_the_task(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "logged", epochs=1)
    ran = workers(1, run_tiny, plain(config), {"name": "adam"}, 0, 0, None, ScheduledTask)
    assert [r["lr"] for r in log(ran)] == pytest.approx([0.01, 0.01 / 2, 0.01 / 3])
