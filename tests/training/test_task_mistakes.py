"""Mistakes that a plain script tolerates: they work, or they are refused in one line that names
the user's function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, Raised
from tiny import TinyNet, TinyTask, plain, run_tiny, tiny_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data, MapSource
from raytrain_ddp.errors import RaytrainError


def notes_of(folder: Path, **methods: Any) -> list[str]:
    """Trains a task with these methods; the notes about what checkpoints do not contain."""
    kind = type("Own", (TinyTask,), methods)
    config = plain(tiny_config(folder, "run", epochs=1, limit_train_batches=2))
    events = run_tiny(0, 1, config, kind=kind).events
    texts = [event["text"] for event in events if event["kind"] == "note"]
    return [text for text in texts if "forward passes" in text or "goal" in text]


# ------------------------------------------------------------------ what a loss remembers


class Remembering(nn.Module):
    """`change`, given what the last forward pass kept and a number, gives what this one keeps and
    a factor of the outputs."""

    def __init__(self, start: Any, change: Callable[[Any, Tensor], tuple[Any, Any]]) -> None:
        super().__init__()
        self.net, self.h, self.change = TinyNet(norm=False), start, change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        self.h, factor = self.change(self.h, y.detach().mean())
        return y * factor


def remembers(start: Any, change: Callable[[Any, Tensor], tuple[Any, Any]]) -> Any:
    def model(self: TinyTask) -> nn.Module:
        self.made = nn.Sequential(Remembering(start, change))  # type: ignore[assignment]
        return self.made

    return model


def scaled_by_a_buffer(self: TinyTask) -> nn.Module:
    self.made = nn.Sequential(Remembering(1.0, lambda h, _: (h, self.made[0].scale.add_(1))))  # type: ignore
    self.made[0].register_buffer("scale", torch.zeros(()), persistent=False)
    return self.made


def running_mean(self: Any, model: nn.Module, batch: Batch) -> Tensor:
    loss = cross_entropy(model(batch["x"]), batch["y"])
    self.running = 0.9 * getattr(self, "running", 1.0) + 0.1 * loss.detach()
    return loss * self.running


class Lazy(TinyNet):
    """Makes a buffer when it is first called."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((), 0.5)
        return super().forward(x) * self.scale


def lazy(self: TinyTask) -> nn.Module:
    self.made = Lazy()
    return self.made


GENERATOR = random.Random(0)


def own_generator(_: TinyTask, model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"]) * GENERATOR.random()


def changes_its_batch(_: TinyTask, model: nn.Module, batch: Batch) -> Tensor:
    y = batch.pop("y")
    return cross_entropy(model(batch["x"].mul_(0.5)), y) * torch.rand(())


def counting(self: Any, model: nn.Module, batch: Batch) -> Tensor:
    self.made.calls = self.calls = getattr(self, "calls", 0) + 1
    return cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    "methods",
    [
        {"model": remembers(None, lambda h, _: ({**(h or {}), 8: torch.arange(8)}, 1))},
        {"model": lazy},
        {"loss": changes_its_batch},
        {"loss": counting},
    ],
)
def test_state_outside_of_checkpoints_is_accepted_if_no_step_depends_on_it(
    methods: dict[str, Any], tmp_path: Path
) -> None:
    assert notes_of(tmp_path, **methods) == []


def filled(made: nn.Module, name: str, value: float) -> nn.Module:
    tensor = {**dict(made.named_parameters()), **dict(made.named_buffers())}[name]
    with torch.no_grad():
        tensor.view(-1)[0] = value
    return made


def changed(change: Callable[[Any], Any]) -> dict[str, Any]:
    def model(self: TinyTask) -> Any:
        self.made = nn.Sequential(TinyNet())  # type: ignore[assignment]
        return change(self.made)

    return {"model": model}


def channels_as_samples(_: TinyTask) -> Data:
    """Its batches are tuples whose first tensor has the channels of one sample."""
    source = MapSource([(torch.ones(3, 4, 4), 1)] * 60, shared=True)
    return Data(source, lambda items: (*zip(*items, strict=True),))


def without_row_30(self: TinyTask) -> Data:
    data = TinyTask.eval_data(self)
    assert data is not None

    def collate(records: Any, _: Any) -> Batch:
        good = records["row"] != 30
        return {n: torch.from_numpy(array[good]) for n, array in records.items()}

    return Data(data.source, collate)


def scheduled(_: TinyTask, model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=0.04)
    OneCycleLR(made, max_lr=0.04, total_steps=30)
    return made


class Counts(torch.optim.SGD):
    """Keeps state outside of its state_dict()."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            group["lr"] *= self.taken
        super().step()


def counts(_: TinyTask, model: nn.Module) -> torch.optim.Optimizer:
    return Counts(model.parameters(), lr=0.1)


def complex_buffer(made: nn.Module) -> nn.Module:
    made.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return made


REFUSED: list[tuple[dict[str, Any], str]] = [
    # A loss that depends on earlier calls.
    ({"model": remembers(0.0, lambda h, now: (h + now, h + now))}, "model.0.h"),
    ({"model": remembers(torch.zeros(()), lambda h, x: (h.add_(x), h.clone()))}, "model.0.h"),
    ({"model": remembers(0, lambda h, _: (h + 1, 1 / (h + 1)))}, "model.0.h"),
    ({"model": remembers(None, lambda h, now: (now, 1 if h is None else h))}, "model.0.h"),
    ({"model": scaled_by_a_buffer}, "buffer 0.scale"),
    ({"loss": running_mean}, "running"),
    ({"loss": own_generator}, "a generator"),
    # A model that cannot be trained.
    (changed(lambda made: filled(made, "0.norm.running_mean", math.nan)), "0.norm.running_mean"),
    (changed(lambda made: filled(made, "0.head.bias", math.inf)), "0.head.bias"),
    (changed(lambda made: made.append(nn.Linear(5, 5, device="meta"))), "1 is lazy, or on"),
    (changed(lambda made: made.append(nn.LazyLinear(5))), "1 is lazy"),
    (changed(lambda made: made.append(nn.Embedding(3, 1, sparse=True))), "1 has sparse"),
    (changed(nn.DataParallel), "DataParallel"),
    # Wrong data, metrics and optimizers.
    ({"train_data": channels_as_samples}, "3 samples for 8 records"),
    ({"eval_data": channels_as_samples}, "3 samples for 8 records"),
    ({"eval_data": without_row_30}, "7 samples for 8 records"),  # not in the first batch
    ({"train_data": lambda _: Data(TensorDataset(torch.ones(3)))}, "MapSource"),  # type: ignore[arg-type]
    ({"metrics": lambda _: {"loss": MeanMetric(), "step": MeanMetric()}}, "'step'"),
    ({"optimizer": scheduled}, "learning rate scheduler"),
    ({"optimizer": counts}, "state outside its state_dict()"),
    (changed(complex_buffer), "phase"),
]


@pytest.mark.parametrize(("methods", "named"), REFUSED)
def test_a_mistake_in_a_task_is_refused_in_one_line_before_the_first_step(
    methods: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(RaytrainError) as caught:
        notes_of(tmp_path, **methods)
    assert "\n" not in str(caught.value)
    assert named in str(caught.value)


# ------------------------------------------------------------------ forbidden changes in a step


class Changing(TinyTask):
    """Does something that a plain loop would allow.

    Args:
        what: the mistake.
    """

    def __init__(self, config: TrainConfig, what: str) -> None:
        super().__init__(config)
        self.what, self.factor = what, 1.0
        self.apart = nn.Linear(5, 5)
        self.own: torch.optim.Optimizer | None = None

    def model(self) -> nn.Module:
        made = super().model()
        if self.what == "unfreezes":
            next(made.parameters()).requires_grad_(False)
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return self.own

    def schedule(self, step: int) -> float:
        return self.factor

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.what == "gathers":
            others = [torch.ones(()) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(others, torch.ones(()))
        logits = model(batch["x"])
        if self.what == "backward":
            cross_entropy(logits, batch["y"]).backward()
        return cross_entropy(self.apart(logits) if self.what == "apart" else logits, batch["y"])

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.what in ("freezes", "unfreezes"):
            next(model.parameters()).requires_grad_(self.what == "unfreezes")
        elif self.what == "rates":
            assert self.own is not None
            self.own.param_groups[0]["lr"] = 0.01
        elif self.what == "schedules":
            self.factor = 0.5


def ran_changing(rank: int, size: int, config: Any, what: str) -> int:
    return run_tiny(rank, size, config, {"what": what}, kind=Changing).outcome.step


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("apart", r"Changing\.loss: .*\[5, 5\], \[5\]"),
        ("backward", r"Changing\.loss: .*backward"),
        ("unfreezes", r"unfreezes conv\.weight in step 1"),
        ("rates", r"Changing\.after_step: .*learning rate"),
        ("schedules", r"schedule: .*step 1"),
    ],
)
def test_actions_of_a_task_that_would_have_no_effect_are_refused(
    tmp_path: Path, what: str, named: str
) -> None:
    with pytest.raises(RaytrainError, match=named):
        ran_changing(0, 1, plain(tiny_config(tmp_path, "run")), what)


@pytest.mark.parametrize(
    ("what", "named"), [("freezes", "freezes conv.weight in step 1"), ("gathers", "allgather")]
)
def test_actions_of_a_task_that_would_block_other_workers_are_refused(
    workers: Group, tmp_path: Path, what: str, named: str
) -> None:
    config = plain(tiny_config(tmp_path, "run"))
    exact = plain(tiny_config(tmp_path, "exact", epochs=1, exact=True))
    for given, size in ((config, 3), (exact, 2)):
        for end in workers.outcomes(size, ran_changing, given, what):
            assert isinstance(end, Raised)
            assert end.exit_status in (1, 2)
            assert given is exact or named in end.text
    if what == "gathers":  # as often on each worker
        even = plain(tiny_config(tmp_path, "even", epochs=1, micro_batch=16))
        workers(2, ran_changing, even, what)
