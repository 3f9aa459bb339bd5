"""A task small enough for a test to train it thirty times, with everything that makes equal bits
difficult: batch norm, dropout, augmentation, a remainder, and a last step with an empty slot."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.checkpoint.run_folder import (
    CLOCKS,
    checkpoint_store,
    read_history,
    run_storage,
)
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.recipe import from_dict, to_dict
from raytrain_ddp.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data import order as rows_order
from raytrain_ddp.data.loading.sources import ArraySource, Batch, Data
from raytrain_ddp.data.order import Draws
from raytrain_ddp.events import Event, Outcome, Plan
from raytrain_ddp.failpoints import arm
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.runtime.world import World

CLASSES = 5
ROWS = 291  # 4 lanes of 72, 73, 73 and 73 rows: 9 full steps and one with 0, 1, 1 and 1 rows
STEPS_PER_EPOCH = 10
EVAL_ROWS = 53
EPOCHS = 3
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH
AUDITED = LogConfig(every_steps=1, tensorboard=False, audit=True)


def tiny_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Three epochs of ten steps; `changes` are fields of TrainConfig."""
    sections = {
        "data": DataConfig(workers=1, prefetch=2),
        "optim": OptimConfig(lr=0.05),
        "checkpoint": CheckpointConfig(every_s=0.0),
        "log": LogConfig(every_steps=1, tensorboard=False),
    }
    base = {"epochs": EPOCHS, "batch_size": 32, "micro_batch": 8}
    return TrainConfig(name=name, storage=str(folder), **{**base, **sections, **changes})


class TinyNet(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.hidden = nn.Linear(8 * 16, 24)
        self.dropout = nn.Dropout(0.2 if norm else 0.0)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (n, 1, 4, 4) -> (n, classes)
        features = self.norm(self.conv(x)).relu().flatten(1)
        logits: Tensor = self.head(self.dropout(self.hidden(features).relu()))
        return logits


def tiny_arrays(rows: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.Generator(np.random.Philox(seed))
    x = random.standard_normal((rows, 1, 4, 4)).astype(np.float32)
    y = (x.reshape(rows, 16)[:, :CLASSES]).argmax(1).astype(np.int64)
    return {"x": x, "y": y, "row": np.arange(rows)}


class TinyTask(Task):
    """Classes of random pictures.

    Args:
        rows, eval_rows: sizes of the data sets.
        norm: batch norm, dropout, and augmentation; without them, a plain loop can compute a step.
        nan_row: the loss of a batch with this row is NaN.
        bad_rows: rows that are dropped from their batches, like bad records.
        scores: the losses of consecutive evaluations, instead of the computed ones.
    """

    def __init__(
        self,
        config: TrainConfig,
        rows: int = ROWS,
        eval_rows: int = EVAL_ROWS,
        norm: bool = True,
        nan_row: int = -1,
        bad_rows: Sequence[int] = (),
        scores: Sequence[float] = (),
    ) -> None:
        self._rows, self._eval_rows, self._norm, self._nan_row = rows, eval_rows, norm, nan_row
        self._scores, self._bad_rows = list(scores), list(bad_rows)
        self.seen: list[tuple[int, list[int]]] = []  # (step, rows) of each micro-batch
        self.membership: ScriptedMembership | None = None

    def model(self) -> nn.Module:
        self.made = TinyNet(self._norm)
        return self.made

    def train_data(self) -> Data:
        return Data(ArraySource(tiny_arrays(self._rows, 0), rows_per_block=16), self._augmented)

    def eval_data(self) -> Data | None:
        return Data(ArraySource(tiny_arrays(self._eval_rows, 1)), lambda r, _: _tensors(r))

    def _augmented(self, records: Mapping[str, np.ndarray], draws: Draws) -> Batch:
        batch = _tensors(records)
        if self._norm:
            noise = torch.from_numpy(draws.uniform(16)).float().view(-1, 1, 4, 4)
            batch["x"] = batch["x"] + 0.1 * noise
        good = ~torch.isin(batch["row"], torch.tensor(self._bad_rows))
        return {name: tensor[good] for name, tensor in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        rows = batch["row"].tolist()
        if self.membership is not None and self.membership.step and model.training:
            self.seen.append((self.membership.step, rows))
            if self._nan_row in rows:
                return model(batch["x"]).sum() * math.nan
        return cross_entropy(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Any]:
        return {"loss": Mean(), "top1": Mean()}

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Any]) -> None:
        logits = model(batch["x"]).float()
        loss = cross_entropy(logits, batch["y"], reduction="none")
        if self._scores:
            assert self.membership is not None
            epoch = self.membership.step // STEPS_PER_EPOCH
            loss = torch.full_like(loss, self._scores[epoch - 1])
        metrics["loss"].update(loss)
        metrics["top1"].update((logits.argmax(1) == batch["y"]).float())


class Mean:
    """The part of a torchmetrics metric that `evaluate` needs. Importing torchmetrics takes as long
    as everything else in a worker; test_training.py has tests with the real ones."""

    def __init__(self) -> None:
        self.reset()

    def to(self, _: object) -> Mean:
        return self

    def reset(self) -> None:
        self.metric_state = {"total": torch.zeros(()), "count": torch.zeros(())}

    def update(self, values: Tensor) -> None:
        self.merge_state({"total": values.sum(), "count": torch.tensor(len(values))})

    def merge_state(self, other: Mapping[str, Tensor]) -> None:
        self.metric_state = {name: v + other[name] for name, v in self.metric_state.items()}

    def compute(self) -> Tensor:
        return self.metric_state["total"] / self.metric_state["count"]


def _tensors(records: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in records.items()}


class ScriptedMembership(Membership):
    """Asks to stop, or dies, at the start of a step. Only the last rank does, so all must agree."""

    def __init__(self, world: World, stop_at: int = 0, die_at: int = 0) -> None:
        from event_records import to  # not available where this file is used alone, as a task

        self.events: list[dict[str, Any]] = []
        self.start_step = 0
        self.step = 0  # the step in progress, from 1; 0 before training
        self.before_step: Callable[[int], None] = lambda step: None
        self._script = (stop_at, die_at) if world.rank == world.size - 1 else (0, 0)
        super().__init__(world, to(self.events))

    def show(self, event: Event) -> None:
        if isinstance(event, Plan):
            self.start_step = event.start_step
        super().show(event)

    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        if step is None:
            return Requests()
        self.step = step
        stop_at, die_at = self._script
        if step == die_at:
            os._exit(9)
        self.before_step(step)
        return Requests(stop=15 if step == stop_at else 0)


@dataclass(frozen=True)
class WorkerResult:
    """The result of a run on one worker."""

    outcome: Outcome
    start_step: int
    digest: str  # of the model in memory
    seen: list[tuple[int, list[int]]]
    events: list[dict[str, Any]] = field(repr=False)


def run_tiny(
    rank: int,
    size: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    stop_at: int = 0,
    die_at: int = 0,
    prepare: Callable[[ScriptedMembership], None] | None = None,
    kind: type[TinyTask] = TinyTask,
    device: str = "cpu",
) -> WorkerResult:
    """Trains in one process of a group; called through the fixture `workers`.

    Args:
        prepare: is called before the training.
    """
    made = from_dict(config)
    world = World(rank, size, rank, torch.device(device), threads=1)
    task = kind(made, **(options or {}))
    task.membership = membership = ScriptedMembership(world, stop_at, die_at)
    if prepare is not None:
        prepare(membership)
    outcome = take_part(membership, made, lambda _: Build(made, world, task))
    assert outcome is not None
    digest = hashlib.sha256()
    for tensor in task.made.state_dict().values():
        digest.update(tensor.double().cpu().contiguous().numpy().tobytes())
    end = membership.start_step, digest.hexdigest()
    return WorkerResult(outcome, *end, task.seen, membership.events)


def run_armed(
    rank: int, size: int, failpoints: str, folder: str, config: Mapping[str, Any], *more: Any
) -> WorkerResult:
    """`run_tiny` with failpoints."""
    arm(failpoints, folder)
    try:
        return run_tiny(rank, size, config, *more)
    finally:
        arm("", "")


def planned(config: TrainConfig, epoch: int, rows: int = ROWS) -> list[list[list[int]]]:
    """The rows of each slot of each step of an epoch."""
    blocks = ArraySource(tiny_arrays(rows, 0), rows_per_block=16).blocks
    order = rows_order.EpochOrder(blocks, "full", config.seed, epoch)
    plan = rows_order.Plan(rows, config.slots, config.micro_batch)
    return [
        [order.at(np.arange(*plan.span(step, slot))).tolist() for slot in range(config.slots)]
        for step in range(plan.steps_per_epoch)
    ]


# ------------------------------------------------------------------ files of a run


def plain(config: TrainConfig) -> dict[str, Any]:
    return to_dict(config)


def newest(config: TrainConfig) -> Checkpoint:
    store = checkpoint_store(run_storage(config))
    return store.open(store.names()[0])


def kept_steps(config: TrainConfig) -> list[int]:
    return sorted(name.step for name in checkpoint_store(run_storage(config)).names())


def bits(config: TrainConfig) -> dict[str, str]:
    """Hashes of the files with tensors in the newest checkpoint."""
    files = newest(config).manifest.files
    return {name: file.sha256 for name, file in files.items() if name.endswith(".safetensors")}


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """metrics.jsonl without values that depend on the time of day."""
    history = read_history(run_storage(config))
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in history]


def audit_of(config: TrainConfig) -> list[str]:
    """The hash of the input of each step; asserts that no step is missing or repeated."""
    records = [record for record in log_of(config) if record["kind"] == "audit"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["sha256"] for record in records]


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a file, read with the safetensors library."""
    return safetensors.torch.load(data)


def weights(config: TrainConfig) -> dict[str, Tensor]:
    return decode_tensors(newest(config).read("model.safetensors"))
