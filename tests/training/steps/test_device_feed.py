"""The input of each step: audited, counted, and the same for any number of workers and threads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, WorkerError
from tiny import (
    AUDITED,
    EPOCHS,
    ROWS,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyNet,
    audit_of,
    log_of,
    plain,
    planned,
    run_tiny,
    tiny_arrays,
    tiny_config,
)
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.runtime.world import seed_all
from raytrain_ddp.training.steps.device_feed import on_device


@pytest.fixture(scope="module")
def audited(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The audit of an undisturbed run in one process without a loader thread."""
    folder = tmp_path_factory.mktemp("audited")
    data = DataConfig(workers=0)
    config = tiny_config(folder, "alone", log=AUDITED, data=data)
    workers(1, run_tiny, plain(config))
    hashes = audit_of(config)
    assert len(set(hashes)) == TOTAL_STEPS
    return hashes


@pytest.mark.parametrize(("size", "threads"), [(2, 0), (3, 2)])
def test_ids_and_pixels_of_each_step_are_the_same_for_any_ranks_and_loader_threads(
    size: int, threads: int, audited: list[str], workers: Group, tmp_path: Path
):
    data = DataConfig(workers=threads, prefetch=3)
    config = tiny_config(tmp_path, "other", log=AUDITED, data=data)
    workers(size, run_tiny, plain(config))
    assert audit_of(config) == audited


# ------------------------------------------------------------------ bad records

BAD = [5, 6, 77, 78, 79, 200, 290]


def skipped_by_step(config: TrainConfig) -> list[int]:
    """The expected log: bad rows so far in the epoch, after each step of the first epoch."""
    bad = [len({row for rows in slots for row in rows} & {*BAD}) for slots in planned(config, 0)]
    return list(itertools.accumulate(bad))


def trained(config: TrainConfig) -> list[dict[str, Any]]:
    return [r for r in log_of(config) if r["kind"] == "train"]


def test_fault_20_the_count_of_skipped_records_is_the_same_on_any_ranks_and_after_a_restart(
    workers: Group, tmp_path: Path
):
    data = DataConfig(workers=1, bad_records="skip", max_bad=len(BAD))
    options = {"bad_rows": BAD}
    config = tiny_config(tmp_path, "three", data=data)
    ran = workers(3, run_tiny, plain(config), options)
    skipped = [record["skipped"] for record in trained(config)]
    assert skipped[:STEPS_PER_EPOCH] == skipped_by_step(config)
    assert skipped[STEPS_PER_EPOCH - 1 :: STEPS_PER_EPOCH] == [len(BAD)] * EPOCHS
    seen = [r for w in ran for step, rows in w.seen if step <= STEPS_PER_EPOCH for r in rows]
    assert sorted([*seen, *BAD]) == list(range(ROWS))

    stopped = replace(config, name="stopped")
    for stop in (4, 15, 0):
        workers(3, run_tiny, plain(stopped), options, stop)
    assert [r["skipped"] for r in trained(stopped)] == skipped
    assert [r["loss"] for r in trained(stopped)] == [r["loss"] for r in trained(config)]

    alone = replace(config, name="alone")
    workers(1, run_tiny, plain(alone), options)
    assert [r["skipped"] for r in trained(alone)] == skipped
    losses = [[r["loss"] for r in trained(c)[:6]] for c in (config, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fault_20_the_loss_of_a_step_is_the_mean_over_the_remaining_samples(
    workers: Group, tmp_path: Path
):
    """Slots that lost different numbers of samples are weighted by sample, not by slot."""
    data = DataConfig(workers=0, bad_records="skip", max_bad=ROWS)
    config = tiny_config(tmp_path, "bad", data=data, epochs=1)
    first = planned(config, 0)[0]
    bad = [*first[0], *first[1][:5]]  # a slot without samples, one with three
    options = {"bad_rows": bad, "norm": False}
    workers(3, run_tiny, plain(config), options)
    left = [r for rows in first for r in rows if r not in bad]
    assert trained(config)[0]["skipped"] == len(bad)
    assert trained(config)[0]["loss"] == pytest.approx(first_loss(left), rel=1e-6)


def first_loss(rows: list[int]) -> float:
    """The mean loss of an untrained network over some rows."""
    seed_all(0)
    arrays = tiny_arrays(ROWS, 0)
    logits = TinyNet(norm=False)(torch.from_numpy(arrays["x"][rows]))
    return cross_entropy(logits, torch.from_numpy(arrays["y"][rows])).item()


def test_fault_20_too_many_bad_records_end_the_run_at_the_step_that_exceeds_the_limit(
    workers: Group, tmp_path: Path
):
    data = DataConfig(workers=1, bad_records="skip", max_bad=3)
    config = tiny_config(tmp_path, "too-many", data=data)
    with pytest.raises(WorkerError, match="max_bad"):
        workers(3, run_tiny, plain(config), {"bad_rows": BAD})
    over = next(step for step, n in enumerate(skipped_by_step(config), 1) if n > 3)
    assert [record["step"] for record in trained(config)] == list(range(1, over))


@pytest.mark.gpu
def test_slots_reach_the_gpu_complete_while_it_is_busy():
    """The copy uses its own stream, and the stream of the training waits for it."""
    device = torch.device("cuda", 0)
    move = on_device(device, Clock(device))
    weights = torch.randn(2048, 2048, device=device)
    for step in range(20):
        host = torch.full((64, 3, 224, 224), step, dtype=torch.uint8).pin_memory()
        for _ in range(20):
            weights = (weights @ weights).tanh()  # the device lags behind the host
        (slot,) = move([Slot(step, 0, 64, 64, {"image": host})])
        assert slot.batch["image"].device == device
        assert bool((slot.batch["image"] == step).all())
