"""Training in gloo processes without Ray: the promises of design.md section 2.

Most tests use three processes: with two, DDP has only one order of sums, which hides some errors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logs import log_of
from processes import ENVIRONMENT, Died, Group, Raised
from tiny import (
    EPOCHS,
    EVAL_ROWS,
    ROWS,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    Mean,
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    kept_steps,
    newest,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import nn
from torch.nn.functional import cross_entropy
from warm_python import WarmPython

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import METRICS_FILE, find_checkpoint
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointName, CheckpointStore
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ScheduleConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.loading.loader import eval_batches
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan, items_of_rank
from raytrain_ddp.driver import finish
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.events import Eval
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.training.gradients.buffer_sync import BoolBuffers, SlotBuffers
from raytrain_ddp.training.metrics.evaluation import evaluate
from raytrain_ddp.training.metrics.metric_states import require_mergeable, scalars
from raytrain_ddp.training.optimizer.lr_schedule import build_optimizer, learning_rate
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.state.train_state import TrainState, encode

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw-clip-bf16-block": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="bf16", channels_last=True),
        "data": DataConfig(workers=2, shuffle="block", shuffle_window=4),
    },
    "fp16": {"compute": ComputeConfig(precision="fp16")},
}


def losses_of(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in log_of(config) if record["kind"] == "train"]


def rows_by_step(ran: list[WorkerResult]) -> dict[int, list[int]]:
    """The rows of each step in the order of the slots."""
    steps: dict[int, list[int]] = {}
    for worker in ran:  # slots are assigned in order
        for step, rows in worker.seen:
            steps.setdefault(step, []).extend(rows)
    return steps


class Reference:
    """Uninterrupted runs on three workers; each variant is run once."""

    def __init__(self, workers: Group, folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._done: dict[str, tuple[TrainConfig, list[WorkerResult]]] = {}

    def __call__(self, variant: str) -> tuple[TrainConfig, list[WorkerResult]]:
        if variant not in self._done:
            config = tiny_config(self._folder, variant, **VARIANTS[variant])
            self._done[variant] = config, self._workers(3, run_tiny, plain(config))
        return self._done[variant]


@pytest.fixture(scope="module")
def reference(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(workers, tmp_path_factory.mktemp("reference"))


# ------------------------------------------------------------------ bitwise resume


def test_the_reference_uses_each_row_once_per_epoch_and_learns(reference: Reference):
    config, ran = reference("sgd")
    steps = rows_by_step(ran)
    assert sorted(steps) == list(range(1, TOTAL_STEPS + 1))
    for epoch in range(EPOCHS):
        first = epoch * STEPS_PER_EPOCH + 1
        rows = [row for step in range(first, first + STEPS_PER_EPOCH) for row in steps[step]]
        assert sorted(rows) == list(range(ROWS))
    assert len({worker.digest for worker in ran}) == 1  # all ranks end with the same model
    log = log_of(config)
    assert [r["step"] for r in log if r["kind"] == "train"] == list(range(1, TOTAL_STEPS + 1))
    assert [r["step"] for r in log if r["kind"] == "eval"] == [10, 20, 30]
    assert losses_of(config)[-1] < losses_of(config)[0]


@pytest.mark.parametrize(
    ("variant", "stops"),
    [
        ("sgd", (1,)),
        ("sgd", (STEPS_PER_EPOCH,)),
        ("sgd", (5, 14, 17)),
        ("sgd", (TOTAL_STEPS - 1,)),
        ("adamw-clip-bf16-block", (14,)),
        ("fp16", (24,)),  # after the scaler found an infinity and halved the scale
    ],
)
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(
    variant: str, stops: tuple[int, ...], reference: Reference, workers: Group, tmp_path: Path
):
    """Promise 3. Only one rank is asked to stop; all stop after that step."""
    whole, _ = reference(variant)
    config = tiny_config(tmp_path, "stopped", **VARIANTS[variant])
    start = 0
    for stop in stops:
        ran = workers(3, run_tiny, plain(config), None, stop)
        assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(stop, 15)}
        assert (ran[0].start_step, newest(config).name.step) == (start, stop)
        start = stop
    ran = workers(3, run_tiny, plain(config))
    assert (ran[0].start_step, ran[0].outcome.step) == (start, ran[0].outcome.total_steps)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")  # scaler, best
    assert log_of(config) == log_of(whole)


@pytest.mark.parametrize(("variant", "die_at"), [("sgd", 17), ("adamw-clip-bf16-block", 26)])
@pytest.mark.each_version
def test_fault_01_a_killed_and_resumed_run_ends_with_the_same_bits(
    variant: str, die_at: int, reference: Reference, workers: Group, tmp_path: Path
):
    """The log is ahead of the checkpoint when a rank dies; in the end, it has no step twice."""
    whole, _ = reference(variant)
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, "killed", **{**VARIANTS[variant], "checkpoint": often})
    *others, last = workers.outcomes(3, run_tiny, plain(config), None, 0, die_at)
    assert last == Died(9)
    assert all(isinstance(other, Raised) for other in others)
    with (tmp_path / "killed" / METRICS_FILE).open("a") as log:
        log.write('{"kind": "train", "step": 999, "lo')  # torn
    ran = workers(3, run_tiny, plain(config))
    assert 0 < ran[0].start_step < die_at
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)
    assert newest(config).manifest.attempt == 2


def test_a_stop_at_an_evaluation_step_saves_at_once_and_the_resume_runs_the_evaluation(
    reference: Reference, workers: Group, tmp_path: Path
):
    """Also after the last step. A stopped run may have only a few seconds."""
    whole, _ = reference("sgd")
    config = tiny_config(tmp_path, "owing")
    for stop in (STEPS_PER_EPOCH, TOTAL_STEPS):
        ran = workers(3, run_tiny, plain(config), None, stop)
        assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(stop, 15)}
        assert [r["step"] for r in log_of(config) if r["kind"] == "eval"] == [10, 20][: stop // 15]
        assert (newest(config).name.step, newest(config).manifest.finished) == (stop, False)
    ran = workers(3, run_tiny, plain(config))
    assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(TOTAL_STEPS, 0)}
    assert [worker.seen for worker in ran] == [[], [], []]  # no step is repeated
    assert newest(config).manifest.finished
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
    assert newest(config).manifest.metrics == newest(whole).manifest.metrics
    assert log_of(config) == log_of(whole)


@pytest.mark.parametrize(("what", "rows"), [("training", ROWS + 1), ("evaluation", EVAL_ROWS + 1)])
def test_fault_29_a_run_whose_data_changed_is_not_resumed(
    what: str, rows: int, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "grown")
    workers(3, run_tiny, plain(config), None, 12)
    before = bits(config)
    changed = {"rows" if what == "training" else "eval_rows": rows}
    ended = workers.outcomes(3, run_tiny, plain(config), changed)
    for outcome in ended:  # on all ranks, without waiting for others
        assert isinstance(outcome, Raised)
        assert outcome.exit_status == 4
        assert f"the {what} data ({rows} rows" in outcome.text
        fingerprint = newest(config).manifest.data_fingerprint[:12]
        assert (fingerprint in outcome.text) == (what == "training")
    assert bits(config) == before


def test_a_finished_run_that_is_started_again_takes_no_step(reference: Reference, workers: Group):
    config, ran = reference("sgd")
    before = bits(config)
    again = workers(3, run_tiny, plain(config))
    assert [worker.seen for worker in again] == [[], [], []]
    assert {worker.digest for worker in again} == {ran[0].digest}
    assert bits(config) == before


# ------------------------------------------------------------------ the number of workers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_number_of_workers_changes_results_only_by_rounding(
    size: int, reference: Reference, workers: Group, tmp_path: Path
):
    """Promise 1: the same rows in the same slots, and values that differ only by rounding."""
    whole, on_three = reference("sgd")
    config = tiny_config(tmp_path, "sized")
    ran = workers(size, run_tiny, plain(config))
    assert rows_by_step(ran) == rows_by_step(on_three)
    assert losses_of(config) == pytest.approx(losses_of(whole), rel=1e-6)
    assert_close(weights(config), weights(whole))


def test_fault_28_a_resized_run_equals_an_undisturbed_run_within_rounding(
    reference: Reference, workers: Group, tmp_path: Path
):
    whole, on_three = reference("sgd")
    config = tiny_config(tmp_path, "resized")
    steps: dict[int, list[int]] = {}
    for size, stop in ((3, 4), (2, 13), (1, 21), (3, 0)):
        steps |= rows_by_step(workers(size, run_tiny, plain(config), None, stop))
    assert steps == rows_by_step(on_three)
    assert losses_of(config) == pytest.approx(losses_of(whole), rel=1e-6)
    assert_close(weights(config), weights(whole))


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Weights and running statistics are equal within rounding, and integers exactly."""
    assert ours.keys() == theirs.keys()
    assert int(ours["norm.num_batches_tracked"]) == TOTAL_STEPS
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rows", "eval_rows"), [(20, 9), (3, 2), (1, 1)])
def test_fault_23_a_run_with_fewer_rows_than_a_batch_or_workers_equals_one_worker(
    rows: int, eval_rows: int, workers: Group, tmp_path: Path
):
    """Ranks without samples take part in collectives but do not change the weights."""
    options = {"rows": rows, "eval_rows": eval_rows}
    alone, config = (tiny_config(tmp_path, name) for name in ("alone", "three"))
    workers(1, run_tiny, plain(alone), options)
    ran = workers(3, run_tiny, plain(config), options)
    for worker_rows in rows_by_step(ran).values():
        assert sorted(worker_rows) == list(range(rows))
    assert losses_of(config) == pytest.approx(losses_of(alone), rel=1e-6)
    evaluations = [
        [r["metrics"] for r in log_of(c) if r["kind"] == "eval"] for c in (alone, config)
    ]
    assert [m["loss"] for m in evaluations[1]] == pytest.approx([m["loss"] for m in evaluations[0]])
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, weights(alone)[name], rtol=1e-4, atol=1e-6)


def test_uneven_slots_and_a_short_last_step_give_the_gradient_of_the_whole_batch(
    workers: Group, tmp_path: Path
):
    """Four slots on three workers, compared with plain torch and one batch per step."""
    rows, epochs = 75, 2  # 32, 32 and 11 rows: lanes of 18, 19, 19 and 19
    optim = OptimConfig(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    constant = ScheduleConfig(name="constant", warmup_epochs=0.0)
    config = tiny_config(tmp_path, "plain", epochs=epochs, optim=optim, schedule=constant)
    workers(3, run_tiny, plain(config), {"rows": rows, "norm": False})

    torch.manual_seed(config.seed)
    model = TinyNet(norm=False)
    arrays = {name: torch.from_numpy(array) for name, array in tiny_arrays(rows, 0).items()}
    blocks = ArraySource(tiny_arrays(rows, 0), rows_per_block=16).blocks
    plan = Plan(rows, config.slots, config.micro_batch)
    losses = []
    for epoch in range(epochs):
        order = EpochOrder(blocks, "full", config.seed, epoch)
        for step in range(plan.steps_per_epoch):
            spans = [order.read(*plan.span(step, slot)) for slot in range(config.slots)]
            batch = torch.cat([torch.from_numpy(span) for span in spans])
            assert len(batch) == plan.samples(step)
            loss = cross_entropy(model(arrays["x"][batch]), arrays["y"][batch])
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.5 * parameter.grad)
    assert losses_of(config) == pytest.approx(losses, rel=1e-6)
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ NaN losses


def nan_row_of_step(config: TrainConfig, step: int, slot: int) -> int:
    """A row that is in this slot of this step (from 1) of the first epoch."""
    order = EpochOrder(ArraySource(tiny_arrays(ROWS, 0), 16).blocks, "full", config.seed, 0)
    plan = Plan(ROWS, config.slots, config.micro_batch)
    return int(order.read(*plan.span(step - 1, slot))[0])


@pytest.mark.parametrize("log_every", [1, 10])
def test_fault_24_a_nan_loss_on_one_rank_ends_all_ranks_and_is_never_committed(
    log_every: int, workers: Group, tmp_path: Path
):
    config = tiny_config(
        tmp_path,
        "diverged",
        checkpoint=CheckpointConfig(every_steps=2, every_s=0.0),
        log=LogConfig(every_steps=log_every, tensorboard=False),
    )
    options = {"nan_row": nan_row_of_step(config, step=5, slot=1)}  # of rank 1 of three
    results = workers.outcomes(3, run_tiny, plain(config), options)
    assert [type(result) for result in results] == [Raised] * 3
    assert {(r.name, r.exit_status) for r in results} == {("DivergedError", 6)}
    assert all("optim.lr" in r.text and "step" in r.text for r in results)
    assert kept_steps(config) == [2, 4]
    for tensor in weights(config).values():
        assert torch.isfinite(tensor.double()).all()
    assert all(math.isfinite(loss) for loss in losses_of(config))


# ------------------------------------------------------------------ checkpoints


def test_pruning_keeps_the_best_checkpoint_also_after_a_resume(
    workers: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(
        tmp_path / "runs",
        "best",
        epochs=6,
        checkpoint=CheckpointConfig(every_steps=5, every_s=0.0, keep_last=2),
    )
    options = {"scores": [3.0, 1.0, 2.0, 1.0, 5.0, 6.0]}  # the first of equal ones is the best
    workers(1, run_tiny, plain(config), options, 43)
    assert kept_steps(config) == [20, 40, 43]
    (ran,) = workers(1, run_tiny, plain(config), options)
    assert kept_steps(config) == [20, 55, 60]
    assert (ran.outcome.best, ran.outcome.best_step) == (1.0, 20)
    bests = [(r["step"], r["best"]) for r in log_of(config) if r["kind"] == "eval"]
    assert bests == [(10, True), (20, True), (30, False), (40, False), (50, False), (60, False)]
    assert find_checkpoint("best", "best").name.step == 20
    assert find_checkpoint("best", "last").name.step == 60


def test_checkpoints_evaluations_and_log_lines_are_at_the_configured_steps(
    workers: Group, tmp_path: Path
):
    config = tiny_config(
        tmp_path,
        "due",
        checkpoint=CheckpointConfig(every_epochs=2, every_steps=7, every_s=0.0, keep_last=99),
        eval=EvalConfig(every_epochs=2),
        log=LogConfig(every_steps=4, tensorboard=True),
    )
    workers(1, run_tiny, plain(config))
    assert kept_steps(config) == [7, 14, 20, 21, 28, 30]
    log = log_of(config)
    assert [r["step"] for r in log if r["kind"] == "eval"] == [20, 30]
    train_steps = [1, 4, 8, 10, 12, 16, 20, 24, 28, 30]
    assert [r["step"] for r in log if r["kind"] == "train"] == train_steps
    assert newest(config).manifest.finished
    assert json.loads(newest(config).read("log.json"))[-1]["step"] == 30
    assert list((tmp_path / "due" / "tensorboard").iterdir()) != []


# ------------------------------------------------------------------ buffers


class Buffers(nn.Module):
    def __init__(self, constant: torch.Tensor) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("constant", constant)


def step_buffers(rank: int, size: int, constant: torch.Tensor) -> list[list[Any]]:
    """Three steps of four slots with 8, 8, 5 and 0 samples, divided among the workers."""
    model = Buffers(constant)
    buffers = SlotBuffers(model, World(rank, size, rank, torch.device("cpu"), 1))
    samples = (8, 8, 5, 0)
    for step in range(3):
        buffers.begin()
        for slot in items_of_rank(4, size, rank):
            buffers.rewind()
            if samples[slot]:
                generator = torch.Generator().manual_seed(100 * step + slot)
                model.norm(torch.randn(samples[slot], 3, generator=generator))
            buffers.add(slot, samples[slot] / sum(samples), torch.zeros(()))
        refused = ~buffers.agree()[1].isfinite()
        buffers.finish(refused)
    norm = model.norm
    statistics = norm.running_mean.tolist() + norm.running_var.tolist()
    return [statistics, norm.num_batches_tracked.tolist(), model.constant.tolist()]


def test_buffers_do_not_depend_on_the_number_of_workers(workers: Group):
    constant = torch.tensor([0.1, 1e-30, 3e38])
    (alone,) = workers(1, step_buffers, constant)
    assert alone[1:] == [3, constant.tolist()]  # one batch per step; constants do not drift
    for size in (2, 3, 4):
        results = workers(size, step_buffers, constant)
        assert all(result == results[0] for result in results)  # all ranks are equal, bit for bit
        assert results[0][0] == pytest.approx(alone[0], rel=1e-6)
        assert results[0][1:] == alone[1:]


@pytest.mark.parametrize(
    "constant",
    [
        torch.full((2, 2), -math.inf).triu(1),  # the mask of a transformer
        torch.tensor([True, False]),
        torch.tensor([1j, 1 + 1j]),  # rotary embeddings
        torch.tensor([0.5, 3.0], dtype=torch.bfloat16),
        torch.tensor([2**53 + 1, -7]),
        torch.empty(0),
    ],
    ids=["infinite", "bool", "complex", "bfloat16", "large", "empty"],
)
def test_constant_buffers_of_any_kind_do_not_change(constant: torch.Tensor, workers: Group):
    for size in (1, 3):
        for result in workers(size, step_buffers, constant):
            assert result[2] == constant.tolist()


class FlagModel(nn.Module):
    """Bool buffers: one that a pass modifies, one that a pass replaces, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())

    def forward(self, number: int) -> None:
        self.seen[number % 6] = True
        if number % 2:
            self.odd = torch.tensor([number % 4 == 1, number % 4 == 3]) | self.odd


def step_flags(rank: int, size: int) -> tuple[list[list[bool]], int]:
    """The buffers after each of three steps, and how many numbers a step sends."""
    model = FlagModel()
    before = BoolBuffers(model)
    model(1)
    changing = before.changed()
    assert [place.name for place in changing] == ["seen", "odd"]
    model.seen.fill_(False)
    model.odd.fill_(False)
    buffers = SlotBuffers(model, World(rank, size, rank, torch.device("cpu"), 1), changing=changing)
    found = []
    for step in range(3):
        buffers.begin()
        for slot in items_of_rank(4, size, rank):
            buffers.rewind()
            if slot:  # slot 0 has no samples
                model(10 * step + slot)
            buffers.add(slot, slot / 6, torch.zeros(()))
        total = buffers.agree()[1]
        buffers.finish(~total.isfinite() | (step == 1))  # the second step is refused
        found.append(model.seen.tolist() + model.odd.tolist())
    assert model.mask.sum() == 10
    return found, sum(len(change) for change in buffers._change)


def test_bool_buffers_do_not_depend_on_the_number_of_workers_and_masks_are_not_sent(workers: Group):
    seen = [1, 2, 3], [1, 2, 3], [1, 2, 3, 20 % 6 + 1, 20 % 6 + 2, 23 % 6]
    expected = [[n in step for n in range(6)] + [True, True] for step in seen]
    for size in (1, 2, 3, 4):
        for found, sent in workers(size, step_flags):
            assert found == expected
            assert sent == 6 + 2


def test_a_bool_buffer_that_first_changes_after_the_first_pass_is_refused():
    model = FlagModel()
    buffers = SlotBuffers(model, World(0, 1, 0, torch.device("cpu"), 1))
    buffers.begin()
    buffers.add(0, 1.0, torch.zeros(()))
    model.seen[0] = True
    with pytest.raises(ConfigError, match="bool buffer seen changes in this step but did not"):
        buffers.add(1, 1.0, torch.zeros(()))


# ------------------------------------------------------------------ exact evaluation


class RealMetrics(TinyTask):
    def evaluate(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], metrics: Mapping[str, Any]
    ) -> None:
        logits = model(batch["x"])
        metrics["loss"].update(cross_entropy(logits, batch["y"], reduction="none"))
        metrics["top1"].update(logits, batch["y"])
        metrics["auroc"].update(logits.softmax(1), batch["y"])


def evaluate_tiny(rank: int, size: int, eval_rows: int, batch_size: int) -> dict[str, str]:
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    torch.manual_seed(3)
    model = TinyNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = TrainConfig(eval=EvalConfig(micro_batch=batch_size))
    task = RealMetrics(config, eval_rows=eval_rows)
    data = task.eval_data()
    assert data is not None
    metrics = {"loss": MeanMetric(), "top1": MulticlassAccuracy(5, average="micro")}
    metrics["auroc"] = MulticlassAUROC(5)  # its states are lists of all predictions
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics on classes without a sample
        values = evaluate(config, task, model, data, world, LoaderThreads(2), metrics)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return {name: value.hex() for name, value in scalars(values).items()}


@pytest.mark.parametrize(("eval_rows", "batch_size"), [(EVAL_ROWS, 8), (200, 7), (9, 8), (2, 8)])
def test_evaluation_gives_bitwise_equal_metrics_on_1_2_and_3_workers(
    eval_rows: int, batch_size: int, workers: Group
):
    """Promise 2, also with a remainder or fewer chunks than workers; sums, counts, and lists."""
    alone, *others = (
        result
        for size in (1, 2, 3)
        for result in workers(size, evaluate_tiny, eval_rows, batch_size)
    )
    assert others == [alone] * 5


def test_a_metric_that_cannot_be_merged_is_refused_before_the_evaluation():
    """torchmetrics would compute an infinite mean of means, and refuse the others at the end."""
    from torchmetrics import Metric
    from torchmetrics.regression import PearsonCorrCoef

    class Kept(Metric):
        full_state_update = False

        def __init__(self, reduction: str | None) -> None:
            super().__init__()
            self.add_state("kept", torch.zeros(()), dist_reduce_fx=reduction)

        def update(self, values: torch.Tensor) -> None:
            self.kept = values.mean()

        def compute(self) -> torch.Tensor:
            return self.kept

    class Merging(Kept):
        def merge_state(self, incoming_state: Any) -> None:
            self.kept = torch.maximum(self.kept, incoming_state["kept"])

    task = TinyTask(TrainConfig())
    for metric in (Kept("mean"), Kept(None), PearsonCorrCoef()):
        with pytest.raises(TaskError, match="'odd' cannot be merged over chunks of the data"):
            require_mergeable(task, "odd", metric)
    for metric in (Kept("max"), Kept("sum"), Merging("mean")):
        require_mergeable(task, "fine", metric)


def test_evaluation_is_correct_for_metrics_with_list_states(workers: Group):
    """A metric whose states are lists of all predictions, compared with one update of all rows."""
    from torchmetrics.classification import MulticlassAUROC

    torch.manual_seed(3)
    model, task = TinyNet().eval(), TinyTask(TrainConfig(), eval_rows=200)
    data = task.eval_data()
    assert data is not None
    (batch,) = eval_batches(data, 200, range(1), LoaderThreads(0))
    with torch.inference_mode():
        logits = model(batch["x"])
    auroc = MulticlassAUROC(5)(logits.softmax(1), batch["y"]).item()
    for size in (1, 3):
        values = workers(size, evaluate_tiny, 200, 7)[0]
        top1 = (logits.argmax(1) == batch["y"]).double().mean().item()
        expected = {"loss": cross_entropy(logits, batch["y"]).item(), "top1": top1, "auroc": auroc}
        got = {name: float.fromhex(value) for name, value in values.items()}
        assert got == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------ the optimizer


def rates(epochs: int, **schedule: Any) -> list[float]:
    """The learning rates of all steps, five per epoch, for a peak of 2."""
    config = TrainConfig(
        epochs=epochs, optim=OptimConfig(lr=2.0), schedule=ScheduleConfig(**schedule)
    )
    return [learning_rate(config, step, 5) for step in range(5 * epochs)]


def test_the_warm_up_is_linear_and_starts_above_0():
    for name in ("cosine", "step", "constant"):
        climb = rates(4, name=name, warmup_epochs=1.8)[:9]  # 9 steps, then the peak
        assert climb == pytest.approx([2.0 * k / 10 for k in range(1, 10)])


def test_constant_step_and_cosine_schedules_have_the_expected_values():
    assert rates(2, name="constant", warmup_epochs=0.0) == [2.0] * 10
    stairs = rates(4, name="step", warmup_epochs=0.0, step_epochs=1.4, gamma=0.5)
    assert stairs == [2.0] * 7 + [1.0] * 7 + [0.5] * 6
    cosine = rates(4, name="cosine", warmup_epochs=0.0, final_lr=0.1)
    assert cosine == pytest.approx(
        [0.2 + 1.8 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
    )
    after_warm_up = rates(4, name="cosine", warmup_epochs=2.0)[10:]
    assert after_warm_up[0] == 2.0
    assert after_warm_up == sorted(after_warm_up, reverse=True)
    assert after_warm_up[5] == pytest.approx(1.0)  # halfway down
    assert 0 < after_warm_up[-1] < 0.1


def test_a_warm_up_longer_than_the_run_is_accepted():
    assert rates(1, name="cosine", warmup_epochs=3.0) == pytest.approx(
        [2.0 * k / 16 for k in range(1, 6)]
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_does_not_apply_to_biases_and_norm_layers(name: str):
    model = TinyNet()
    model.conv.weight.requires_grad = False
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.3, weight_decay=0.7))
    names = {id(parameter): n for n, parameter in model.named_parameters()}
    groups = {
        group["weight_decay"]: sorted(names[id(p)] for p in group["params"])
        for group in optimizer.param_groups
    }
    assert groups == {
        0.7: ["head.weight", "hidden.weight"],
        0.0: ["conv.bias", "head.bias", "hidden.bias", "norm.bias", "norm.weight"],
    }
    assert {group["lr"] for group in optimizer.param_groups} == {0.3}


def test_momentum_and_betas_are_passed_to_the_optimizer():
    sgd = build_optimizer(TinyNet(), OptimConfig(momentum=0.8, nesterov=False)).param_groups[0]
    assert (sgd["momentum"], sgd["nesterov"]) == (0.8, False)
    assert build_optimizer(TinyNet(), OptimConfig()).param_groups[0]["nesterov"]
    adamw = build_optimizer(TinyNet(), OptimConfig(name="adamw", betas=(0.8, 0.9))).param_groups[0]
    assert adamw["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_label_smoothing_applies_to_the_training_loss_but_not_to_evaluations(smoothing: float):
    task = ImageClassification(TrainConfig(optim=OptimConfig(label_smoothing=smoothing)))
    logits, labels = torch.randn(7, 10), torch.arange(7)
    batch = {"image": torch.zeros(7, 3, 8, 8, dtype=torch.uint8), "label": labels}
    model = TinyNet()  # its forward returns fixed logits
    model.forward = lambda _: logits  # type: ignore[method-assign]
    expected = cross_entropy(logits, labels, label_smoothing=smoothing)
    assert task.loss(model, batch).item() == expected.item()
    metrics = {"loss": Mean()}
    task.evaluate(model, batch, metrics)
    plain_loss = cross_entropy(logits, labels).item()
    assert metrics["loss"].compute().item() == pytest.approx(plain_loss)


@pytest.mark.parametrize("goal", ["min", "max"])
def test_a_nan_metric_is_never_the_best(goal: str):
    model = TinyNet()
    optimizer = build_optimizer(model, OptimConfig())
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))

    def improve(value: float, **others: float) -> bool:
        return state.improve(state.step, {"top1": value, **others}, "top1", goal)

    improve(math.nan)
    state.step = 10
    assert improve(0.5)
    assert not improve(math.nan)
    assert (state.best, state.best_step) == (0.5, 10)


def test_between_equal_metrics_the_lower_loss_is_the_best(tmp_path: Path):
    """In memory, after a restart, and among stored checkpoints."""
    model = TinyNet()
    optimizer = build_optimizer(model, OptimConfig())
    evaluations = [(10, 0.5, 2.0), (20, 0.5, 1.0), (30, 0.5, 1.0), (40, 0.4, 0.1)]
    evaluations += [(50, 0.5, math.nan), (60, 0.5, 0.75), (70, 0.5, 0.8)]
    store = CheckpointStore(open_storage(str(tmp_path / "all")))
    for step, top1, loss in evaluations:
        metrics = {"top1": top1, "loss": loss}
        store.commit(Manifest(step, 0, 1, 1, {}, "x", metrics=metrics), {"a": b""})
    assert Best("top1", "max").among(store) == CheckpointName(60, 1)
    assert Best("top1", "min").among(store) == CheckpointName(40, 1)
    for restart_at in (None, 20, 60):
        state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
        log, best = [], []
        for step, top1, loss in evaluations:
            metrics = {"top1": top1, "loss": loss}
            state.step = step
            best.append(state.improve(step, metrics, "top1", "max"))
            log.append(Eval(step, metrics=metrics))
            if step == restart_at:
                folder = open_storage(str(tmp_path / str(restart_at)))
                manifest = Manifest(step, 0, 1, 1, {}, "x", metrics=metrics)
                files = encode(state.snapshot(manifest, log))
                checkpoint = CheckpointStore(folder).commit(manifest, files)
                state.best_loss = 0.0
                assert len(state.load(checkpoint)) == len(log)
        assert best == [True, True, False, False, False, True, False]
        assert (state.best, state.best_step) == (0.5, 60)


# ------------------------------------------------------------------ the commands without Ray

DIGITS = ["--batch-size", "128", "--micro-batch", "32", "--epochs", "2", "--data.workers", "1"]
DIGITS += ["--log.no-tensorboard"]


def start(folder: Path, name: str, *launcher: str) -> subprocess.Popen[str]:
    """``fit --local`` on the digits, 24 steps."""
    command = [sys.executable, *launcher, "-m", "raytrain_ddp.fit", "--name", name, *DIGITS]
    return WarmPython(
        [*command, "--log.every-steps", "1", *([] if launcher else ["--local"])],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.each_version
def test_fit_under_torchrun_is_one_run_of_two_workers(tmp_path: Path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tmp_path, "pair", *torchrun)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    config = load(str(tmp_path / "runs" / "pair" / "config.toml"))
    config = dataclasses.replace(config, storage=str(tmp_path / "runs"))
    log = log_of(config)
    assert [r["step"] for r in log if r["kind"] == "train"] == list(range(1, 25))
    assert [r["step"] for r in log if r["kind"] == "eval"] == [12, 24]
    assert newest(config).manifest.world_size == 2
    assert (kept_steps(config), newest(config).manifest.attempt) == ([12, 24], 1)
    assert out.count("loading torch") == 1  # only rank 0 prints


def test_other_ranks_wait_for_the_commit_of_rank_0_up_to_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They return when it is listed, or after the time limit."""
    listed = iter([[], [CheckpointName(12, 1)], [CheckpointName(24, 1), CheckpointName(12, 1)]])
    store = SimpleNamespace(names=lambda: next(listed))
    monkeypatch.setattr(finish, "checkpoint_store", lambda _: store)
    finish.wait_for_rank_0(open_storage(str(tmp_path)), 24)
    assert next(listed, None) is None
    monkeypatch.setattr(finish, "_COMMIT_S", 0.2)  # if rank 0 fails, they do not wait forever
    store.names = list
    finish.wait_for_rank_0(open_storage(str(tmp_path)), 36)


def test_fault_35_sigterm_exits_with_143_and_the_same_command_resumes_to_the_same_bits(
    tmp_path: Path,
):
    processes = [start(tmp_path, name) for name in ("whole", "stopped")]
    log = tmp_path / "runs" / "stopped" / METRICS_FILE
    deadline = time.monotonic() + 100
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert processes[1].poll() is None, processes[1].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    whole, stopped = (process.communicate(timeout=100)[0] for process in processes)
    assert (processes[0].returncode, processes[1].returncode) == (0, 143), whole + stopped
    assert "Stopping after this step" in stopped

    config = load(str(tmp_path / "runs" / "stopped" / "config.toml"))
    config = dataclasses.replace(config, storage=str(tmp_path / "runs"))
    interrupted_at = newest(config).name.step
    assert 3 <= interrupted_at < 24
    again = start(tmp_path, "stopped")
    out, _ = again.communicate(timeout=100)
    assert again.returncode == 0, out
    reference = dataclasses.replace(config, name="whole")
    assert bits(config) == bits(reference)
    assert log_of(config) == log_of(reference)


def test_a_caller_in_no_grad_trains_and_stays_there(tmp_path: Path):
    with torch.no_grad():
        result = fit_locally(TrainConfig(name="run", storage=str(tmp_path), steps=2))
        assert not torch.is_grad_enabled()
    assert (result.status, result.step) == ("finished", 2)
