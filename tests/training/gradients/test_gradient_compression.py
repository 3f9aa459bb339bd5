"""Compressed gradients, with three gloo processes: the promises hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group, Raised
from tiny import (
    EPOCHS,
    TOTAL_STEPS,
    ScriptedSession,
    TinyTask,
    WorkerResult,
    bits,
    decode_tensors,
    newest,
    plain,
    run_tiny,
    tiny_config,
    weights,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.checkpoint.run_folder import read_history, run_storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig, DdpConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.gradients.gradient_compression import compress
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.prepare import prepare
from raytrain_ddp.training.runtime.world import World

POWERSGD = DdpConfig(compression="powersgd", powersgd_rank=1)
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"ddp": DdpConfig(compression="bf16")},
    "powersgd": {"ddp": POWERSGD},
    "powersgd-adamw-clip-fp16": {
        "ddp": DdpConfig(compression="powersgd", powersgd_rank=2, gradient_as_bucket_view=False),
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="fp16", channels_last=True),
    },
}


def losses_of(config: TrainConfig) -> list[float]:
    history = read_history(run_storage(config))
    return [record["loss"] for record in history if record["kind"] == "train"]


def kept(config: TrainConfig) -> dict[str, Tensor]:
    return decode_tensors(newest(config).read("compression.safetensors"))


class Whole:
    """Uninterrupted runs on three workers; each compression is run once."""

    def __init__(self, workers: Group, folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._done: dict[str, tuple[TrainConfig, list[WorkerResult]]] = {}

    def __call__(self, way: str) -> tuple[TrainConfig, list[WorkerResult]]:
        if way not in self._done:
            config = tiny_config(self._folder, way, **WAYS[way])
            self._done[way] = config, self._workers(3, run_tiny, plain(config))
        return self._done[way]


@pytest.fixture(scope="module")
def whole(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(workers, tmp_path_factory.mktemp("whole"))


# ------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_end_with_the_same_weights_to_the_last_bit(way: str, whole: Whole):
    config, ran = whole(way)
    assert {worker.outcome.step for worker in ran} == {TOTAL_STEPS}
    assert len({worker.digest for worker in ran}) == 1
    assert losses_of(config)[-1] < 0.7 * losses_of(config)[0]


@pytest.mark.parametrize("way", ["bf16", "powersgd", "powersgd-adamw-clip-fp16"])
def test_a_stopped_and_killed_run_ends_with_the_bits_of_an_uninterrupted_run(
    way: str, whole: Whole, workers: Group, tmp_path: Path
):
    """Promise 3 holds for PowerSGD, too: each worker's residual is in the checkpoint."""
    reference, _ = whole(way)
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, "broken", **{**WAYS[way], "checkpoint": often})
    workers(3, run_tiny, plain(config), None, 7)  # asked to stop
    *others, last = workers.outcomes(3, run_tiny, plain(config), None, 0, 18)
    assert last == Died(9)
    assert all(isinstance(other, Raised) for other in others)
    ran = workers(3, run_tiny, plain(config))
    assert 7 < ran[0].start_step < 18
    assert bits(config) == bits(reference)
    assert losses_of(config) == losses_of(reference)
    if way != "bf16":
        assert all(
            torch.equal(tensor, kept(reference)[name]) for name, tensor in kept(config).items()
        )


def test_a_resized_run_keeps_the_mean_of_the_residuals(
    whole: Whole, workers: Group, tmp_path: Path
):
    """Only the sum of the residuals matters, so two workers can use the mean of three."""
    reference, _ = whole("powersgd")
    config = tiny_config(tmp_path, "resized", **WAYS["powersgd"])
    for size, stop in ((3, 4), (2, 15), (3, 0)):
        workers(size, run_tiny, plain(config), None, stop)
    assert losses_of(config) == pytest.approx(losses_of(reference), rel=1e-4)
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, weights(reference)[name], rtol=1e-3, atol=1e-4)


def test_powersgd_gives_the_same_losses_with_several_buckets(
    whole: Whole, workers: Group, tmp_path: Path
):
    """With torch's own hook, gloo aborts. (Bits differ: BLAS depends on a matrix's alignment.)"""
    several = {"bucket_cap_mb": 0.0005, "find_unused_parameters": True}
    config = tiny_config(tmp_path, "buckets", ddp=dataclasses.replace(POWERSGD, **several))
    workers(3, run_tiny, plain(config))
    assert losses_of(config) == pytest.approx(losses_of(whole("powersgd")[0]), rel=1e-4)


def test_with_powersgd_a_nonfinite_step_leaves_residuals_finite_and_ranks_equal(
    workers: Group, tmp_path: Path
):
    """One rank's loss is NaN once an epoch."""
    optim = OptimConfig(lr=0.05, nonfinite="skip")
    config = tiny_config(tmp_path, "odd", ddp=POWERSGD, optim=optim)
    ran = workers(3, run_tiny, plain(config), {"nan_row": 100})
    assert len({worker.digest for worker in ran}) == 1
    assert sum("is nan" in str(event.get("text")) for event in ran[0].events) == EPOCHS
    assert all(tensor.isfinite().all() for tensor in kept(config).values())
    assert losses_of(config)[-1] < losses_of(config)[0]


@pytest.mark.each_version
def test_a_run_continued_by_one_worker_keeps_no_compression_state(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "alone", ddp=POWERSGD)
    for size, stop in ((3, 4), (1, 8), (3, 12)):
        (first, *_) = workers(size, run_tiny, plain(config), None, stop)
        assert first.start_step == stop - 4
        assert ("compression.safetensors" in newest(config).manifest.files) == (size > 1)


def test_powersgd_sends_gradients_uncompressed_if_compression_would_not_shrink_them(
    workers: Group, tmp_path: Path
):
    ddp = dataclasses.replace(POWERSGD, powersgd_rank=100)
    configs = [tiny_config(tmp_path, "none"), tiny_config(tmp_path, "all", ddp=ddp)]
    for config in configs:
        workers(3, run_tiny, plain(config), None, 12)
    workers(3, run_tiny, plain(configs[1]), None, 14)  # reads its empty residuals
    losses = [losses_of(config)[:12] for config in configs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ------------------------------------------------------------------ step by step


class GivenGradients(nn.Module):
    """Gets the given gradients for a kernel, a matrix, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        kernel = torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last)
        self.all = nn.ParameterList([kernel, torch.zeros(40, 60), torch.zeros(7)])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum()


STEPS, REFUSED = 5, 2
Stepped = tuple[list[list[Any]], list[list[Any]], list[dict[str, Any]]]


def stepped(rank: int, size: int, ddp: DdpConfig) -> Stepped:
    """(own gradients, averaged gradients, the states before each step and after the last)."""
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    net = DistributedDataParallel(GivenGradients(), bucket_cap_mb=0.001)
    compression = compress(net, TrainConfig(ddp=ddp), scaler, world, Clock(world.device))
    compression.forget()
    random = torch.Generator().manual_seed(rank)
    own, averaged, states = [], [], [compression.gather()]
    for step in range(STEPS):
        gradients = [torch.randn(p.shape, generator=random) for p in net.parameters()]
        net.zero_grad()
        scaler.scale(net(gradients) / size).backward()  # the hook undoes DDP's division
        scale = scaler.get_scale()
        averaged.append([(p.grad / scale).numpy() for p in net.parameters()])
        own.append([gradient.numpy() for gradient in gradients])
        compression.finish(torch.tensor(step == REFUSED))
        states.append(compression.gather())
        scaler.update(new_scale=16.0 if step else 8.0)
    return own, averaged, [{k: v.numpy() for k, v in state.items()} for state in states]


@pytest.fixture(scope="module")
def powersgd_steps(workers: Group) -> list[Stepped]:
    return workers(3, stepped, POWERSGD)


def test_powersgd_sends_one_power_iteration_of_matrices_and_uncompressed_vectors(
    powersgd_steps: list[Stepped],
):
    """Compared with the paper's algorithm on the mean gradient, in one process."""
    _, averaged, states = powersgd_steps[0]
    means = [
        sum(parts) / 3 for parts in zip(*(own[0] for own, _, _ in powersgd_steps), strict=True)
    ]
    kernel, matrix, bias = map(torch.from_numpy, means)
    right = torch.from_numpy(states[0]["right"]).split([144, 60])
    for mean, start, got in (
        (kernel.permute(0, 2, 3, 1).reshape(32, 144), right[0], averaged[0][0]),
        (matrix, right[1], averaged[0][1]),
    ):
        left = mean @ start
        left /= left.norm()
        expected = torch.outer(left, mean.T @ left)
        sent = torch.from_numpy(got)
        sent = sent.permute(0, 2, 3, 1).reshape(32, 144) if sent.ndim == 4 else sent
        torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(averaged[0][2]), bias)


def test_the_residuals_have_what_powersgd_did_not_send_at_any_fp16_loss_scale(
    powersgd_steps: list[Stepped],
):
    """What was sent and the residuals add up to all gradients, except those of a refused step."""
    steps = [step for step in range(STEPS) if step != REFUSED]
    for place, shape in ((0, (32, 144)), (1, (40, 60))):
        given = sum(own[step][place] for own, _, _ in powersgd_steps for step in steps) / 3
        sent = sum(powersgd_steps[0][1][step][place] for step in steps)
        missing = torch.from_numpy(given - sent)
        missing = missing.permute(0, 2, 3, 1) if missing.ndim == 4 else missing
        residual = torch.from_numpy(powersgd_steps[0][2][-1]["residual"]).mean(0)
        residual = residual.split([32 * 144, 40 * 60])[place].view(shape)
        torch.testing.assert_close(residual, missing.reshape(shape), rtol=1e-3, atol=1e-4)
        assert residual.norm() > 1


def test_a_refused_step_leaves_residuals_and_factors_unchanged(powersgd_steps: list[Stepped]):
    states = powersgd_steps[0][2]
    for name in ("residual", "right"):
        assert (states[REFUSED][name] == states[REFUSED + 1][name]).all()
        assert (states[REFUSED][name] != states[REFUSED - 1][name]).any()


def state_after_warm_up(
    rank: int, size: int, plain_config: Mapping[str, Any]
) -> tuple[bool, float]:
    """(whether the warm-up changed nothing, the largest residual)."""
    config = from_dict(plain_config)
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    task = TinyTask(config)
    with ScriptedSession(config, world, 0, 0) as session:
        task.session = session
        compression = prepare(config, task, session).state.compression
        before = compression.gather()
        compression.forget()
        after = compression.gather()
    same = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return same, float(before["residual"].abs().max()) if before else 0.0


def test_the_warm_up_does_not_change_the_state_of_powersgd(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "fresh", ddp=POWERSGD)
    assert workers(3, state_after_warm_up, plain(config)) == [(True, 0.0)] * 3


def bf16_without_cuda(rank: int, size: int) -> list[float]:
    """The averaged vector with bf16, in a torch built without CUDA."""
    built_with = torch.version.cuda
    torch.version.cuda = None
    try:
        _, averaged, _ = stepped(rank, size, DdpConfig(compression="bf16"))
    finally:
        torch.version.cuda = built_with
    return [float(value) for value in averaged[0][2]]


def test_bf16_compression_works_in_a_torch_built_without_cuda(workers: Group):
    """DDP recognizes torch's own hook by its name and refuses it there."""
    ranks = workers(3, bf16_without_cuda)
    assert ranks[0] == ranks[1] == ranks[2]
