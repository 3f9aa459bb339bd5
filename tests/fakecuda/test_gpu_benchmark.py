"""benchmarks/gpu.py and the tests marked gpu, on machines without a GPU, and without packages that
machines with GPUs may lack."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import building
import pytest
import warm_python

from raytrain_ddp.command_line import parse_fit

ROOT = building.HERE.parents[1]
BENCHMARKS = ROOT / "benchmarks"
OPTIONAL = "ray jsonschema datasets moto gcp_storage_emulator psutil hypothesis webdataset wandb"
_COLLECT = f"""
import sys
import pytest

class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {OPTIONAL.split()}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.exit(pytest.main(["-m", "gpu", "-rs", "--collect-only", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    yield gpu
    del sys.modules["gpu"]


def asked(**changes: Any) -> argparse.Namespace:
    given = {"tiny": False, "images": 60, "minutes": 12.0, "ray_wheels": None, "only": []}
    return argparse.Namespace(**given | {"timm_train": None, "torchvision_train": None} | changes)


def test_gpu_tests_are_collected_without_packages_that_they_do_not_need():
    done = warm_python.run(
        [sys.executable, "-c", _COLLECT],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("::test_") > 35


@pytest.mark.parametrize("tiny", [False, True])
def test_each_fit_has_a_valid_config(gpu: ModuleType, tiny: bool, tmp_path: Path):
    jobs = gpu.jobs(asked(tiny=tiny), tmp_path, 4)
    assert len({job.name for job in jobs}) == len(jobs)
    fits = [job for job in jobs if job.log]
    assert len(fits) == 12
    for job in fits:
        config = parse_fit(job.command[job.command.index("raytrain_ddp.fit") + 1 :]).config
        assert config.name == job.log.parent.name
        gpus = int(job.name.partition(" GPUs")[0][-1]) if " GPUs" in job.name else 1
        assert config.slots == gpus
        assert config.exact == ("exact" in job.name)
        loose = "not deterministic" in job.name or "compiled" in job.name
        assert config.compute.deterministic != loose
        assert config.compute.compile == ("compiled" in job.name)
