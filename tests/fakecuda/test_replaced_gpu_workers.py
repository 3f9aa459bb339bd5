"""Workers on emulated GPUs that are killed and replaced, over gloo, and over what NCCL does when a
rank dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import building
import pytest

TESTS = building.HERE.parent / "membership" / "test_generations_on_gpu.py"
FEW = "nccl and ((plain and loss) or not_finite or not_wait)"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chosen", [FEW, pytest.param("", marks=pytest.mark.slow)])
def test_the_gpu_worker_replacement_tests_pass_on_emulated_gpus(tmp_path: Path, chosen: str):
    try:
        building.build(tmp_path)
    except building.CannotBuild as reason:
        pytest.skip(f"GPUs cannot be emulated: {reason}")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inner'}", str(TESTS), "-k", chosen],
        env=building.environment(tmp_path, 3, install=True),
        cwd=building.HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
    assert chosen == "" or "3 passed" in done.stdout
