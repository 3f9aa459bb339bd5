"""Real Ray: one of two nodes for all tests of this file, and few fits, because each starts its
workers cold. What needs minutes is in test_ray_faults.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import psutil
import warm_python
from old_launchers import compare, free_port
from processes import ENVIRONMENT, STUBBORN
from ray_cluster import (
    TASKS,
    Ears,
    at_step,
    once,
    paced,
    processes,
    trained,
    two_nodes,
    wait_until,
    weights,
)
from tiny import log_of, newest

from raytrain_ddp import FitResult, TrainConfig, fit
from raytrain_ddp.checkpoint.run_folder import read_events
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import dumps, load, settled
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.events import End
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.launcher.script_launch import run_script
from raytrain_ddp.launcher.torchrun_flags import parse

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        own = Path(tempfile.mkdtemp(prefix="test-ray-"))  # of what `run` starts
        patch.setenv("TMPDIR", str(own))
        patch.setenv("RAY_TMPDIR", "/tmp")
        with two_nodes() as made:
            made.own = own
            yield made
    assert list(own.glob("raytrain-run-*")) == []


def test_fit_trains_the_digits_and_writes_every_file_of_the_run(
    cluster: Any, tmp_path: Path
) -> None:
    config = TrainConfig(storage=str(tmp_path), epochs=4)
    result = fit(config, display=Ears())
    assert isinstance(result, FitResult)
    assert (result.status, result.exit_status) == ("finished", 0)
    assert result.metrics["top1"] >= 0.95
    assert result.step == result.total_steps == 4 * 23
    run = tmp_path / "digits"
    for name in ("config.toml", "metrics.jsonl", "checkpoints", "curves.png", "tensorboard"):
        assert (run / name).exists(), name
    assert (run / "logs" / "rank-1.log").exists()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [r["step"] for r in result.history if r["kind"] == "eval"] == [*range(23, 93, 23)]
    data = replace(config.data, classes=tuple("0123456789"))
    wanted = settled(replace(config, name="digits", data=data), has_bf16=False)
    assert load(str(run / "config.toml")) == wanted

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = fit(config, display=Ears())
    assert again.status == "already complete"
    assert again.metrics == result.metrics
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of three processes that have torchrun's variables."""
    config = paced(tmp_path_factory.mktemp("reference"), "undisturbed")
    recipe = Path(config.storage) / "undisturbed.toml"
    recipe.write_text(dumps(config))
    group = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    group |= {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "3"}
    folder = Path(config.storage)
    ranks = [
        warm_python.fit(folder, str(recipe), **group, RANK=rank, LOCAL_RANK=rank) for rank in "012"
    ]
    outs = [process.communicate(timeout=200)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outs
    return config


def test_fault_01_05_13_a_killed_driver_a_killed_worker_and_ctrl_c_on_ray_lose_nothing(
    cluster: Any, undisturbed: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is killed: its Ray lives on, its workers must not. In the next start, one of three
    Ray workers is killed and replaced while the others survive and the task's files are broken;
    then Ctrl-C and the same command again.

    Weights and log are those of three undisturbed processes.
    """
    (tmp_path / "slow").touch()
    sources = {"own_paced.py": "from own_base import Paced\n\nclass Own(Paced): ...\n"}
    where = f"import sys\nsys.path.append({str(TASKS.parent)!r})\n"
    sources["own_base.py"] = f"{where}from ray_tasks import Paced\n"
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    config = paced(tmp_path, "disturbed", task=f"{tmp_path / 'own_paced.py'}:Own")
    # Where Ray Train would keep its state: if it is not writable, Ray Train fails.
    (tmp_path / "disturbed" / "checkpoint_manager_snapshot.json").mkdir(parents=True)
    (tmp_path / "mine.toml").write_text(dumps(config))
    with warm_python.WarmPython(
        [sys.executable, "-m", "raytrain_ddp.fit", "mine.toml", "--address", cluster.address],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        log = tmp_path / "disturbed" / "metrics.jsonl"

        def has_trained() -> bool:
            assert driver.poll() is None, driver.stderr and driver.stderr.read()
            return log.exists() and log.read_text().count('"kind": "train"') >= 25

        wait_until(has_trained, 200)
        os.kill(driver.pid, signal.SIGKILL)
    wait_until(lambda: not (processes("ray::RayTrainWorker") or processes("ray::Mailbox")))
    began = newest(config).name.step
    assert 23 <= began < 36, "from the checkpoint of the first epoch, or a later one"

    monkeypatch.setenv(VARIABLE, f"train.after_backward:kill@rank=1,step={began + 4}")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    ears = Ears()
    broken: list[float] = []

    def break_files() -> None:
        for name in sources:
            (tmp_path / name).write_text("1 / 0\n")
        broken.append(time.monotonic())

    once(ears, at_step(began + 1), break_files)
    once(ears, at_step(began + 6), lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = fit(config, display=ears)
    assert len(list((tmp_path / "fired").iterdir())) == 1
    (failed,) = [(at, event) for at, event in ears.heard if event["kind"] == "failed"]
    assert broken[0] < failed[0]
    assert failed[1]["rank"] == 1
    assert began + 2 <= failed[1]["step"] <= began + 4  # or the step of the last event
    plans = [(plan["start_step"], *(plan.get("replaced") or ())) for plan in ears.of("plan")]
    assert plans == [(began,), (began + 3, 1)]
    assert (stopped.status, stopped.exit_status) == ("interrupted", 130)
    assert began + 6 <= stopped.step < 46

    (tmp_path / "slow").unlink()
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    again = Ears()
    assert fit(config, display=again).status == "finished"
    assert [plan["start_step"] for plan in again.of("plan")] == [stopped.step]
    assert weights(config) == weights(undisturbed)
    assert log_of(config) == log_of(undisturbed)
    assert trained(config) == [*range(1, 47)]


def test_more_workers_than_the_cluster_has_are_refused_with_have_and_want(
    cluster: Any, tmp_path: Path
) -> None:
    config = TrainConfig(
        storage=str(tmp_path), batch_size=1024, scaling=ScalingConfig(num_workers=9, wait_s=1)
    )
    with pytest.raises(PreflightError, match="want 9, have 3") as caught:
        fit(config, display=Ears())
    assert caught.value.exit_status == 3
    assert not (tmp_path / "digits" / "config.toml").exists()


# ------------------------------------------------------------------ scripts, by `run`


def test_the_first_failure_is_shown_and_all_ranks_are_restarted(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Rank 1 fails twice, the second time by a kill; rank 2 is on the other node, in a copy."""
    script = """
import os, signal, socket, sys, time
attempt, rank = os.environ["SLURM_RESTART_COUNT"], os.environ["SLURM_PROCID"]
print(attempt, *(os.environ[f"SLURM_{name}"] for name in ("LOCALID", "NODEID", "NTASKS")),
      os.environ["TEST_TRAVELS"], sys.argv[2:], os.path.basename(os.getcwd())[:4], flush=True)
if rank != "1":
    time.sleep(0 if attempt == sys.argv[1] else 600)
if attempt == "0":
    raise ValueError("no such thing")
if attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TEST_TRAVELS", "far")
    (folder / "script.py").write_text(script)
    flags = "--num-workers 3 --max-restarts 2 --grace-s 20 --env slurm --ship always"
    assert run_script(parse([*flags.split(), "script.py", "2", "{rank}", "{node_rank}"])) == 0
    out, err = capfd.readouterr()
    places = {0: "0 0", 1: "1 0", 2: "0 1"}  # local rank, node
    said = {line for line in out.splitlines() if "] 2 " in line}
    assert said == {
        f"[rank {rank}] 2 {place} 3 far ['{rank}', '{place[2:]}'] here"
        for rank, place in places.items()
    }
    assert len(re.findall(r"rank 1 failed first", err)) == 2
    assert "  ValueError: no such thing\n" in err
    assert "SIGKILL" in err
    assert re.search(r"ranks 0-1 on .*, rank 2 on ", err)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=SLOW)])
def test_no_process_is_left_when_the_driver_is_stopped_or_killed(
    number: int, cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(STUBBORN)
    command = [sys.executable, "-m", "raytrain_ddp.run", "--address", cluster.address]
    command += ["--num-workers", "2", "--grace-s", "1", "script.py", "pids-{rank}"]
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(
            command, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True
        )
    files = [tmp_path / f"pids-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), within_s=100)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 6
    os.killpg(driver.pid, number)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    status = driver.wait(30)
    wait_until(lambda: not list(cluster.own.glob("raytrain-run-*")))
    expected = -signal.SIGKILL if number == signal.SIGKILL else 130
    assert status == expected, (tmp_path / "said").read_text()


def test_an_old_script_has_the_same_result_as_under_torchrun(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare("torchrun_env.py", 2, tmp_path, monkeypatch)


# ------------------------------------------------------------------ a Ray of the run's own


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, Ray is in the driver's process")
@pytest.mark.parametrize("part", ["raylet", pytest.param("gcs_server", marks=SLOW)])
def test_fault_06_a_run_whose_ray_is_killed_ends_with_status_7_and_one_line(
    part: str, tmp_path: Path
) -> None:
    flags = ["--steps", "100000", "--log.every-steps", "1", "--scaling.num-workers", "1"]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *flags, "--storage", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with warm_python.WarmPython(
        [*command, "--name", "run"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        log = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: log.exists() and bool(log.read_text()), 200)
        below = psutil.Process(driver.pid).children(recursive=True)
        next(each for each in below if each.name() == part).kill()
        _, errors = driver.communicate(timeout=200)
    end = [event.event for event in read_events(open_storage(str(tmp_path / "run")))][-1]
    assert isinstance(end, End)
    assert (driver.returncode, end.status) == (7, 7)
    assert errors.count("\n") == 1, errors
