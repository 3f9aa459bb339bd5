"""Workers on emulated GPUs that are killed and replaced, over gloo, and over what NCCL does when a
rank dies."""

from __future__ import annotations

from pathlib import Path

import building
import pytest

TESTS = building.HERE.parent / "membership" / "test_generations_on_gpu.py"
FEW = "nccl and ((plain and loss) or not_finite or not_wait)"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chosen", [FEW, pytest.param("", marks=pytest.mark.slow)])
def test_the_gpu_worker_replacement_tests_pass_on_emulated_gpus(tmp_path: Path, chosen: str):
    libraries = building.built(tmp_path)
    said = building.output_of_tests(libraries, tmp_path, 3, str(TESTS), "-k", chosen)
    assert "skipped" not in said
    assert chosen == "" or "3 passed" in said
