"""The fits that benchmarks/gpu.py starts."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path

import building
import pytest

from raytrain_ddp.fit import parse_fit


@pytest.mark.parametrize("tiny", [False, True])
def test_each_fit_has_a_valid_config(tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(building.HERE.parents[1] / "benchmarks"))
    given = {"images": 60, "minutes": 12.0, "ray_wheels": None, "only": [], "tiny": tiny}
    trainers = {"timm_train": None, "torchvision_train": None}
    jobs = import_module("gpu").jobs(Namespace(**given, **trainers), tmp_path, 4)
    commands = [job.command for job in jobs if job.log]
    for command in commands:
        parse_fit(command[command.index("raytrain_ddp.fit") + 1 :])
    assert len(commands) == 13
