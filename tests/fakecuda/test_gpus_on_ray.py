"""Ray with eight emulated GPUs: placement, shared GPUs, and a killed worker. Minutes on two
cores, so it is opt-in; tests/ray_backend has the same on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import building
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpus-on-ray")
    try:
        building.build(folder)
    except building.CannotBuild as reason:
        pytest.skip(f"GPUs cannot be emulated: {reason}")
    environment = building.environment(folder, 8, install=True)
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    command = [sys.executable, str(building.HERE / "on_ray.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return found


@pytest.mark.parametrize("name", ["killed", "shared", "eight"])
def test_the_weights_equal_those_of_one_process_on_a_cpu(fits: dict[str, Any], name: str):
    """After a worker was killed; with two workers per GPU; with eight GPUs."""
    assert fits[name]["status"] == "finished"
    assert fits[name]["weights"] == fits["alone"]["weights"]


def test_fault_49_a_killed_nccl_worker_is_replaced_without_repeated_steps(
    fits: dict[str, Any],
):
    assert fits["over NCCL"]["status"] == "finished"
    assert fits["over NCCL"]["weights"] == fits["undisturbed"]["weights"]
    assert "rank 2 replaced; continuing after step 6 of 10" in fits["over NCCL"]["text"]
    assert "rank 2 failed" not in fits["undisturbed"]["text"]


def test_fault_49_with_exact_gpu_workers_continue_without_the_killed_one(fits: dict[str, Any]):
    assert "continuing with 2 workers after step 4 of 10" in fits["killed"]["text"]


def test_the_killed_worker_is_named(fits: dict[str, Any]):
    assert "rank 1" in fits["killed"]["text"]
    assert "rank 1 failed" not in fits["shared"]["text"]


@pytest.mark.parametrize(
    ("name", "workers", "each"), [("killed", 3, 1), ("shared", 4, 2), ("eight", 8, 1)]
)
def test_each_worker_uses_its_assigned_gpu(
    fits: dict[str, Any], name: str, workers: int, each: int
):
    """It sees no other one."""
    found = fits[name]["notes"].items()
    notes = [note.split() for file, note in found if file.endswith(f"-of-{workers}")]
    assert len(notes) == workers
    assert {tuple(note[:2]) for note in notes} == {("cuda:0", "0")}
    assert all(visible == bus for _, _, visible, bus in notes)
    assert [*Counter(note[3] for note in notes).values()] == [each] * (workers // each)


def test_doctor_finds_the_gpus(fits: dict[str, Any]):
    rows = {row["check"]: row for row in fits["doctor"]["rows"]}
    assert rows["GPUs"]["verdict"] == "ok"
    assert "8 x Emulated H100" in rows["GPUs"]["found"]
    assert fits["doctor"]["status"] == 0, rows
