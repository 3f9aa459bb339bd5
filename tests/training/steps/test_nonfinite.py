"""Row 24: steps whose loss or gradient is not finite, with three gloo processes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import Died, Group
from tiny import (
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyNet,
    TinyTask,
    bits,
    decode_tensors,
    kept_steps,
    newest,
    plain,
    planned,
    run_armed,
    run_tiny,
    tiny_config,
    weights,
)
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig, LogConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.runtime.world import seed_all, slot_seed

SKIP = OptimConfig(lr=0.05, nonfinite="skip")
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": SKIP},
    "adamw-clip-bf16": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5, nonfinite="skip"),
        "compute": ComputeConfig(precision="bf16", channels_last=True),
    },
    "fp16-clip": {
        "optim": dataclasses.replace(SKIP, clip_norm=0.5),
        "compute": ComputeConfig(precision="fp16"),
    },
}


class OddTask(TinyTask):
    """Something becomes nonfinite in the batch that has `nan_row`."""

    norm = True

    def __init__(self, config: TrainConfig, nan_row: int) -> None:
        super().__init__(config, norm=self.norm)
        self._odd_row = nan_row

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        assert self.membership is not None
        odd = self.membership.step > 0 and self._odd_row in batch["row"].tolist()
        return self.make_nonfinite(loss, model, batch) if odd else loss

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError


class InfiniteLoss(OddTask):
    """The loss is infinite, but the gradient is finite; a parameter without elements has none.
    Without buffers, ranks exchange only gradients."""

    norm = False

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("empty", nn.Parameter(torch.empty(0)))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) + self.made.get_parameter("empty").sum()

    def make_nonfinite(self, loss: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        return loss + math.inf


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


EACH_STEP = CheckpointConfig(every_steps=1, every_s=0.0, keep_last=99)


def stored(config: TrainConfig, name: str) -> dict[int, str]:
    """Step -> hash of a file in its checkpoint."""
    store = checkpoint_store(run_storage(config))
    return {each.step: store.open(each).manifest.files[name].sha256 for each in store.names()}


def progress(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(newest(config).read("state.json"))
    return found


def ended(results: Sequence[Any]) -> str:
    """The message with which all ranks ended."""
    assert {(r.name, r.exit_status) for r in results} == {("DivergedError", 6)}
    (line,) = {r.text.splitlines()[-1] for r in results}
    return str(line)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_24_a_step_with_nan_on_one_rank_equals_a_step_without_an_update(
    variant: str, workers: Group, tmp_path: Path
):
    """Bit for bit; the first step has no state yet."""
    config = tiny_config(tmp_path, "nan", epochs=1, checkpoint=EACH_STEP, **VARIANTS[variant])
    nan = "train.loss:nan@rank=1,step=1;train.loss:nan@rank=2,step=5"
    ran = workers(3, run_armed, nan, str(tmp_path / "fired"), plain(config))
    assert len({r.digest for r in ran}) == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = stored(config, name)
        assert files[5] == files[4]
        assert len({*files.values()}) == STEPS_PER_EPOCH - 1  # each other step changed something
    store = checkpoint_store(run_storage(config))
    first = decode_tensors(store.open(min(store.names())).read("model.safetensors"))
    seed_all(config.seed)
    assert all(torch.equal(first[name], began) for name, began in TinyNet().state_dict().items())
    assert progress(config)["nonfinite"] == 2


@pytest.mark.parametrize(
    ("kind", "named"),
    [(InfiniteLoss, "slot 1"), (InfiniteVariance, "buffer"), (HugeGradient, "gradient")],
)
def test_fault_24_nonfinite_values_outside_of_gradients_are_found_in_the_same_step(
    kind: type[OddTask], named: str, workers: Group, tmp_path: Path
):
    config = tiny_config(
        tmp_path, "odd", optim=OptimConfig(name="adamw", lr=0.05), checkpoint=EACH_STEP
    )
    options = {"nan_row": planned(config, 0)[4][1][0]}
    line = ended(workers.outcomes(3, run_tiny, plain(config), options, 0, 0, None, kind))
    assert named in line
    assert "step 5" in line
    assert kept_steps(config) == [1, 2, 3, 4]


# ------------------------------------------------------------------ stop


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """NaN equals NaN."""
    return [{k: str(v) if k == "loss" else v for k, v in r.items()} for r in tiny.log_of(config)]


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
    line = ended(workers.outcomes(3, run_armed, nan, str(tmp_path / "fired"), plain(config)))
    for named in ("slot 1 (rank 1)", "step 14", "diverged-step-00000014.json", "optim.lr"):
        assert named in line
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
    assert [s["rows"] for s in slots] == planned(config, 1)[3]
    assert slots[1]["loss"] == "nan"
    assert all(math.isfinite(s["loss"]) for s in slots if s["slot"] != 1)


@pytest.mark.parametrize(
    "optim", [OptimConfig(lr=1e12), OptimConfig(name="adamw", lr=1e25, nonfinite="skip")]
)
def test_fault_24_a_huge_learning_rate_ends_with_6_and_all_checkpoints_are_finite(
    optim: OptimConfig, workers: Group, tmp_path: Path
):
    """Also if the update itself overflows, with a finite gradient."""
    config = tiny_config(tmp_path, "huge", optim=optim, checkpoint=EACH_STEP)
    ended(workers.outcomes(3, run_tiny, plain(config)))
    for tensor in (weights(config) if kept_steps(config) else {}).values():
        assert tensor.double().isfinite().all()


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
    options = {"nan_row": planned(config, 0)[4][1][0]}
    return config, (options, workers(3, run_tiny, plain(config), options))


def bad_steps(config: TrainConfig, row: int) -> list[tuple[int, int]]:
    """(step, slot) of each occurrence of the row."""
    return [
        (epoch * STEPS_PER_EPOCH + step, slot)
        for epoch in range(config.epochs)
        for step, slots in enumerate(planned(config, epoch), start=1)
        for slot, rows in enumerate(slots)
        if row in rows
    ]


def test_fault_24_skip_continues_reports_each_step_and_counts_them_in_the_log(skipping_run: Any):
    config, (options, ran) = skipping_run
    bad = bad_steps(config, options["nan_row"])
    assert len(bad) == config.epochs
    assert {r.outcome.step for r in ran} == {TOTAL_STEPS}
    assert len({r.digest for r in ran}) == 1
    told = [[str(event) for event in r.events if event["kind"] == "note"] for r in ran]
    reported, *others = [[note for note in notes if "skipped" in note] for notes in told]
    assert others == [[], []]
    for (step, slot), note in zip(bad, reported, strict=True):
        assert f"slot {slot} (rank {[0, 1, 2, 2][slot]})" in note
        assert f"step {step} " in note
    log = [record for record in log_of(config) if record["kind"] == "train"]
    assert [r["step"] for r in log] == list(range(1, TOTAL_STEPS + 1))
    assert [r["step"] for r in log if r["loss"] == "nan"] == [step for step, _ in bad]
    counts = [sum(step <= r["step"] for step, _ in bad) for r in log]
    assert [r["nonfinite"] for r in log] == counts
    assert not list((Path(config.storage) / "whole").glob("diverged*"))


def test_fault_24_a_run_resumed_around_a_skipped_step_ends_with_the_same_bits(
    skipping_run: Any, workers: Group, tmp_path: Path
):
    whole, (options, _) = skipping_run
    config = dataclasses.replace(whole, storage=str(tmp_path))
    (first, _), (second, _), _ = bad_steps(config, options["nan_row"])
    workers(3, run_tiny, plain(config), options, first)
    assert newest(config).name.step == first  # the last step was skipped
    *_, last = workers.outcomes(3, run_tiny, plain(config), options, 0, second + 1)
    assert last == Died(9)
    assert first <= newest(config).name.step <= second
    workers(3, run_tiny, plain(config), options)
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
    line = ended(workers.outcomes(3, run_tiny, plain(config), options))
    assert f"slot {slot} " in line
    assert "optim.max_nonfinite" in line
    assert (tmp_path / "few" / f"diverged-step-{second:08d}.json").is_file()
    assert max(kept_steps(config)) < second
