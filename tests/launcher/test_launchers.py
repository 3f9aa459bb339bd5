"""examples/launchers: each script gives the same result on Ray as under its own launcher.

Two of them by default, in test_fit_on_ray.py, on the Ray of that file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from old_launchers import EXAMPLES, MANNERS, at_once, compare, in_folder
from ray_cluster import two_nodes

from raytrain_ddp.launcher.script_launch import run_script
from raytrain_ddp.run import parse


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def test_every_launcher_example_is_tested_and_in_the_readme():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*MANNERS}
    readme = (EXAMPLES / "README.md").read_text()
    for name, manner in MANNERS.items():
        assert "raytrain_ddp" not in (EXAMPLES / name).read_text()
        command = f"python -m raytrain_ddp.run {manner.flags} {name} {manner.args}".replace(
            "{size}", "2"
        ).strip()
        assert command in " ".join(readme.replace("\\\n", " ").split()), command


# Runs a script whose rank 1 is killed, in the first attempt, when rank 0 has saved an epoch.
KILLED = """
import os, runpy, signal, sys
from torch.utils.data import DistributedSampler

before = DistributedSampler.set_epoch
def set_epoch(self, epoch):
    if epoch == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    before(self, epoch)
DistributedSampler.set_epoch = set_epoch
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_killed_rank_restarts_all_ranks_from_the_scripts_own_checkpoint(
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """Equal to an undisturbed torchrun run, to the last bit."""
    script, epochs = str(EXAMPLES / "torchrun_env.py"), ["--epochs", "8"]
    in_folder(monkeypatch, tmp_path / "own")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    at_once([[*torchrun, script, *epochs]], [{}])
    own = json.loads(Path("result.json").read_text())

    in_folder(monkeypatch, tmp_path / "ray")
    Path("killed.py").write_text(KILLED)
    command = ["--num-workers", "2", "--max-restarts", "1", "killed.py", script, *epochs]
    assert run_script(parse(command)) == 0
    out, err = capfd.readouterr()
    assert "rank 1 failed first" in err
    assert "killed by SIGKILL" in err
    epochs_said = [line.partition(":")[0] for line in out.splitlines() if "] epoch " in line]
    assert epochs_said == [f"[rank 0] epoch {n}" for n in range(8)]  # it continued
    assert json.loads(Path("result.json").read_text()) == own


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MANNERS)
def test_each_script_has_the_same_result_as_under_its_own_launcher(
    name: str, size: int, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare(name, size, tmp_path, monkeypatch)
