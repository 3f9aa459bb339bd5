"""Mistakes that a plain script tolerates: they work, or they are refused in one line that names
the user's function."""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Group, Raised
from tiny import TinyNet, TinyTask, plain, run_tiny, tiny_config, weights
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from torch.utils.data import IterableDataset, TensorDataset
from torchmetrics import Metric

import raytrain_ddp
from raytrain_ddp import user_code
from raytrain_ddp.config.sections import ComputeConfig, DdpConfig, EvalConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.iterable_source import IterableSource
from raytrain_ddp.data.loading.sources import Batch, Data, MapSource
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.errors import DataError, RaytrainError, TaskError
from raytrain_ddp.ray_backend.failure_causes import users_traceback
from raytrain_ddp.tasks.task_check import eval_data_of, loss_of_task, train_data_of
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.runtime.determinism import naming_nondeterministic

# ------------------------------------------------------------------ random numbers


def draws_of_all() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class DrawingTask(TinyTask):
    """Draws random numbers in its constructor and for its data, like random_split."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.drawn = draws_of_all()

    def train_data(self) -> Data:
        return Data(ArraySource({"x": np.array(draws_of_all())}))

    def eval_data(self) -> Data:
        return self.train_data()


def test_a_task_is_built_with_seeded_generators_and_does_not_change_their_state() -> None:
    config = TrainConfig(task=DrawingTask, seed=7)
    tasks = [load_task(c) for c in (config, config, TrainConfig(task=DrawingTask, seed=8))]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = draws_of_all()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    one, other, another = (
        load_task(c).drawn for c in (config, config, TrainConfig(task=DrawingTask))
    )  # type: ignore[attr-defined]
    sets = [
        data.batch(Draws(0, 0, np.arange(3)))["x"].tolist()
        for data in (train_data_of(tasks[0], 7), eval_data_of(tasks[0], 7))
        if data
    ]
    assert draws_of_all() == before
    assert one == other != another
    assert tasks[2].drawn != one  # type: ignore[attr-defined]
    assert sets[0] == sets[1] == pytest.approx(one), "as after torch.manual_seed(7) and the like"


class Shuffling(IterableDataset):  # type: ignore[type-arg]
    """Shuffles at the start, or with a buffer, and draws a random number for each item."""

    def __init__(self, by_buffer: bool = False) -> None:
        self.by_buffer = by_buffer

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        if self.by_buffer:
            buffer = [*range(8)]
            for row in range(8, 40 + 8):
                place = random.randrange(len(buffer))
                chosen, buffer[place] = buffer[place], row
                if row >= 40:
                    buffer.pop(place)
                yield chosen, random.random()
            return
        order = torch.randperm(40).tolist()
        random.shuffle(order)
        for row in order:
            yield row, random.random()


@pytest.mark.parametrize("by_buffer", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_iterable_that_shuffles_gives_each_item_once_for_all_lanes(
    shared: bool, by_buffer: bool
) -> None:
    def read(epoch: int, parts: list[tuple[int, int]]) -> list[Any]:
        source = IterableSource(Shuffling(by_buffer), shared=shared)
        ranges = [Draws(3, epoch, np.arange(*part)) for part in parts]
        return [item for draws in ranges for item in source.read_seeded(draws)]

    whole = read(0, [(0, 40)])
    assert sorted(row for row, _ in whole) == [*range(40)]
    # Lanes start at any position and follow others; resumed lanes start at other positions.
    pieces = read(0, [(20, 25), (0, 10), (25, 33), (10, 20), (33, 40)])
    assert pieces == [*whole[20:25], *whole[:10], *whole[25:33], *whole[10:20], *whole[33:]]
    assert read(0, [(33, 40)]) == whole[33:]
    # In the next epoch, a lane starts where another one ended, in the order of that epoch.
    source = IterableSource(Shuffling(by_buffer), shared=shared)
    lanes = [(0, 20), (20, 40)]
    both = [
        source.read_seeded(Draws(3, epoch, np.arange(*lane))) for epoch in (0, 1) for lane in lanes
    ]
    assert [*both[0], *both[1]] == whole
    assert [*both[2], *both[3]] == read(1, [(0, 40)])
    assert len(source._waiting) <= 2, "nothing is kept of past epochs"
    assert [row for row, _ in read(1, [(0, 40)])] != [row for row, _ in whole]


class Items:
    """A map-style data set whose items, by `draw`, depend on random numbers."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        x = torch.full((1, 4, 4), float(row)) + self.draw()
        return {"x": x, "y": torch.tensor(row % 5), "row": torch.tensor(row)}


class Iterated(Items, IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))


class OwnSource:
    """Without `shared`, which means that threads may read it."""

    def __init__(self, items: Items) -> None:
        self.items, self.blocks = items, np.array([96])

    def read(self, rows: np.ndarray) -> list[Any]:
        return [self.items[row] for row in rows.tolist()]

    def fingerprint(self) -> str:
        return ""


def drawn_in_collate(records: Any) -> Any:
    return {
        name: torch.from_numpy(values) + 0 * int(random.random())
        for name, values in records.items()
    }


ARRAYS = {"x": np.zeros((96, 1, 4, 4), np.float32), "y": np.arange(96) % 5, "row": np.arange(96)}
READ_IN_THREADS = {
    "torch": lambda: MapSource(Items(lambda: torch.rand(())), shared=True),
    "NumPy": lambda: MapSource(Items(np.random.rand), shared=True),
    "Python": lambda: MapSource(Items(random.random), shared=True),
    "iterable": lambda: IterableSource(Iterated(random.random), shared=True),
    "own source": lambda: OwnSource(Items(random.random)),
    "collate": lambda: ArraySource(ARRAYS),
    "by processes": lambda: MapSource(Items(random.random)),
    "no draws": lambda: MapSource(Items(lambda: 0.0), shared=True),
    "generator of its own": lambda: MapSource(Items(random.Random(0).random), shared=True),
}


class ReadInThreads(TinyTask):
    def __init__(self, config: TrainConfig, kind: str, part: str) -> None:
        super().__init__(config)
        self.kind, self.part = kind, part

    def data(self) -> Data:
        collate = {"collate": {"collate": drawn_in_collate}}.get(self.kind, {})
        return Data(READ_IN_THREADS[self.kind](), **collate)

    def train_data(self) -> Data:
        return self.data() if self.part == "train" else super().train_data()

    def eval_data(self) -> Data | None:
        return self.data() if self.part == "eval" else super().eval_data()


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize("kind", READ_IN_THREADS)
def test_random_numbers_of_global_generators_are_refused_where_threads_read(
    kind: str, part: str, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1, limit_train_batches=1))
    options = {"kind": kind, "part": part}
    if kind in ("by processes", "no draws", "generator of its own"):
        run_tiny(0, 1, config, options, kind=ReadInThreads)
        return
    with pytest.raises(TaskError) as caught:
        run_tiny(0, 1, config, options, kind=ReadInThreads)
    generator = kind if kind in ("torch", "NumPy") else "Python"
    assert f"generator of {generator}," in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ the loss and the model


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


class Forward(TinyTask):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model.forward(batch["x"]), batch["y"])


class Unused(TinyTask):
    def model(self) -> nn.Module:
        made = super().model()
        made.extra = nn.Linear(3, 3)
        return made


class Other(TinyTask):
    """Its loss depends on another network."""

    other = nn.Linear(16, 5)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        model(batch["x"])
        return cross_entropy(self.other(batch["x"].flatten(1)), batch["y"])


def ran(rank: int, size: int, config: Any, kind: type[TinyTask]) -> str:
    return run_tiny(rank, size, config, kind=kind).digest


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Holding, "in Holding.loss: does not call the model that it receives. Call model(...)"),
        (Method, "the task's loss uses model.of_batch, but with several workers"),
        (
            Unused,
            "with several workers: the loss does not depend on extra.weight, extra.bias: ",
        ),
        (Other, "in Other.loss: returned a tensor of shape (), float32; expected a loss that "),
    ],
)
def test_models_and_losses_that_ddp_does_not_support_are_refused_by_all_ranks(
    workers: Group, tmp_path: Path, kind: type[TinyTask], text: str
) -> None:
    for end in workers.outcomes(3, ran, plain(tiny_config(tmp_path, "run")), kind):
        assert isinstance(end, Raised)
        assert text in end.text


@pytest.mark.parametrize("kind", [Holding, Method])
def test_losses_that_bypass_ddp_work_with_exact_and_with_one_worker(
    workers: Group, tmp_path: Path, kind: type[TinyTask]
) -> None:
    exact = plain(tiny_config(tmp_path, "exact", epochs=1, exact=True))
    assert len({*workers(3, ran, exact, kind)}) == 1
    workers(1, ran, plain(tiny_config(tmp_path, "alone", epochs=1)), kind)


def test_unused_parameters_are_accepted_with_find_unused_parameters(
    workers: Group, tmp_path: Path
) -> None:
    plainly = tiny_config(tmp_path, "forward", epochs=1)
    assert len({*workers(3, ran, plain(plainly), Forward)}) == 1
    allowed = tiny_config(tmp_path, "run", epochs=1, ddp=DdpConfig(find_unused_parameters=True))
    assert len({*workers(3, ran, plain(allowed), Unused)}) == 1


class Drops(TinyTask):
    """Its model does not use some parameters in each step, on each rank."""

    first = 1  # the first step in which a parameter may be unused
    chance = 0.5

    def __init__(self, config: TrainConfig, first: int = 1) -> None:
        super().__init__(config)
        self.first = first

    def model(self) -> nn.Module:
        made = super().model()
        made.extra = nn.Linear(24, 24)
        made.dropout.register_forward_hook(self.add)  # before the head
        return made

    def add(self, module: nn.Module, _: Any, features: Tensor) -> Tensor:
        return features + self.made.extra(features) if self.uses(module.training) else features

    def at(self) -> bool:
        """Whether it is this step or a later one."""
        assert self.session is not None
        return self.session.step >= self.first

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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [Drops, DropsOnOneRank, DropsOnAll])
@pytest.mark.parametrize(
    ("first", "changes"),
    [
        (0, {}),  # already in the warm-up
        (1, {}),
        (1, {"micro_batch": 4}),
        (5, {"micro_batch": 4, "ddp": DdpConfig(gradient_as_bucket_view=False)}),
        (5, {"ddp": DdpConfig(compression="bf16", bucket_cap_mb=0.001)}),
        (4, {"ddp": DdpConfig(static_graph=True)}),
        (4, {"compute": ComputeConfig(precision="fp16")}),
    ],
)
def test_parameters_that_a_rank_does_not_use_in_a_step_are_named_at_once_by_all_ranks(
    workers: Group,
    tmp_path: Path,
    size: int,
    kind: type[Drops],
    first: int,
    changes: dict[str, Any],
) -> None:
    config = plain(tiny_config(tmp_path, "run", **changes))
    began = time.monotonic()
    ends = workers.outcomes(size, dropped, config, kind, first)
    assert time.monotonic() - began < 20, "no rank waits for another one until a time limit"
    assert {(end.name, end.exit_status) for end in ends} == {("ConfigError", 2)}
    (line,) = {end.text.strip().splitlines()[-1] for end in ends}
    assert "extra.weight" in line
    assert "--ddp.find-unused-parameters true" in line
    if kind is not Drops and first:
        assert f"in step {first}" in line
    if kind is DropsOnOneRank and first:
        assert "rank 1" in line


class SkipsModel(Drops):
    """Its loss does not depend on the model in some steps, as where no sample is positive."""

    calls = False

    def uses(self, training: bool) -> bool:
        return True

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not model.training or not self.at() or batch["row"][0] % 2:
            return super().loss(model, batch)
        if self.calls:
            model(batch["x"])
        return torch.zeros((), requires_grad=True)


class SkipsOutput(SkipsModel):
    calls = True


@pytest.mark.parametrize("kind", [SkipsModel, SkipsOutput])
@pytest.mark.parametrize("finds", [False, True])
def test_a_loss_without_a_link_to_the_model_on_one_rank_adds_zeros_to_the_gradient(
    workers: Group, tmp_path: Path, kind: type[Drops], finds: bool
) -> None:
    ddp = DdpConfig(find_unused_parameters=finds)
    for size in (2, 3):
        config = tiny_config(tmp_path, f"run-{size}", epochs=1, ddp=ddp)
        assert len({*workers(size, dropped, plain(config), kind, 1)}) == 1
        exact = tiny_config(tmp_path, f"exact-{size}", epochs=1, exact=True)
        workers(size, dropped, plain(exact), kind, 1)
        summed, exactly = weights(config), weights(exact)
        for name, value in summed.items():
            torch.testing.assert_close(value, exactly[name], rtol=1e-4, atol=1e-5)


class CallsOwn(Drops):
    """Calls the model that it made, from a step on."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        is_own = model.training and self.at() and torch.distributed.get_rank() == 1
        return super().loss(self.made if is_own else model, batch)

    def uses(self, training: bool) -> bool:
        return True


def test_a_loss_that_does_not_call_the_given_model_in_a_later_step_is_refused(
    workers: Group, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run"))
    ends = workers.outcomes(3, dropped, config, CallsOwn, 4)
    assert [end.name for end in ends] == ["RuntimeError", "TaskError", "RuntimeError"]
    assert "not the one that it receives" in ends[1].text


@pytest.mark.parametrize("kind", [Drops, DropsOnOneRank, DropsOnAll])
def test_unused_parameters_may_vary_with_find_unused_parameters(
    workers: Group, tmp_path: Path, kind: type[Drops]
) -> None:
    ddp = DdpConfig(find_unused_parameters=True)
    for size in (2, 3):
        config = tiny_config(tmp_path, f"run-{size}", epochs=1, ddp=ddp)
        assert len({*workers(size, dropped, plain(config), kind, 1)}) == 1
    if kind is not DropsOnOneRank:  # which depends on the number of workers
        exact = [tiny_config(tmp_path, f"exact-{n}", epochs=1, exact=True, ddp=ddp) for n in "123"]
        ends = [workers(n, dropped, plain(c), kind, 0) for n, c in enumerate(exact, 1)]
        assert len({end for each in ends for end in each}) == 1


class Remembering(nn.Module):
    """Its forward pass keeps something, by `kind`, in an attribute of this module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, TinyNet(norm=False)
        self.h: Any = {"list": [torch.zeros(())], "dict": {"h": torch.zeros(())}, "counter": 0}.get(
            kind, torch.zeros(())
        )
        if kind in ("none at first", "cache", "last output"):
            self.h = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        now, factor = y.detach().mean(), torch.ones(())
        if self.kind == "tensor":
            factor = self.h = 0.9 * self.h + now
        elif self.kind == "in place":
            factor = self.h.add_(now).clone()
        elif self.kind == "data":
            self.h.data.add_(now)
            factor = self.h.clone()
        elif self.kind == "list":
            self.h.append(now)
            factor = torch.stack(self.h).sum()
        elif self.kind == "dict":
            factor = self.h["h"] = self.h["h"] + now
        elif self.kind == "counter":
            self.h += 1
            factor = factor / self.h
        elif self.kind == "none at first":
            factor, self.h = factor if self.h is None else self.h, now
        elif self.kind == "with its graph":
            factor, self.h = self.h.detach(), y.mean()
        elif self.kind == "cache":
            self.h = {**(self.h or {}), len(x): torch.arange(len(x))}
        elif self.kind == "last output":
            self.h = y
        elif self.kind == "steps":
            self.calls = getattr(self, "calls", 0) + 1
        return y * (1 + factor)


class RemembersInModel(TinyTask):
    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config)
        self.kind = kind

    def model(self) -> nn.Module:
        made = nn.Sequential(Remembering(self.kind))
        self.made = made  # type: ignore[assignment]
        return made


class RemembersInTask(TinyTask):
    """Weights its loss by a running mean, and changes its batch, which is allowed."""

    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config)
        self.kind, self.running, self.random = kind, torch.ones(()), random.Random(0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        y = batch.pop("y")
        loss = cross_entropy(model(batch["x"].mul_(0.5)), y)
        if self.kind == "running":
            self.running = 0.9 * self.running + 0.1 * loss.detach()
        noise = self.random.random() if self.kind == "generator" else torch.rand(())
        return loss * self.running + 0 * loss if self.kind == "running" else loss * noise


@pytest.mark.parametrize(
    ("task", "kind", "named"),
    [
        *(
            (RemembersInModel, kind, "model.0.h")
            for kind in ("tensor", "in place", "data", "list", "dict", "counter", "none at first")
        ),
        (RemembersInModel, "with its graph", "model.0.h"),
        (RemembersInModel, "cache", ""),
        (RemembersInModel, "last output", ""),
        (RemembersInTask, "running", "task.running"),
        (RemembersInTask, "generator", "a generator"),
        (RemembersInTask, "seeded", ""),
    ],
)
def test_a_loss_that_depends_on_earlier_calls_is_refused_before_the_first_step(
    task: Any, kind: str, named: str, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    if not named:
        ran = run_tiny(0, 1, config, {"kind": kind}, kind=task)
        assert not any("forward passes" in str(event) for event in ran.events)
        return
    with pytest.raises(TaskError) as caught:
        run_tiny(0, 1, config, {"kind": kind}, kind=task)
    assert named in str(caught.value)
    assert "register_buffer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_count_of_calls_in_a_module_is_noted(tmp_path: Path) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    ran = run_tiny(0, 1, config, {"kind": "steps"}, kind=RemembersInModel)
    assert any("forward passes change model.0.calls" in str(event) for event in ran.events)


class WithoutPositives(TinyTask):
    """Its loss depends on the model only if a sample of the micro-batch is positive."""

    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config, norm=False)
        self.kind = kind

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        step = self.session.step if self.session is not None else 0
        is_negative = step == 2 or (step > 2 and int(batch["row"][0]) % 3 == 0)
        if is_negative and model.training:
            if self.kind == "does not call":
                return torch.zeros((), requires_grad=True)
            model(batch["x"])
            return torch.zeros((), requires_grad=True) * 2
        return super().loss(model, batch)


def trained_weights(rank: int, size: int, config: Any, kind: str) -> list[Tensor]:
    task: list[WithoutPositives] = []

    class Kept(WithoutPositives):
        def __init__(self, config: TrainConfig, kind: str) -> None:
            super().__init__(config, kind)
            task.append(self)

    run_tiny(rank, size, config, {"kind": kind}, kind=Kept)
    return [each.detach().clone() for each in task[0].made.parameters()]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["calls", "does not call"])
def test_a_loss_without_a_link_to_the_model_counts_as_gradients_of_zero(
    size: int, kind: str, workers: Group, tmp_path: Path
) -> None:
    """In one step on all ranks, later on some of them; weight decay and momentum as with exact."""
    optim = OptimConfig(lr=0.05, weight_decay=0.1)
    found = []
    for exact in (True, False):
        config = tiny_config(tmp_path, f"exact-{exact}", epochs=1, exact=exact, optim=optim)
        found.append(workers(size, trained_weights, plain(config), kind)[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Compiled(TinyTask):
    """Its model is compiled by a backend that raises this error."""

    def __init__(self, config: TrainConfig, error: Exception) -> None:
        super().__init__(config)
        self.error = error

    def model(self) -> nn.Module:
        def backend(graph: Any, inputs: Any) -> Any:
            raise self.error

        made = super().model()
        made.compile(backend=backend)
        return made


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 does not call this backend")
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PermissionError(13, "Permission denied", "/cache/x.so"), 3),
        (ImportError("/cache/x.so: failed to map segment from shared object"), 3),
        (InvalidCxxCompiler(), 3),
        (CppCompileError(["g++", "x.cpp"], "x.cpp:1:10: fatal error: Python.h: No such file"), 3),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), 3),
        (NotImplementedError("no such operation\nin the second line"), 1),
        (AssertionError(), 1),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_failure_of_torch_compile_is_one_line(
    error: Exception, status: int, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    with pytest.raises(RaytrainError) as caught:
        run_tiny(0, 1, config, {"error": error}, kind=Compiled)
    assert caught.value.exit_status == status
    assert "\n" not in str(caught.value)
    assert "--compute.no-compile" in str(caught.value)


class Unsuitable(TinyTask):
    def __init__(self, config: TrainConfig, change: Any) -> None:
        super().__init__(config)
        self.change = change

    def model(self) -> Any:
        self.made = nn.Sequential(super().model())  # type: ignore[assignment]
        return self.change(self.made)


def filled(made: nn.Module, name: str, value: float) -> nn.Module:
    tensor = {**dict(made.named_parameters()), **dict(made.named_buffers())}[name]
    with torch.no_grad():
        tensor.view(-1)[0] = value
    return made


def in_inference_mode(_: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return TinyNet()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda made: filled(made, "0.norm.running_mean", math.nan), "0.norm.running_mean"),
        (lambda made: filled(made, "0.head.weight", math.nan), "0.head.weight"),
        (lambda made: filled(made, "0.head.bias", math.inf), "0.head.bias"),
        (lambda made: made.to("meta"), "meta device"),
        (lambda made: made.append(nn.Linear(5, 5, device="meta")), "1 is on the meta device"),
        (lambda made: made.append(nn.LazyLinear(5)), "1 has no weights yet"),
        (lambda made: made.append(nn.LazyBatchNorm1d(affine=False)), "1 has no weights yet"),
        (nn.DataParallel, "DataParallel"),
        (lambda made: made.requires_grad_(False), "frozen"),
        (in_inference_mode, "inference_mode"),
        (lambda made: None, "returned None"),
        (lambda made: TinyNet, "Return TinyNet()"),
        (lambda made: made.state_dict(), "expected a torch.nn.Module"),
        (lambda made: made.forward, "expected a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(
    change: Any, named: str, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    with pytest.raises(TaskError) as caught:
        run_tiny(0, 1, config, {"change": change}, kind=Unsuitable)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: filled(made, "0.norm.running_var", math.inf),
        lambda made: made.share_memory(),
        lambda made: made.eval(),
    ],
)
def test_an_unusual_model_is_trained(change: Any, tmp_path: Path) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1, limit_train_batches=2))
    run_tiny(0, 1, config, {"change": change}, kind=Unsuitable)


def test_numpy_numbers_are_accepted_as_scalars() -> None:
    loss = torch.ones((), requires_grad=True)
    values = {"a": np.float32(0.5), "b": np.float64(0.25), "c": np.int64(3)}
    _, scalars = loss_of_task(TinyTask(TrainConfig()), (loss, values), needs_gradient=True)
    assert {name: float(value) for name, value in scalars.items()} == {"a": 0.5, "b": 0.25, "c": 3}


class Scheduled(TinyTask):
    def __init__(self, config: TrainConfig, kind: str) -> None:
        super().__init__(config)
        self.kind = kind

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=0.04)
        if self.kind == "cycle":
            OneCycleLR(made, max_lr=0.04, total_steps=30)
        else:
            self.scheduler = LinearLR(made, 0.01)
        return made


@pytest.mark.parametrize("kind", ["cycle", "linear"])
def test_a_torch_scheduler_on_the_tasks_optimizer_is_refused(tmp_path: Path, kind: str) -> None:
    task = {"kind": kind}
    with pytest.raises(TaskError, match="the AdamW has a learning rate scheduler"):
        run_tiny(0, 1, plain(tiny_config(tmp_path, "run")), task, kind=Scheduled)


# ------------------------------------------------------------------ batches and metrics


class Channels(TinyTask):
    """Its batches are tuples whose first tensor has the channels of one sample."""

    evaluates = False

    def train_data(self) -> Data:
        return super().train_data() if self.evaluates else self.wrong()

    def eval_data(self) -> Data:
        return self.wrong() if self.evaluates else super().eval_data()  # type: ignore[return-value]

    def wrong(self) -> Data:
        return Data(
            MapSource([(torch.ones(3, 4, 4), 1)] * 60), lambda items: (*zip(*items, strict=True),)
        )


class ChannelsInEvaluation(Channels):
    evaluates = True


@pytest.mark.parametrize("kind", [Channels, ChannelsInEvaluation])
def test_a_wrong_number_of_samples_is_found_before_the_first_step(
    tmp_path: Path, kind: type[TinyTask]
) -> None:
    with pytest.raises(DataError, match=r"3 samples for 8 records.*Data\(source, collate, count="):
        run_tiny(0, 1, plain(tiny_config(tmp_path, "run")), kind=kind)
    config = tiny_config(tmp_path, "more", eval=EvalConfig(micro_batch=2))
    if kind is ChannelsInEvaluation:
        with pytest.raises(TaskError, match="3 samples for 2 records"):
            run_tiny(0, 1, plain(config), kind=kind)


class Dropping(TinyTask):
    """Drops a row of its evaluation set, but not in the first batch."""

    def eval_data(self) -> Data:
        data = super().eval_data()
        assert data is not None

        def collate(records: Any, _: Any) -> Batch:
            good = records["row"] != 30
            return {n: torch.from_numpy(array[good]) for n, array in records.items()}

        return Data(data.source, collate)


def test_an_evaluation_that_drops_a_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"returned 7 samples for 8 records.*bad_records is error"):
        run_tiny(0, 1, plain(tiny_config(tmp_path, "run", epochs=1)), kind=Dropping)


class Attribute(Metric):
    """Counts in an attribute, which is not merged."""

    full_state_update = False
    higher_is_better = True
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.count = 0

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / max(1, self.count)


class Counted(Attribute):
    """Counts in a state."""

    count: Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        del self.count
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.total / self.count


class Lazy(Counted):
    """`compute` uses an attribute that the first update sets."""

    def update(self, values: Tensor) -> None:
        super().update(values)
        self.scale = 2.0

    def compute(self) -> Tensor:
        return super().compute() * self.scale


class Stateless(Metric):
    full_state_update = False

    def update(self, values: Tensor) -> None:
        self.value = values.mean()

    def compute(self) -> Tensor:
        return self.value


class Measured(TinyTask):
    def __init__(self, config: TrainConfig, metric: str) -> None:
        super().__init__(config)
        self.metric, self.monitor = metric, "m"

    def metrics(self) -> dict[str, Any]:
        return {"m": {"a": Attribute, "c": Counted, "s": Stateless, "l": Lazy}[self.metric]()}

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Any) -> None:
        metrics["m"].update((model(batch["x"]).argmax(1) == batch["y"]).float())


def test_a_metric_that_keeps_values_outside_of_its_states_is_refused(tmp_path: Path) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    with pytest.raises(TaskError, match=r"'m' cannot be merged.*must be a state \(add_state\)"):
        run_tiny(0, 1, config, {"metric": "a"}, kind=Measured)
    with pytest.raises(TaskError, match=r"no attribute 'scale'\. Everything that compute"):
        run_tiny(0, 1, config, {"metric": "l"}, kind=Measured)
    with pytest.raises(TaskError, match=r"Stateless has no states: .*\(add_state\)"):
        run_tiny(0, 1, config, {"metric": "s"}, kind=Measured)


class Misnamed(TinyTask):
    def metrics(self) -> dict[str, Any]:
        return {**super().metrics(), "step": Counted()}


def test_a_metric_with_a_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Misnamed\.metrics: .* names other than 'step', which"):
        run_tiny(0, 1, plain(tiny_config(tmp_path, "run", epochs=1)), kind=Misnamed)


def test_a_goal_that_contradicts_its_metric_is_noted(tmp_path: Path) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    told = run_tiny(0, 1, config, {"metric": "c"}, kind=Measured).events
    notes = [event["text"] for event in told if event["kind"] == "note"]
    assert any("goal = 'min', but the metric says that a higher m is better" in n for n in notes)


# ------------------------------------------------------------------ sources


def test_arrays_may_be_tensors_or_lists() -> None:
    source = ArraySource({"x": torch.arange(6).view(3, 2), "y": [4, 5, 6]})
    records = source.read(np.array([2, 0]))
    assert records["x"].tolist() == [[4, 5], [0, 1]]
    assert records["y"].tolist() == [6, 4]


def test_an_unsuitable_source_is_refused_with_the_name_of_the_right_one() -> None:
    class Raw(TinyTask):
        def train_data(self) -> Data:
            return Data(TensorDataset(torch.ones(3)))  # type: ignore[arg-type]

    with pytest.raises(TaskError, match=r"Wrap it: MapSource\(dataset\), or IterableSource"):
        train_data_of(Raw(TrainConfig()), 0)
    for dataset in (Shuffling(), (number for number in range(3))):
        with pytest.raises(DataError, match="Use IterableSource for data that can only"):
            MapSource(dataset)
    with pytest.raises(DataError, match="It must yield all items on each worker"):
        IterableSource(Shuffling(), rows=50).read(np.arange(30, 50))


# ------------------------------------------------------------------ forbidden changes in a step


class Changing(TinyTask):
    """Does something that a plain loop would allow.

    Args:
        what: the mistake.
    """

    def __init__(self, config: TrainConfig, what: str) -> None:
        super().__init__(config)
        self.what, self.calls, self.factor = what, 0, 1.0
        self.apart = nn.Linear(5, 5)
        self.own: torch.optim.Optimizer | None = None

    def model(self) -> nn.Module:
        made = super().model()
        if self.what == "unfreezes":
            next(made.parameters()).requires_grad_(False)
        elif self.what == "wraps":
            return nn.Sequential(nn.DataParallel(made))
        elif self.what == "forgets":
            made.register_buffer("seen", torch.zeros(()), persistent=False)
            made.calls = 0  # type: ignore[assignment]
            made.cache, made.value = None, math.nan  # type: ignore[assignment]
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return self.own

    def schedule(self, step: int) -> float:
        return self.factor

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.what == "forgets" and model.training:
            self.made.seen += 1  # type: ignore[operator]
            self.made.calls += 1  # type: ignore[operator]
            self.made.cache = len(batch["x"])  # type: ignore[assignment]
            self.calls += 1
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


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "apart",
            r"Changing\.loss: the loss depends on parameters .* shapes \[5, 5\], \[5\]: they",
        ),
        (
            "wraps",
            r"a model that is not wrapped\. 0 is a DataParallel: return the module inside it",
        ),
        ("backward", r"Changing\.loss: calls backward\(\) itself. Only return the loss"),
        ("unfreezes", r"unfreezes conv\.weight in step 1, .* its group until then"),
        ("rates", r"Changing\.after_step: sets a learning rate, .*: define schedule\(step\)"),
        ("schedules", r"schedule: returned \[0\.5\] for step 1, but \[1\.0\] at the start"),
    ],
)
def test_actions_of_a_task_that_would_have_no_effect_are_refused(
    tmp_path: Path, what: str, text: str
) -> None:
    with pytest.raises(TaskError, match=text):
        run_tiny(0, 1, plain(tiny_config(tmp_path, "run")), {"what": what}, kind=Changing)


def ran_changing(rank: int, size: int, config: Any, what: str) -> list[dict[str, Any]]:
    return run_tiny(rank, size, config, {"what": what}, kind=Changing).events


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("freezes", r"freezes conv\.weight in step 1, .* its group from then on"),
        (
            "gathers",
            r"calls collectives \(allgather\), but a step has 4 micro-batches for 3 workers",
        ),
    ],
)
def test_actions_of_a_task_that_would_block_other_workers_are_refused(
    workers: Group, tmp_path: Path, what: str, text: str
) -> None:
    config = plain(tiny_config(tmp_path, "run"))
    for end in workers.outcomes(3, ran_changing, config, what):
        assert isinstance(end, Raised)
        assert re.search(text, end.text)
    exact = plain(tiny_config(tmp_path, "exact", epochs=1, exact=True))
    ends = workers.outcomes(2, ran_changing, exact, what)
    texts = {"freezes": "in step 1, but the set", "gathers": "--exact sums gradients in between"}
    assert all(texts[what] in end.text for end in ends)
    of_each = plain(tiny_config(tmp_path, "even", epochs=1, micro_batch=16))
    workers(2, ran_changing, {**of_each}, what if what == "gathers" else "")


def test_changed_state_that_checkpoints_do_not_contain_is_noted(tmp_path: Path) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1))
    notes = [e["text"] for e in ran_changing(0, 1, config, "forgets") if e["kind"] == "note"]
    changed = "the buffer seen (persistent=False), task.calls, model.calls"
    assert any(f"forward passes change {changed}. Checkpoints do not" in text for text in notes)
    assert not any("forward passes" in str(e) for e in ran_changing(0, 1, config, ""))


# ------------------------------------------------------------------ tracebacks


@pytest.mark.parametrize(
    ("path", "is_foreign"),
    [
        (f"{Path(raytrain_ddp.__file__).parent}/training/steps/turn.py", False),
        (f"{Path(raytrain_ddp.__file__).parent}_mine/task.py", True),
        ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", False),
        ("/venv/lib/python3.11/site-packages/timm/torch/layers.py", True),
        (contextlib.__file__, False),
        ("<ipython-input-3-12ab>", True),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_frames_of_user_code_are_recognized_by_path(path: str, is_foreign: bool) -> None:
    assert user_code.is_foreign(path) == is_foreign


def users_forward(layer: nn.Module) -> Tensor:
    return layer(torch.ones(2, 3))  # type: ignore[no-any-return]


def test_an_error_of_a_torch_operation_names_the_users_line() -> None:
    torch.use_deterministic_algorithms(True)
    layer = nn.Linear(4, 4)
    try:
        with naming_nondeterministic(layer):
            users_forward(layer)
    except RuntimeError as error:
        text = users_traceback(error)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "return layer(torch.ones(2, 3))" in text
    assert "determinism.py" not in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "mat1 and mat2 shapes" in last
