"""Real Ray, opt-in because it takes minutes: crash loops, hangs, and clusters that change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import torch
from old_launchers import MANNERS, compare
from ray_cluster import (
    Ears,
    Running,
    at_size,
    at_step,
    once,
    paced,
    processes,
    trained,
    two_nodes,
    wait_until,
    weights,
)

from raytrain_ddp import fit, fit_locally
from raytrain_ddp.config.sections import CheckpointConfig, EvalConfig, ScalingConfig
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


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


def test_a_killed_ray_train_controller_restarts_all_workers(cluster: Any, tmp_path: Path) -> None:
    """There is capacity for one placement of the workers: that of the dead controller is freed."""
    (tmp_path / "slow").touch()
    saves = CheckpointConfig(every_steps=5, every_s=0)
    config = replace(paced(tmp_path, "controller", checkpoint=saves), epochs=1)

    def kill_controller() -> None:
        for process in processes("ray::TrainController"):
            process.kill()
        (tmp_path / "slow").unlink()

    ears = Ears()
    once(ears, lambda event: event["kind"] == "checkpoint", kill_controller)
    assert fit(config, display=ears).status == "finished"
    assert len(ears.of("failed")) == 1
    plans = [plan["start_step"] for plan in ears.of("plan")]
    assert len(plans) == 2
    assert plans[1] in (5, 10, 15)
    assert trained(config) == [*range(1, 24)]
    wait_until(lambda: not (processes("ray::TrainController") or processes("ray::RayTrainWorker")))


def test_fault_34_a_node_removed_with_notice_costs_no_step_and_no_failure(
    cluster: Any, tmp_path: Path
) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    notice_s = 10.0
    node = cluster.add_node(num_cpus=1)
    (tmp_path / "slow").touch()
    rarely = CheckpointConfig(every_epochs=0, every_s=0)
    scaling = ScalingConfig(num_workers="1:4", max_failures=0, resize_s=1)
    options = {"scaling": scaling, "checkpoint": rarely, "eval": EvalConfig(every_epochs=0)}
    run = Running(paced(tmp_path, "drained", epochs=8, **options))
    ears = run.ears
    ears.wait(at_step(4))
    drained = time.monotonic()
    # What an autoscaler reports to Ray when a cloud is about to remove a machine.
    why = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    until_ms = int(1e3 * (time.time() + notice_s))
    client = GcsClient(address=cluster.address)
    assert client.drain_node(node.node_id, why, "taken away", until_ms)[0]
    ears.wait(lambda event: event["kind"] == "checkpoint", drained)
    time.sleep(max(0.0, drained + notice_s - time.monotonic()))  # the cloud's machine lives as long
    removed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    planned = ears.wait(at_size(3), removed)
    (tmp_path / "slow").unlink()
    assert run.end().status == "finished"
    assert ears.of("failed") == []
    assert len(ears.of("preempted")) == 1
    saved = [e["step"] for at, e in ears.heard if e["kind"] == "checkpoint" and at < removed]
    last_step = max(e["step"] for at, e in ears.heard if e["kind"] == "train" and at < planned)
    assert len(saved) == 1  # at the notice
    assert saved[0] < last_step
    # Rank 0 may have been lost before it sent its last lines: they are in the log.
    (unheard,) = [e["start_step"] - last_step for e in ears.of("plan")[1:]]
    assert 0 <= unheard <= 3, "no step was repeated"
    assert trained(run.config) == [*range(1, 8 * 23 + 1)]


def test_fault_28_workers_join_with_a_new_node_and_any_may_die_without_a_restart(
    cluster: Any, tmp_path: Path
) -> None:
    """A run starts with three of at most four workers.

    A node is added, and its worker joins; one of the first three is killed. With exact, the bits
    are those of one process.
    """
    scaling = ScalingConfig(num_workers="1:4", resize_s=1)
    options = {"exact": True, "epochs": 3, "scaling": scaling}
    reference = paced(tmp_path, "reference", **options)
    torch.set_num_threads(1)
    fit_locally(reference, display=Ears())
    (tmp_path / "slow").touch()
    run = Running(paced(tmp_path, "grown", **options))
    run.ears.wait(at_step(2))
    node = cluster.add_node(num_cpus=1)
    at = run.ears.wait(at_size(4))
    run.ears.wait(lambda event: event["kind"] == "train", at)
    processes("ray::RayTrainWorker")[0].kill()
    run.ears.wait(at_size(3), at)
    (tmp_path / "slow").unlink()
    assert run.end().status == "finished"
    plans = run.ears.of("plan")
    assert [event["world_size"] for event in plans][:3] == [3, 4, 3]
    assert all(event.get("replaced") is not None for event in plans[1:]), "from a checkpoint"
    assert len(run.ears.of("failed")) == 1
    assert trained(run.config) == [*range(1, 3 * 23 + 1)]
    assert weights(run.config) == weights(reference)
    wait_until(lambda: not processes("ray::SingleWorker"))
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MANNERS)
def test_each_script_has_the_same_result_as_under_its_own_launcher(
    name: str, size: int, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, size, tmp_path, monkeypatch)
