"""Row 24: steps whose loss or gradient is not finite, with three gloo processes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Died, Group, Raised
from tiny import (
    ROWS,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    ScriptedSession,
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    kept_steps,
    newest,
    plain,
    run_tiny,
    small_state,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import CLOCKS, read_history, run_storage
from raytrain_ddp.checkpoint.snapshot import flatten_state
from raytrain_ddp.checkpoint.tensor_places import view_tensors
from raytrain_ddp.command_line import run_command
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    DdpConfig,
    LogConfig,
    OptimConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan
from raytrain_ddp.errors import DivergedError
from raytrain_ddp.failpoints import arm
from raytrain_ddp.fit import main
from raytrain_ddp.tasks.model_parts import nonfinite
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.prepare import prepare
from raytrain_ddp.training.runtime.seeding import slot_seed
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.state.train_state import TrainState, encode
from raytrain_ddp.training.steps.nonfinite import NonfiniteGuard, StepTrace, through_pinned_memory

SKIP = OptimConfig(lr=0.05, nonfinite="skip")
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": SKIP},
    "adamw-clip-bf16": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5, nonfinite="skip"),
        "compute": ComputeConfig(precision="bf16", channels_last=True),
    },
    "clip": {"optim": dataclasses.replace(SKIP, clip_norm=0.5)},
    "fp16-clip": {
        "optim": dataclasses.replace(SKIP, clip_norm=0.5),
        "compute": ComputeConfig(precision="fp16"),
    },
}


def rows_of(config: TrainConfig, step: int, slot: int, epoch: int = 0) -> list[int]:
    """The rows of a slot in a step (from 1) of an epoch."""
    order = EpochOrder(ArraySource(tiny_arrays(ROWS, 0), 16).blocks, "full", config.seed, epoch)
    plan = Plan(ROWS, config.slots, config.micro_batch)
    return [int(row) for row in order.read(*plan.span(step - 1, slot))]


# ------------------------------------------------------------------ step by step


class OddTask(TinyTask):
    """Something becomes nonfinite in the batch that has `nan_row`."""

    def __init__(self, config: TrainConfig, nan_row: int) -> None:
        super().__init__(config)
        self._odd_row = nan_row

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        assert self.session is not None
        odd = self.session.step > 0 and self._odd_row in batch["row"].tolist()
        return self.make_nonfinite(loss, model, batch) if odd else loss

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError


class InfiniteLoss(OddTask):
    """The loss is infinite, but the gradient is finite."""

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        return loss + math.inf


class InfiniteLossAndAnEmptyWeight(InfiniteLoss):
    """A parameter without elements has no gradient that could show a nonfinite loss."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("empty", nn.Parameter(torch.empty(0)))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) + self.made.get_parameter("empty").sum()


class InfiniteVariance(OddTask):
    """Only batch norm's variance becomes infinite."""

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        variance = dict(model.named_buffers())["module.norm.running_var"]
        variance.data[2] = math.inf  # autograd has saved it, so bypass that
        return loss


class HugeGradient(OddTask):
    """The gradient is finite, but its square is not."""

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        return loss + model(batch["x"]).sum() * 1e25


class Overflow(TinyTask):
    """Each gradient is too large for fp16, but no loss is."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        assert self.session is not None
        return loss + model(batch["x"]).float().sum() * 1e25 if self.session.step else loss


class Steep(TinyTask):
    """Gradients overflow in fp16 above some loss scale."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * 300


class NoBuffers(TinyTask):
    """Only gradients are averaged over ranks."""

    def __init__(self, config: TrainConfig, nan_row: int) -> None:
        super().__init__(config, norm=False)


_TASKS = (
    TinyTask,
    InfiniteLoss,
    InfiniteLossAndAnEmptyWeight,
    InfiniteVariance,
    HugeGradient,
    Overflow,
    Steep,
    NoBuffers,
)
TASKS = {task.__name__: task for task in _TASKS}


@dataclass(frozen=True)
class Stepped:
    """Hashes of (model, optimizer) after each step, from step 0, and how it ended."""

    states: Sequence[tuple[str, str]]
    error: str
    nonfinite: int
    scale: float
    events: Sequence[Mapping[str, Any]]


def take_steps(
    rank: int,
    size: int,
    plain_config: Mapping[str, Any],
    steps: int,
    failpoints: str = "",
    folder: str = "",
    leave_out: int = 0,
    task_name: str = "TinyTask",
    nan_row: int = -1,
) -> Stepped:
    """Takes `steps` steps; undoes the step `leave_out`."""
    config = from_dict(plain_config)
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    task = TASKS[task_name](config, nan_row=nan_row)
    error = ""
    with ScriptedSession(config, world, 0, 0) as session:
        task.session = session
        run = prepare(config, task, session)
        state = run.state
        states = [hashes(state)]
        arm(failpoints, folder)
        with closing(run.feed.steps(0, steps)) as feed:
            for slots, samples in feed:
                session.step = state.step + 1
                model, optimizer = state.model.state_dict(), state.optimizer.state_dict()
                before = deepcopy((model, optimizer)) if session.step == leave_out else None
                try:
                    run.stepper(slots, samples, run.rates(state.step))
                except DivergedError as diverged:
                    error = str(diverged)
                if before is not None:
                    state.model.load_state_dict(before[0])
                    state.optimizer.load_state_dict(before[1])
                states.append(hashes(state))
                if error:
                    break
        arm("", folder)
    return Stepped(states, error, state.nonfinite, state.scaler.get_scale(), session.events)


def hashes(state: TrainState) -> tuple[str, str]:
    model = list(state.model.state_dict().values())
    optimizer = list(flatten_state(state.optimizer.state_dict())[0].values())
    return digest(model), digest(optimizer)


def digest(tensors: Sequence[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_24_a_step_with_nan_on_one_rank_equals_a_step_without_an_update(
    variant: str, step: int, workers: Group, tmp_path: Path
):
    """Weights, buffers, and optimizer are equal bit for bit; the first step has no state yet."""
    spoilt = tiny_config(tmp_path, "spoilt", **VARIANTS[variant])
    clean = tiny_config(tmp_path, "clean", **VARIANTS[variant])
    nan = f"train.loss:nan@rank=1,step={step}"
    ours = workers(3, take_steps, plain(spoilt), 8, nan, str(tmp_path / "fired"))
    theirs = workers(3, take_steps, plain(clean), 8, "", "", step)
    assert (tmp_path / "fired" / "fired-0").exists()
    ours_after, theirs_after = ([r.states[step + 1 :] for r in runs] for runs in (ours, theirs))
    assert ours_after == theirs_after
    assert [r.states[step][0] for r in ours] == [ours[0].states[step - 1][0]] * 3
    if step > 1:
        assert [r.states[step] for r in ours] == [ours[0].states[step - 1]] * 3
    assert len({model for model, _ in ours[0].states}) == 8  # every other step changed something
    assert [r.nonfinite for r in ours] == [1] * 3
    assert {r.nonfinite for r in theirs} == {0}
    assert {r.scale for r in ours} == {32768.0 if variant == "fp16-clip" else 1.0}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("InfiniteLoss", "the loss of slot 1 (rank 1) is inf at step 5 (learning rate 0.0227)"),
        ("InfiniteLossAndAnEmptyWeight", "the loss of slot 1 (rank 1) is inf at step 5"),
        ("InfiniteVariance", "a buffer, such as batch norm's variance, would not be finite"),
        ("HugeGradient", "the norm of the gradient is inf at step 5 (learning rate 0.0227), by"),
    ],
)
def test_fault_24_nonfinite_values_outside_of_gradients_are_found_in_the_same_step(
    task: str, said: str, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "odd", optim=OptimConfig(name="adamw", lr=0.05))
    row = rows_of(config, step=5, slot=1)[0]
    ran = workers(3, take_steps, plain(config), 8, "", "", 0, task, row)
    assert len({r.error for r in ran}) == 1
    assert said in ran[0].error
    assert [len(r.states) for r in ran] == [6] * 3
    assert all(r.states[5] == ran[0].states[4] for r in ran)


def test_fault_24_fp16_overflows_end_the_run_only_at_a_loss_scale_below_1(
    workers: Group, tmp_path: Path
):
    """The scaler expects overflows while it searches for a scale, but not below a scale of 1."""
    config = tiny_config(tmp_path, "fp16", optim=SKIP, compute=ComputeConfig(precision="fp16"))
    ran = workers(3, take_steps, plain(config), 25, "", "", 0, "Overflow")
    assert {r.error for r in ran} == {ran[0].error}
    # 2 ** 16 is 1 after 16 halvings; the 18th step has a scale of 1/2, and 3 may be skipped.
    assert "step 21" in ran[0].error
    assert [len(r.states) for r in ran] == [22] * 3
    assert {state[0] for r in ran for state in r.states} == {ran[0].states[0][0]}


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_fault_24_fp16_skips_the_same_steps_on_any_number_of_workers(
    compression: str, workers: Group, tmp_path: Path
):
    found = set()
    for size in (1, 3, 4):
        config = tiny_config(
            tmp_path,
            f"on-{size}",
            optim=OptimConfig(lr=1e-5),
            ddp=DdpConfig(compression=compression),
            compute=ComputeConfig(precision="fp16"),
        )
        ran = workers(size, take_steps, plain(config), 12, "", "", 0, "Steep")
        found |= {r.scale for r in ran}
    (scale,) = found
    assert 1 < scale < 2.0**16


@pytest.mark.parametrize("task", ["TinyTask", "NoBuffers"])
def test_fault_24_a_nonfinite_loss_is_not_treated_as_an_fp16_overflow(
    task: str, workers: Group, tmp_path: Path
):
    """The loss is not scaled yet, so a lower scale would not help."""
    config = tiny_config(tmp_path, "fp16", compute=ComputeConfig(precision="fp16"))
    nan = "train.loss:nan@rank=1,step=5"
    ran = workers(3, take_steps, plain(config), 8, nan, str(tmp_path / "fired"), 0, task)
    assert len({r.error for r in ran}) == 1
    assert "the loss of slot 1 (rank 1) is nan at step 5" in ran[0].error
    assert [len(r.states) for r in ran] == [6] * 3
    assert all(r.states[5] == ran[0].states[4] for r in ran)


# ------------------------------------------------------------------ stop


def run_armed(
    rank: int, size: int, failpoints: str, folder: str, config: Mapping[str, Any]
) -> WorkerResult:
    arm(failpoints, folder)
    try:
        return run_tiny(rank, size, config)
    finally:
        arm("", folder)


def notes(ran: WorkerResult) -> list[str]:
    return [event["text"] for event in ran.events if event["kind"] == "note"]


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """Training records without timestamps; NaN equals NaN."""
    history = read_history(run_storage(config))
    log = [{k: v for k, v in record.items() if k not in CLOCKS} for record in history]
    return [{k: str(v) if k == "loss" else v for k, v in record.items()} for record in log]


def test_fault_24_stop_ends_all_ranks_with_6_and_writes_a_file_to_reproduce_the_step(
    workers: Group, tmp_path: Path
):
    config = tiny_config(
        tmp_path,
        "stopped",
        optim=OptimConfig(lr=0.05, clip_norm=1.0),
        checkpoint=CheckpointConfig(every_steps=3, every_s=0.0),
        log=LogConfig(every_steps=10, tensorboard=False),
    )
    nan = "train.loss:nan@rank=1,step=14"
    results = workers.outcomes(3, run_armed, nan, str(tmp_path / "fired"), plain(config))
    assert all(isinstance(result, Raised) for result in results)
    assert {(r.name, r.exit_status) for r in results} == {("DivergedError", 6)}
    lines = {r.text.splitlines()[-1] for r in results}
    assert len(lines) == 1
    (line,) = lines
    for part in ("slot 1 (rank 1)", "is nan at step 14", "diverged-step-00000014.json", "optim.lr"):
        assert part in line
    assert kept_steps(config) == [10, 12]
    assert all(tensor.double().isfinite().all() for tensor in weights(config).values())

    bundle = json.loads((tmp_path / "stopped" / "diverged-step-00000014.json").read_text())
    rate = learning_rate(config, 13, STEPS_PER_EPOCH)
    slots = bundle.pop("slots")
    parameters = bundle.pop("parameters")
    assert bundle == {
        "step": 14,
        "epoch": 1,
        "learning_rate": rate,
        "seed": config.seed,
        "world_size": 3,
        "gradient_norm": "nan",
        "checkpoint": str(newest(config).name),
        "command": f"python -m raytrain_ddp.fit {tmp_path}/stopped/config.toml",
    }
    assert newest(config).name.step == 12
    assert parameters == [name for name, _ in TinyNet().named_parameters()]
    assert [(s["slot"], s["rank"]) for s in slots] == [(0, 0), (1, 1), (2, 2), (3, 2)]
    assert [s["seed"] for s in slots] == [slot_seed(config.seed, 13, slot) for slot in range(4)]
    assert [s["rows"] for s in slots] == [rows_of(config, 4, slot, epoch=1) for slot in range(4)]
    assert slots[1]["loss"] == "nan"
    assert all(math.isfinite(s["loss"]) for s in slots if s["slot"] != 1)


@pytest.mark.parametrize("optim", [OptimConfig(lr=1e12), OptimConfig(name="adamw", lr=1e25)])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_fault_24_a_huge_learning_rate_ends_with_6_and_all_checkpoints_are_finite(
    optim: OptimConfig, policy: Any, workers: Group, tmp_path: Path
):
    """Also if the update itself overflows, with a finite gradient."""
    often = CheckpointConfig(every_steps=1, every_s=0.0, keep_last=99)
    optim = dataclasses.replace(optim, nonfinite=policy)
    config = tiny_config(tmp_path, "huge", optim=optim, checkpoint=often)
    results = workers.outcomes(3, run_tiny, plain(config))
    assert {(r.name, r.exit_status) for r in results} == {("DivergedError", 6)}
    assert len({r.text.splitlines()[-1] for r in results}) == 1
    for tensor in (weights(config) if kept_steps(config) else {}).values():
        assert tensor.double().isfinite().all()


def run_fit(rank: int, size: int, folder: str, argv: Sequence[str]) -> tuple[Any, str]:
    """Exit status and output of ``fit`` in a process that has already imported torch."""
    before, out = (os.getcwd(), sys.argv), io.StringIO()
    arm("train.loss:nan@step=2", f"{folder}/fired")
    os.chdir(folder)
    sys.argv = ["fit", *argv]
    try:
        with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as end:
            run_command(main)
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        arm("", folder)
    return end.value.code, out.getvalue()


def test_fault_24_the_command_exits_with_6_and_the_cause_without_a_traceback(
    workers: Group, tmp_path: Path
):
    flags = ["--local", "--name", "diverged", "--epochs", "1", "--data.workers", "1"]
    ((status, out),) = workers(1, run_fit, str(tmp_path), flags)
    assert status == 6, out
    assert "the loss of slot 0 (rank 0) is nan at step 2" in " ".join(out.split())
    assert "Traceback" not in out
    assert (tmp_path / "runs" / "diverged" / "diverged-step-00000002.json").is_file()


# ------------------------------------------------------------------ skip


@pytest.fixture(scope="module")
def skipping_run(
    workers: Group, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainConfig, Any]:
    """An uninterrupted run with one bad row, so three of 30 steps are skipped."""
    config = tiny_config(
        tmp_path_factory.mktemp("skip"),
        "whole",
        optim=SKIP,
        checkpoint=CheckpointConfig(every_steps=4, every_s=0.0),
    )
    options = {"nan_row": rows_of(config, step=5, slot=1)[0]}
    return config, (options, workers(3, run_tiny, plain(config), options))


def bad_steps(config: TrainConfig, row: int) -> list[tuple[int, int]]:
    """(step, slot) of each occurrence of the row."""
    return [
        (epoch * STEPS_PER_EPOCH + step, slot)
        for epoch in range(config.epochs)
        for step in range(1, STEPS_PER_EPOCH + 1)
        for slot in range(config.slots)
        if row in rows_of(config, step, slot, epoch)
    ]


def test_fault_24_skip_continues_reports_each_step_and_counts_them_in_the_log(skipping_run: Any):
    config, (options, ran) = skipping_run
    bad = bad_steps(config, options["nan_row"])
    assert len(bad) == config.epochs
    assert {r.outcome.step for r in ran} == {TOTAL_STEPS}
    assert len({r.digest for r in ran}) == 1
    assert [[note for note in notes(r) if "skipped" in note] for r in ran[1:]] == [[], []]
    reported = [note for note in notes(ran[0]) if "skipped" in note]
    for number, ((step, slot), note) in enumerate(zip(bad, reported, strict=True), 1):
        rank = [0, 1, 2, 2][slot]
        assert note.startswith(f"The loss of slot {slot} (rank {rank}) is nan at step {step} ")
        assert note.endswith(f"({number} of at most 3).")
    log = [record for record in log_of(config) if record["kind"] == "train"]
    assert [r["step"] for r in log] == list(range(1, TOTAL_STEPS + 1))
    assert [r["step"] for r in log if r["loss"] == "nan"] == [step for step, _ in bad]
    counts = [sum(step <= r["step"] for step, _ in bad) for r in log]
    assert [r["nonfinite"] for r in log] == counts
    assert not list((Path(config.storage) / "whole").glob("diverged*"))


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_fault_24_a_run_resumed_around_a_skipped_step_ends_with_the_same_bits(
    way: str, skipping_run: Any, workers: Group, tmp_path: Path
):
    whole, (options, _) = skipping_run
    config = dataclasses.replace(whole, name=way, storage=str(tmp_path))
    (first, _), (second, _), _ = bad_steps(config, options["nan_row"])
    if way == "stopped":
        workers(3, run_tiny, plain(config), options, first)
        assert newest(config).name.step == first  # the last step was skipped
    else:
        *_, last = workers.outcomes(3, run_tiny, plain(config), options, 0, second + 1)
        assert last == Died(9)
        assert first < newest(config).name.step <= second
    assert json.loads(newest(config).read("state.json"))["nonfinite"] >= 1
    ran = workers(3, run_tiny, plain(config), options)
    assert ran[0].start_step > 0
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
    assert log_of(config) == log_of(whole)


def test_fault_24_more_skipped_steps_than_allowed_end_the_run_also_after_a_resume(
    skipping_run: Any, workers: Group, tmp_path: Path
):
    whole, (options, _) = skipping_run
    optim = dataclasses.replace(SKIP, max_nonfinite=1)
    config = dataclasses.replace(whole, name="few", storage=str(tmp_path), optim=optim)
    (first, _), (second, slot), _ = bad_steps(config, options["nan_row"])
    workers(3, run_tiny, plain(config), options, first)
    results = workers.outcomes(3, run_tiny, plain(config), options)
    assert {(r.name, r.exit_status) for r in results} == {("DivergedError", 6)}
    text = results[0].text
    assert f"the loss of slot {slot} " in text
    assert f"is nan at step {second} " in text
    assert "1 such steps (optim.max_nonfinite)" in text
    assert (tmp_path / "few" / f"diverged-step-{second:08d}.json").is_file()
    assert max(kept_steps(config)) < second


# ------------------------------------------------------------------ the guard in one process


def is_refused(guard: NonfiniteGuard, state: TrainState, loss_factor: float) -> bool:
    """Uses the guard as a step does; returns whether the step is refused."""
    state.optimizer.zero_grad(set_to_none=True)
    loss = state.model(torch.ones(5, 3)).sum()
    with guard.watching(0, loss.detach() * loss_factor):
        loss.backward()
    _, refused = guard.examine(0.1, torch.zeros((), dtype=torch.float64))
    state.step += 1
    guard.follow()
    return bool(refused)


def test_on_a_gpu_the_flag_of_a_step_is_read_one_step_later_and_before_a_checkpoint():
    """With a fake GPU that records when flags are copied and read."""
    state, happened = small_state(), []

    def fetch(flag: Tensor) -> Callable[[], bool]:
        step = state.step + 1
        happened.append(f"copied {step}")

        def read() -> bool:
            happened.append(f"read {step}")
            return bool(flag)

        return read

    judged: list[StepTrace] = []
    guard = NonfiniteGuard(state, judged.append, fetch, lag=1)
    seen = []
    for factor in (1.0, math.nan, 1.0, math.inf):
        refused = is_refused(guard, state, factor)
        seen.append((refused, [trace.step for trace in judged]))
    assert seen == [(False, []), (True, []), (False, [2]), (True, [2])]
    assert happened == [
        "copied 1",
        "copied 2",
        "read 1",
        "copied 3",
        "read 2",
        "copied 4",
        "read 3",
    ]
    guard.settle()
    guard.settle()  # nothing is pending anymore
    assert happened[7:] == ["read 4"]
    assert [trace.step for trace in judged] == [2, 4]
    assert math.isnan(judged[0].losses[0].item())  # of step 2, although another followed
    assert math.isinf(judged[1].losses[0].item())


@pytest.mark.gpu
def test_a_flag_comes_from_a_real_gpu_without_a_wait_when_its_copy_starts():
    slow = torch.ones(4000, 4000, device="cuda")
    for _ in range(50):
        slow = slow @ slow / 4000
    read = through_pinned_memory(slow.sum() > 0)
    pending = not torch.cuda.current_stream().query()
    assert read() is True
    assert pending  # the copy was started while the device was busy
    assert through_pinned_memory(torch.zeros((), device="cuda") > 0)() is False


def test_the_guard_does_not_change_finite_gradients():
    guarded, free = small_state(), small_state()
    judged: list[StepTrace] = []
    guard = NonfiniteGuard(guarded, judged.append, lambda flag: lambda: bool(flag), lag=0)
    assert not is_refused(guard, guarded, 1.0)
    free.model(torch.ones(5, 3)).sum().backward()
    pairs = zip(guarded.model.parameters(), free.model.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert is_refused(guard, guarded, math.nan)
    assert len(judged) == 1
    norms = zip(judged[0].names, judged[0].norms, strict=True)
    bad = [name for name, norm in norms if norm.isnan()]
    assert bad == [judged[0].sentinel] == ["2.bias"]


def test_a_state_is_not_finite_if_a_weight_is_nan_or_infinite_or_a_buffer_is_nan():
    state = small_state()
    state.model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    assert not nonfinite(state.model)
    buffers = [buffer for buffer in state.model.buffers() if buffer.is_floating_point()]
    for tensor in (*state.model.parameters(), *buffers):
        for value in (math.nan, math.inf):
            kept = tensor.detach().clone()
            with torch.no_grad():
                tensor.view(-1)[-1] = value
            buffer = not isinstance(tensor, nn.Parameter)
            assert (not nonfinite(state.model)) == (buffer and value == math.inf)
            with torch.no_grad():
                tensor.copy_(kept)
    assert not nonfinite(state.model)
    table = nn.Parameter(torch.full((700, 100), 250.0, dtype=torch.float16), requires_grad=False)
    state.model.register_parameter("table", table)
    assert not nonfinite(state.model)  # although the norm of its values exceeds the range of fp16
    table.data[0, 0] = math.inf
    assert nonfinite(state.model)


def test_fault_47_a_checkpoint_without_a_nonfinite_count_loads_and_keeps_fused_kernels():
    """torch would take the choice of kernels from the checkpoint."""
    old = small_state()
    old.step = 7
    snapshot = old.snapshot(None, [])  # type: ignore[arg-type]
    encoded = encode(snapshot).items()
    files = {name: data if isinstance(data, bytes) else b"".join(data) for name, data in encoded}
    progress = json.loads(files["state.json"])
    del progress["nonfinite"]
    text = json.dumps(progress)
    assert '["fused", true]' in text
    files["state.json"] = text.replace('["fused", true]', '["fused", null]').encode()

    @dataclass
    class Stored:
        manifest = SimpleNamespace(files=files)

        def has(self, name: str) -> bool:
            return name in files

        def read(self, name: str) -> bytes:
            return files[name]

        def tensors(self, name: str) -> dict[str, Tensor]:
            return view_tensors(memoryview(bytearray(files[name])))

    new = small_state()
    new.nonfinite = 9
    new.load(Stored())  # type: ignore[arg-type]
    assert (new.step, new.nonfinite) == (7, 0)
    assert [group["fused"] for group in new.optimizer.param_groups] == [True, True]
