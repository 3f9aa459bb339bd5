"""benchmarks/gpu.py, which cannot be tried without a GPU: on an emulated one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import building
import pytest

BENCHMARKS = building.HERE.parents[1] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    import gpu_jobs

    yield gpu, gpu_jobs
    for name in ("gpu", "gpu_jobs", "series", "data_images"):
        sys.modules.pop(name, None)


def asked(**changes: Any) -> argparse.Namespace:
    scripts = {"timm_train": Path("train.py"), "torchvision_train": None}
    return argparse.Namespace(**{"tiny": False, **scripts, **changes})


@pytest.mark.parametrize("tiny", [False, True])
def test_each_measurement_has_a_valid_config(
    modules: tuple[ModuleType, ModuleType],
    tiny: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    gpu, gpu_jobs = modules
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    jobs = gpu.jobs(asked(tiny=tiny), tmp_path)
    assert len({job.name for job in jobs}) == len(jobs)
    assert [job.gpus for job in jobs if job.gpus > 1] == [2, 2, 2, 4, 4, 4]
    assert [job.kind for job in jobs if job.kind not in gpu_jobs.JOBS] == [
        "tests",
        "killed",
        "timm",
    ]
    for job in jobs:
        if job.options and job.kind != "tests":
            config = gpu_jobs.config_of({**job.options, "storage": str(tmp_path)}, job.gpus)
            assert config.slots == job.gpus
            assert config.exact == ("exact" in job.name)
            assert config.compute.deterministic != ("not deterministic" in job.name)


def test_the_report_has_a_row_for_each_rate_and_a_line_for_each_verdict(
    modules: tuple[ModuleType, ModuleType],
):
    gpu, _ = modules
    from series import Series

    series = Series({"GPUs": "1 x made up"})
    found = {"images_per_s": 2512.3, "mfu": 0.312, "peak_gib": 21.4, "checkpoints": 4}
    found |= {"split_s": {"data": 0.0001, "compute": 0.08, "other": 1e-6}, "commit_s": 0.5}
    series.runs = [
        gpu.Run("ResNet-50", 0.5, 20.0, 2, found),
        gpu.Run("killed", 0.5, 60.0, 1, {"verdict": "the same bits"}),
    ]
    text = "\n".join(gpu.as_markdown(series))
    assert "| ResNet-50 | 2512     | 1256    | 31.2% | 21.4     | compute 80.0, data 0.1" in text
    assert "- killed: the same bits" in text
    assert "- ResNet-50: 4 checkpoints, each committed within 0.50 s" in text
    assert [gpu.line(run).split("  ")[-2].strip() for run in series.runs] == [
        "2512 images/s",
        "the same bits",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_measurements_complete_on_an_emulated_gpu(tmp_path: Path):
    try:
        building.build(tmp_path)
    except building.CannotBuild as reason:
        pytest.skip(f"GPUs cannot be emulated: {reason}")
    out = [str(tmp_path / "gpu.md"), str(tmp_path / "gpu.json")]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--out", *out],
        env=building.environment(tmp_path, install=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert "emulated" in written["machine"]["ATTENTION"]
    assert len(written["runs"]) == 13
    assert all(run["found"] for run in written["runs"])
