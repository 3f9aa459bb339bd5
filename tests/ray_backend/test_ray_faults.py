"""Real Ray, opt-in because it takes minutes: crash loops, hangs, and clusters that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import torch
from logs import log_of
from ray_cluster import Ears, Running, at_size, at_step, paced, two_nodes, weights

from raytrain_ddp import fit, fit_locally
from raytrain_ddp.config.sections import CheckpointConfig, LogConfig, OptimConfig, ScalingConfig
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


@pytest.mark.slow
def test_fault_48_a_worker_that_dies_at_the_same_step_three_times_ends_the_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, ";".join(["train.before_step:kill@rank=1,step=5"] * 8))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    scaling = ScalingConfig(num_workers=2, max_failures=100)
    config = paced(tmp_path, "loop", checkpoint=CheckpointConfig(every_s=0), scaling=scaling)
    ears = Ears()
    with pytest.raises(RetriesExhausted, match=r"rank 1 .* step [1-5]"):
        fit(config, display=ears)
    # On a busy machine, Ray may end rank 0 before it has reported its step: then the driver knows
    # the step only roughly, and needs one more death.
    died = len(list((tmp_path / "fired").iterdir()))
    assert 3 <= died < 8
    assert [event["rank"] for event in ears.of("failed")] == [1] * (died - 1)


@pytest.mark.slow
def test_fault_33_a_stopped_worker_is_named_and_replaced_with_the_same_bits(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = ScalingConfig(num_workers=3, hang_s=2.0)
    whole, hung = (paced(tmp_path, name, scaling=scaling) for name in ("whole", "hung"))
    fit(whole, display=Ears())
    monkeypatch.setenv(VARIABLE, "train.before_step:stop@rank=2,step=30")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    ears = Ears()
    assert fit(hung, display=ears).status == "finished"
    (failed,) = ears.of("failed")
    assert failed["hung"]
    assert failed["step"] == 30
    assert "rank 2" in failed["message"]
    assert [plan["start_step"] for plan in ears.of("plan")] == [0, 29]
    assert weights(hung) == weights(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_28_one_run_continues_with_more_and_fewer_workers(
    cluster: Any, tmp_path: Path
) -> None:
    options = {
        "epochs": 8,
        "optim": OptimConfig(lr=1e-4),  # at 0.1, rounding errors grow to percents in fifty steps
        "scaling": ScalingConfig(num_workers="1:4", resize_s=1),
        "log": LogConfig(every_steps=1, audit=True, tensorboard=False),
        "checkpoint": CheckpointConfig(every_steps=5, every_s=0),
    }
    reference = paced(tmp_path, "reference", **options)
    torch.set_num_threads(1)
    fit_locally(reference, display=Ears())
    (tmp_path / "slow").touch()
    run = Running(paced(tmp_path, "resized", **options))
    run.ears.wait(at_step(7))
    at = 0.0
    for _ in range(2):
        node = cluster.add_node(num_cpus=1)
        at = run.ears.wait(at_size(4), at)
        run.ears.wait(lambda event: event["kind"] == "train", at)
        cluster.remove_node(node, allow_graceful=False)
        at = run.ears.wait(at_size(3), at)
        run.ears.wait(lambda event: event["kind"] == "train", at)
    (tmp_path / "slow").unlink()
    assert run.end().status == "finished"
    sums, losses = [], []
    for config in (run.config, reference):
        records = log_of(config)
        sums.append([(r["step"], r["sha256"]) for r in records if r["kind"] == "audit"])
        losses.append([r["loss"] for r in records if r["kind"] == "train"])
    assert sums[0] == sums[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
