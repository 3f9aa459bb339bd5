"""Several independent Rays on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytrain_ddp.ray_backend.ray_settings import dashboard_port, own_state_api

HERE = Path(__file__).parents[1]
API = "RAY_API_SERVER_ADDRESS"


def test_a_run_queries_its_own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API, raising=False)
    with own_state_api(8301):
        assert os.environ[API] == "http://127.0.0.1:8301"
    assert API not in os.environ
    monkeypatch.setenv(API, "http://the.users:1")
    with own_state_api(None), socket.socket() as probe:
        host, port = os.environ[API].removeprefix("http://").split(":")
        assert probe.connect_ex((host, int(port))) != 0  # nothing listens there
    assert os.environ[API] == "http://the.users:1"


def test_a_dashboard_gets_a_free_port() -> None:
    first = dashboard_port()
    with socket.create_server(("127.0.0.1", first)):
        assert dashboard_port() > first


@pytest.mark.ray
@pytest.mark.slow
def test_another_ray_started_on_the_machine_does_not_take_away_workers(tmp_path: Path) -> None:
    """Its API does not know the controller, so Ray Train would otherwise remove the controller's
    workers."""
    slow, log = tmp_path / "slow", tmp_path / "runs" / "here" / "metrics.jsonl"
    slow.touch()
    task = ["--task", f"{HERE / 'ray_tasks.py'}:Paced", "--task-options", "slow", str(slow)]
    shape = ["--epochs", "3", "--scaling.num-workers", "1", "--name", "here"]
    fit = [sys.executable, "-m", "raytrain_ddp.fit", *task, "pause_s", "0.3", *shape]
    init = "import ray; ray.init(address='local', num_cpus=1); print('up', flush=True); input()"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    pipe = subprocess.PIPE
    with subprocess.Popen(fit, cwd=tmp_path, stdout=pipe, text=True, env=environment) as run:
        while run.poll() is None and not log.exists():
            time.sleep(0.1)
        another = [sys.executable, "-c", init]
        with subprocess.Popen(another, stdin=pipe, stdout=pipe, text=True, env=environment) as ray:
            assert ray.stdout
            assert ray.stdout.readline() == "up\n"
            time.sleep(8)  # Ray Train asks once a second
            assert run.poll() is None
            slow.unlink()
            shown, _ = run.communicate(timeout=100)
            ray.communicate("")
    assert run.returncode == 0, shown
    assert "failed" not in shown
