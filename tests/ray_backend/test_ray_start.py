"""A Ray that starts slowly or not at all, its settings, and its output. No real Ray is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from processes import wait_until

from raytrain_ddp import errors
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend import ray_start
from raytrain_ddp.ray_backend.cluster import ray_connection
from raytrain_ddp.ray_backend.ray_process import ray_output_to_file
from raytrain_ddp.ray_backend.ray_start import applied_settings, ray_settings, start_with_retries

SLOW = Exception("The current node timed out during startup. This could happen because ...")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: its first item is the time; sleeping only advances it."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    for module in (ray_start, errors):
        monkeypatch.setattr(module, "time", fake)
    return now


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake Ray module that is not connected."""
    fake: Any = ModuleType("ray")
    fake.calls, fake.ended, fake.to_raise = [], 0, []
    fake.is_initialized = lambda: False

    def init(**options: Any) -> None:
        fake.calls.append(options)
        if fake.to_raise:
            raise fake.to_raise.pop(0)

    def shutdown() -> None:
        fake.ended += 1

    fake.init, fake.shutdown = init, shutdown
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def join(tell: Callable[[str], None] = lambda _: None) -> None:
    with ray_connection(None, {}, {"num_cpus": 2}, tell):
        pass


@pytest.mark.parametrize("kind", [Exception, OSError])
def test_fault_53_a_slow_ray_start_is_retried_whatever_it_raises(ray: Any, kind: Any) -> None:
    ray.to_raise = [kind("The current node timed out during startup.")] * 3
    reported: list[str] = []
    join(reported.append)
    assert len(ray.calls) == 4
    assert ray.calls[0] == ray.calls[-1]
    assert sum("timed out during startup" in line for line in reported) == 3
    assert ray.ended == 4  # after each failed attempt, and at the end


def test_fault_53_a_ray_that_never_starts_exits_with_status_3_at_its_time_limit(
    ray: Any, clock: list[float]
) -> None:
    def slow(**_: Any) -> None:
        clock[0] += 30
        raise SLOW

    ray.init = slow
    with pytest.raises(PreflightError, match="300 s") as caught:
        join()
    assert caught.value.exit_status == 3
    assert "\n" not in str(caught.value)
    assert 270 < clock[0] <= 330


def test_a_permanent_start_error_is_not_retried(ray: Any) -> None:
    for error in (
        ValueError("num_cpus must be an integer"),
        ConnectionError("Could not find any running Ray instance. Please specify the one"),
        type("AuthenticationError", (Exception,), {})("no token"),
    ):
        ray.calls, ray.to_raise = [], [error] * 9
        with pytest.raises(PreflightError, match="this machine"):
            join()
        again = isinstance(error, ValueError)  # once more, without the quick start
        assert len(ray.calls) == 1 + again


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_only_processes_started_by_a_failed_attempt_are_ended(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    mine = subprocess.Popen(["bash", "-c", "exec -a session_2025 sleep 60"])  # of another Ray
    below = tmp_path / "below"

    def init() -> None:
        if started:
            return
        # A raylet, which starts an agent, and a process that the user's own thread starts.
        script = f"sleep 60 & echo $! > {below}.new; mv {below}.new {below}; wait"
        started.append(subprocess.Popen(["bash", "-c", script, "--session-name=session_2026"]))
        started.append(subprocess.Popen(["sleep", "60"]))
        while not below.exists():
            time.sleep(0.01)
        raise SLOW

    try:
        start_with_retries(init, lambda: None, "this machine", 10.0, lambda _: None)
        agent = Path("/proc") / below.read_text().strip() / "cmdline"
        wait_until(lambda: not (agent.exists() and agent.read_bytes()))  # a dead one has no words
        assert started[0].poll() is not None
        assert started[1].poll() is None
        assert mine.poll() is None
    finally:
        for process in (mine, *started):
            process.kill()
            process.wait()


def test_fault_55_sighup_does_not_reach_ray_processes_and_is_not_lost() -> None:
    """A closing terminal sends it to every process in its group."""
    hung_up: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: hung_up.append(number))
    child: list[subprocess.Popen[bytes]] = []

    def init() -> None:
        child.append(subprocess.Popen(["sleep", "60"]))
        os.kill(os.getpid(), signal.SIGHUP)

    try:
        start_with_retries(init, lambda: None, "this machine", 10.0, lambda _: None)
        assert hung_up == [signal.SIGHUP]
        child[0].send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child[0].wait(0.3)
    finally:
        signal.signal(signal.SIGHUP, before)
        child[0].kill()
        child[0].wait()


def test_ray_timeouts_follow_the_config_and_are_restored_after_the_run(
    monkeypatch: pytest.MonkeyPatch,
):
    for workers, timeout_s, expected in (("2", "auto", "120"), ("1:2", "auto", "5"), ("2", 7, "7")):
        before = dict(os.environ)
        scaling = ScalingConfig(num_workers=workers, start_timeout_s=timeout_s)
        with applied_settings(ray_settings(TrainConfig(scaling=scaling), embedded=True)):
            assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == expected
        assert dict(os.environ) == before
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "33")
    with applied_settings(ray_settings(TrainConfig(scaling=scaling), embedded=False)):
        assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "33"


def test_output_of_other_threads_is_not_attributed_to_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    began, ended = threading.Event(), threading.Event()

    def users() -> None:
        began.wait(20)
        print("the user's")
        print("also the user's", file=sys.stderr)
        ended.set()

    thread = threading.Thread(target=users)
    thread.start()
    with ray_output_to_file(open_storage(str(tmp_path))):
        began.set()
        assert ended.wait(20)
        print("from Ray")
        of_ray, own = "from a thread of Ray", "from a new one"
        for name, text in (("ray_print_logs", of_ray), ("ray-tune", "from Tune"), ("own", own)):
            late = threading.Thread(target=print, args=(text,), name=name)
            late.start()
            late.join()
    thread.join()
    assert capsys.readouterr() == ("the user's\nfrom a new one\n", "also the user's\n")
    assert (tmp_path / "logs/driver.log").read_text() == (
        "from Ray\nfrom a thread of Ray\nfrom Tune\n"
    )
