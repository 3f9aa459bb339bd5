"""ddp.shard_optimizer, with three gloo processes: the bits and the checkpoints are those of a run
without it, and each rank has only its share of the optimizer state."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import Died, Group, Raised
from test_several_optimizers import Watched, gan_config
from tiny import (
    TOTAL_STEPS,
    ScriptedSession,
    TinyTask,
    newest,
    plain,
    run_tiny,
    tiny_config,
)
from torch import nn

from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    DdpConfig,
    EmaConfig,
    OptimConfig,
    ScalingConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.training.optimizer import optimizer_shares
from raytrain_ddp.training.optimizer.optimizer_shares import Shares, deal
from raytrain_ddp.training.optimizer.optimizer_state import parameters_of
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of
from raytrain_ddp.training.runtime.world import World

SHARED = DdpConfig(shard_optimizer=True)
OFTEN = CheckpointConfig(every_steps=4, every_s=0.0)
ADAMW = OptimConfig(name="adamw", lr=0.01, clip_norm=0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},  # two slots on one of three ranks: gradients are accumulated
    "exact-adamw-clip-ema": {"exact": True, "optim": ADAMW, "ema": EmaConfig(decay=0.9)},
    "fp16-channels-last": {
        "optim": ADAMW,
        "compute": ComputeConfig(precision="fp16", channels_last=True),
    },
    "powersgd": {"ddp": DdpConfig(compression="powersgd", powersgd_rank=1)},
}


def with_shares(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(
        config,
        name=f"{config.name}-shared",
        ddp=dataclasses.replace(config.ddp, shard_optimizer=True),
    )


def files(config: TrainConfig) -> dict[str, str]:
    """Hashes of all tensors in the newest checkpoint, and of the optimizer's structure."""
    checkpoint = newest(config)
    rest = json.loads(checkpoint.read("state.json"))["optimizer"]
    named = checkpoint.manifest.files.items()
    hashes = {name: file.sha256 for name, file in named if name.endswith(".safetensors")}
    return hashes | {"rest": json.dumps(rest)}


class Unshared:
    """Runs on three workers without shares; each variant is run once."""

    def __init__(self, workers: Group, folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._done: dict[str, TrainConfig] = {}

    def __call__(self, variant: str) -> TrainConfig:
        if variant not in self._done:
            config = tiny_config(self._folder, variant, checkpoint=OFTEN, **VARIANTS[variant])
            self._workers(3, run_tiny, plain(config))
            self._done[variant] = config
        return self._done[variant]


@pytest.fixture(scope="module")
def whole(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Unshared:
    return Unshared(workers, tmp_path_factory.mktemp("whole"))


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_checkpoints_equal_those_of_a_run_without_shares(
    variant: str, whole: Unshared, workers: Group
):
    reference = whole(variant)
    config = with_shares(reference)
    ran = workers(3, run_tiny, plain(config))
    assert {worker.outcome.step for worker in ran} == {TOTAL_STEPS}
    assert len({worker.digest for worker in ran}) == 1
    assert files(config) == files(reference)


@pytest.mark.parametrize("variant", ["exact-adamw-clip-ema", "powersgd"])
def test_stops_kills_and_if_exact_resizes_with_or_without_shares_give_the_same_bits(
    variant: str, whole: Unshared, workers: Group, tmp_path: Path
):
    """Checkpoints are the same whether the state was divided or not."""
    reference = whole(variant)
    without = tiny_config(tmp_path, "disturbed", checkpoint=OFTEN, **VARIANTS[variant])
    shared = dataclasses.replace(with_shares(without), name="disturbed")
    sizes = (3, 2, 3, 1, 3) if without.exact else (3,) * 5
    workers(sizes[0], run_tiny, plain(shared), None, 5)  # asked to stop
    workers(sizes[1], run_tiny, plain(without), None, 9)
    *others, last = workers.outcomes(sizes[2], run_tiny, plain(shared), None, 0, 18)
    assert last == Died(9)
    assert all(isinstance(other, Raised) for other in others)
    ran = workers(sizes[3], run_tiny, plain(shared), None, 22)
    assert 9 < ran[0].start_step < 18
    workers(sizes[4], run_tiny, plain(shared))
    assert files(shared) == files(reference)


@pytest.mark.parametrize("kind", ["exact", "ddp"])
def test_several_optimizers_have_the_same_bits_with_shares(
    kind: str, workers: Group, tmp_path: Path
):
    config = gan_config(tmp_path, kind, exact=kind == "exact")
    for each in (config, with_shares(config)):
        workers(3, run_tiny, plain(each), None, 0, 0, None, Watched)
    assert files(with_shares(config)) == files(config)


def test_a_nonfinite_step_is_skipped_by_all_ranks(workers: Group, tmp_path: Path):
    """Fused optimizers skip it on the device, each rank for its own share."""
    optim = OptimConfig(name="adamw", lr=0.01, nonfinite="skip", max_nonfinite=5)
    config = tiny_config(tmp_path, "skipped", optim=optim)
    for each in (config, with_shares(config)):
        ran = workers(3, run_tiny, plain(each), {"nan_row": 100})
        assert len({worker.digest for worker in ran}) == 1
    assert files(with_shares(config)) == files(config)


def die_in_exchange(session: ScriptedSession) -> None:
    """Rank 1 dies in the eighth exchange: it has an update that the others lack."""
    run, calls = optimizer_shares._Exchange.__call__, [0]

    def exchange(self: Any) -> None:
        calls[0] += 1
        if (session.world.rank, calls[0]) == (1, 8):
            os._exit(9)
        run(self)

    optimizer_shares._Exchange.__call__ = exchange  # type: ignore[method-assign]


def die_in_checkpoint(session: ScriptedSession) -> None:
    """Rank 1 dies in the second checkpoint, before it has sent its share."""
    send, calls = optimizer_shares._send, [0]

    def sending(state: Any) -> None:
        calls[0] += 1
        if (session.world.rank, calls[0]) == (1, 2):
            os._exit(9)
        send(state)

    optimizer_shares._send = sending


@pytest.mark.parametrize("prepare_session", [die_in_exchange, die_in_checkpoint])
def test_fault_01_a_death_while_shares_are_sent_ends_all_and_the_resume_gives_the_same_bits(
    prepare_session: Any, whole: Unshared, workers: Group, tmp_path: Path
):
    reference = whole("sgd")
    config = dataclasses.replace(
        with_shares(reference), name="dies", storage=str(tmp_path), checkpoint=OFTEN
    )
    own = Group()  # these processes are patched
    try:
        first, dead, last = own.outcomes(
            3, run_tiny, plain(config), None, 0, 0, prepare_session, wait_s=10
        )
        assert dead == Died(9)
        assert isinstance(first, Raised)
        assert isinstance(last, Raised)
    finally:
        own.end()
    ran = workers(3, run_tiny, plain(config))
    assert ran[0].start_step == 4
    assert files(config) == files(reference)


# ------------------------------------------------------------------ what each rank has


class UnusualParameters(nn.Module):
    """Parameters of several dtypes, memory formats, and sizes; one has gaps, one is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kernel = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.coarse = nn.Parameter(torch.randn(7, 3).to(torch.bfloat16))
        self.fine = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.gaps = nn.Parameter(torch.randn(9, 4)[:, :3])
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.large = nn.Parameter(torch.randn(300, 41))
        self.late = nn.Parameter(torch.randn(11))


def train_unusual(rank: int, size: int, shared: bool, round_bytes: int) -> tuple[Any, int, int]:
    """(the weights and the state, bytes of this rank's state, bytes of the whole state)."""
    # This process serves other tests, together with newer processes.
    with mock.patch.multiple(optimizer_shares, _ROUND_BYTES=round_bytes, _LEAST_BYTES=round_bytes):
        return _train_unusual(rank, size, shared)


def _train_unusual(rank: int, size: int, shared: bool) -> tuple[Any, int, int]:
    model, world = UnusualParameters(), World(rank, size, rank, torch.device("cpu"), 1)
    named = dict(model.named_parameters())
    groups = [{"params": [named.pop("coarse")], "lr": 0.1}, {"params": [*named.values()]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    shares = Shares(optimizer, world if shared else None)
    assert not shared or shares.is_divided
    marks: list[str] = []
    for number in range(3):
        model.late.requires_grad_(number > 0)
        torch.manual_seed(number)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape).to(parameter)
            parameter.grad = gradient if parameter.requires_grad else None
        before = [parameter.grad for parameter in model.parameters()]
        shares.step(optimizer, marks.append)
        after = [parameter.grad for parameter in model.parameters()]
        assert all(one is other for one, other in zip(before, after, strict=True))
    assert marks == ["optimizer", "communication"] * 3 * shared
    own = sum(t.nbytes for each in optimizer.state.values() for t in each.values())
    taken = shares.whole(optimizer)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    state = [(name, tensor.clone()) for name, tensor in taken.tensors.items()]
    return (weights, state, taken.rest), own, sum(tensor.nbytes for _, tensor in state)


@pytest.mark.parametrize("round_bytes", [64, 1 << 26])
def test_each_rank_has_only_its_share_and_all_get_the_updated_weights(
    round_bytes: int, workers: Group
):
    (alone, _, total), *_ = [train_unusual(0, 1, False, round_bytes)]
    ran = workers(3, train_unusual, True, round_bytes)
    for (weights, _, _), _, _ in ran:
        for one, other in zip(weights, alone[0], strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
    (_, state, rest), _, _ = ran[0]
    assert [name for name, _ in state] == [name for name, _ in alone[1]]
    assert rest == alone[2]
    for (_, one), (_, other) in zip(state, alone[1], strict=True):
        assert torch.equal(one, other)
    assert sum(own for _, own, _ in ran) == total
    assert all(0 < own < total for _, own, _ in ran)


def test_parameters_are_assigned_by_size_and_deterministically():
    sizes = [5, 100, 30, 30, 40, 5, 0]
    owners = deal(sizes, 3)
    assert owners == deal(sizes, 3) == [1, 0, 2, 2, 1, 1, 1]
    assert deal(sizes, 1) == [0] * 7
    assert deal([7], 3) == [0]


def test_optimizer_state_of_other_ranks_shares_is_freed():
    task = TinyTask(TrainConfig())
    model = task.model()
    optimizer = optimizer_of(task, model, TrainConfig())
    assert len(optimizer.state) == 8
    world = World(1, 3, 1, torch.device("cpu"), 1)
    Shares(optimizer, world)
    owners = deal([each.nbytes for each in parameters_of(optimizer)], 3)
    assert len(optimizer.state) == owners.count(1) < 8


# ------------------------------------------------------------------ what is refused


class Global(torch.optim.SGD):
    """Clips by the norm of all gradients, like timm's LAMB."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for p in parameters_of(self) if p.grad is not None]
        nn.utils.clip_grad_norm_(every, 1.0)
        super().step()


class Estimating(torch.optim.SGD):
    """Keeps a sum over all parameters in a group, like Prodigy."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        every = [p.grad.abs().sum().item() for p in parameters_of(self) if p.grad is not None]
        self.param_groups[0]["sum"] = self.param_groups[0].get("sum", 0.0) + sum(every)


class Noisy(torch.optim.SGD):
    """Draws random numbers for all parameters from one generator."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in parameters_of(self):
            if parameter.grad is not None:
                parameter.grad += torch.randn_like(parameter)
        super().step()


class Averaging(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


class ChosenOptimizerTask(TinyTask):
    """Uses the optimizer class `kind`."""

    kind: Any

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.kind(model.parameters(), lr=0.1)
        return made


@pytest.mark.parametrize("kind", [Global, Estimating, Noisy, Averaging])
def test_an_optimizer_whose_steps_depend_on_all_parameters_is_refused(kind: Any):
    config = TrainConfig()
    task = ChosenOptimizerTask(config)
    task.kind = kind
    optimizer_of(task, task.model(), config)  # accepted without shares
    with pytest.raises(TaskError) as raised:
        optimizer_of(task, task.model(), TrainConfig(ddp=SHARED))
    (line,) = str(raised.value).splitlines()
    assert f"the {kind.__name__} cannot be divided (ddp.shard_optimizer)" in line


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "Adafactor", "ASGD", "NAdam"])
def test_other_optimizers_of_torch_are_accepted(name: str):
    task = ChosenOptimizerTask(TrainConfig())
    task.kind = getattr(torch.optim, name)
    optimizer = optimizer_of(task, task.model(), TrainConfig(ddp=SHARED))
    assert not any(
        len(state) and "step" in state and state["step"] for state in optimizer.state.values()
    )


def test_on_divergence_resync_is_refused_with_shares():
    with pytest.raises(ConfigError, match=r"^scaling\.on_divergence = 'resync'.*shard_optimizer"):
        TrainConfig(ddp=SHARED, scaling=ScalingConfig(on_divergence="resync"))
