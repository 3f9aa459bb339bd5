"""Ray with three emulated GPUs: placement, and a killed worker. Minutes on two cores, so it is
opt-in; tests/ray_backend has the same on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
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
    environment = building.environment(folder, 3, install=True)
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    command = [sys.executable, str(building.HERE / "on_ray.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return found


def test_a_worker_that_is_killed_on_its_gpu_changes_no_weight(fits: dict[str, Any]):
    killed = fits["killed"]
    assert killed["status"] == "finished"
    assert "rank 1" in killed["text"]
    assert killed["weights"] == fits["alone"]["weights"]


def test_each_worker_has_a_gpu_of_its_own(fits: dict[str, Any]):
    """All GPUs of the workers on a node are visible to each; see ray.train.torch.get_device."""
    notes = [note.split() for note in fits["killed"]["notes"]]
    assert [note[0] for note in notes] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [note[1] for note in notes] == ["0", "1", "2"]
    assert {frozenset(note[2].split(",")) for note in notes} == {frozenset("012")}
