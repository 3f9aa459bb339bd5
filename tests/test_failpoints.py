"""Failpoints: refused if invalid, fired once per run, and nearly free when unarmed."""

from __future__ import annotations

import ast
import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytrain_ddp
from raytrain_ddp import failpoints
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, SITES, VARIABLE, arm, failpoint

PACKAGE = Path(raytrain_ddp.__file__).parent


@pytest.fixture(autouse=True)
def _disarm(tmp_path: Path) -> Iterator[None]:
    yield
    arm("", str(tmp_path))


def in_a_process(code: str, armed: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code after `failpoint` is imported, with this environment."""
    return subprocess.run(
        [sys.executable, "-c", f"from raytrain_ddp.failpoints import failpoint\n{code}"],
        env={**os.environ, VARIABLE: armed, FOLDER_VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.befor_step:kill", "Did you mean 'train.before_step'"),
        ("train.loss:kil", "Did you mean 'kill'"),
        ("train.loss:kill@rnak=1", "rnak=1"),
        ("train.loss:kill@rank=-1", "train.loss:kill@rank=-1"),
        ("train.loss:kill@rank=x", "rank=x"),
        ("train.loss:kill@rank", "'rank'"),
        ("train.loss", "SITE:ACTION"),
        ("train.loss:sleep()", "SITE:ACTION"),
        ("train.loss:sleep(1.2.3)", "SITE:ACTION"),
        ("train.loss:sleep(.)", "SITE:ACTION"),
        ("train.loss:kill@rank=²", "rank=²"),
        ("train.loss:kill;;oops", "'oops'"),
        ("train.loss:kill@rank=1 step=2", "SITE:ACTION"),
    ],
)
def test_an_invalid_failpoint_is_refused_in_one_line(text: str, words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        arm(text, str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_process_with_invalid_failpoints_does_not_start(tmp_path: Path):
    done = in_a_process("print('alive')", "no.site:kill", tmp_path)
    assert done.returncode != 0
    assert "no.site" in done.stderr
    assert "alive" not in done.stdout


def test_failpoints_without_a_folder_for_fired_ones_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "train.loss:nan")
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        failpoints.arm_from_environment()


# ------------------------------------------------------------------ when it fires


def test_a_failpoint_fires_once_when_all_conditions_hold(tmp_path: Path):
    arm("train.loss:nan@rank=1,step=7", str(tmp_path / "fired"))
    assert failpoint("train.loss", rank=0, step=7) == 1
    assert failpoint("train.loss", rank=1, step=6) == 1
    assert failpoint("train.after_step", rank=1, step=7) == 1
    assert math.isnan(failpoint("train.loss", rank=1, step=7))
    assert failpoint("train.loss", rank=1, step=7) == 1
    assert [path.read_text() for path in (tmp_path / "fired").iterdir()] == ["1 7"]


def test_a_fired_failpoint_does_not_fire_again_in_another_process(tmp_path: Path):
    """Fired failpoints are recorded in the folder, not in memory."""
    arm("train.loss:nan@step=7", str(tmp_path))
    assert math.isnan(failpoint("train.loss", step=7))
    arm("train.loss:nan@step=7", str(tmp_path))
    assert failpoint("train.loss", step=7) == 1
    arm("train.loss:nan@step=7", str(tmp_path / "another run"))
    assert math.isnan(failpoint("train.loss", step=7))


def test_hit_counts_matches_within_one_process(tmp_path: Path):
    arm("checkpoint.payload:nan@step=5,hit=3", str(tmp_path))
    steps = [4, 5, 5, 4, 5, 5]
    values = [failpoint("checkpoint.payload", step=step) for step in steps]
    assert [math.isnan(value) for value in values] == [False, False, False, False, True, False]


def test_after_waits_for_other_failpoints(tmp_path: Path):
    arm("start.loaded:nan@after=2;train.loss:nan@step=1;train.loss:nan@step=2", str(tmp_path))
    for step in (1, 2):
        assert failpoint("start.loaded") == 1
        assert math.isnan(failpoint("train.loss", step=step))
    assert math.isnan(failpoint("start.loaded"))


def test_from_is_the_first_step_at_which_it_may_fire(tmp_path: Path):
    """While a rank is being replaced, the others may continue without it."""
    arm("train.loss:nan@rank=2,from=7", str(tmp_path))
    visits = [(2, 6), (0, 7), (1, 7), (0, 8), (2, 9), (2, 10)]
    found = [math.isnan(failpoint("train.loss", rank, step)) for rank, step in visits]
    assert found == [False, False, False, False, True, False]


def test_two_faults_at_one_site_fire_one_after_the_other(tmp_path: Path):
    arm("train.loss:nan@hit=1;train.loss:nan@hit=2", str(tmp_path))
    assert [math.isnan(failpoint("train.loss")) for _ in range(3)] == [True, True, False]


def test_only_one_of_several_processes_fires(tmp_path: Path):
    """Threads in this test: the file system decides in either case."""
    results: list[bool] = []
    arm("train.loss:nan@hit=1", str(tmp_path))
    points = failpoints._armed["train.loss"]
    copies = [failpoints.Failpoint(**{**vars(points[0]), "seen": 0}) for _ in range(16)]
    barrier = threading.Barrier(len(copies))

    def meet(point: failpoints.Failpoint) -> None:
        barrier.wait()
        results.append(point.due(0, 0))

    threads = [threading.Thread(target=meet, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 15 + [True]


# ------------------------------------------------------------------ what it does


@pytest.mark.parametrize(
    ("action", "status"), [("kill", -signal.SIGKILL), ("exit(3)", 3), ("term", -signal.SIGTERM)]
)
def test_a_process_ends_as_its_failpoint_specifies_and_passes_it_the_next_time(
    action: str, status: int, tmp_path: Path
):
    code = "failpoint('train.loss', rank=1, step=2); print('past')"
    first, second = (
        in_a_process(code, f"train.loss:{action}@rank=1,step=2", tmp_path) for _ in range(2)
    )
    assert (first.returncode, first.stdout) == (status, "")
    assert (second.returncode, second.stdout) == (0, "past\n")


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_disk_errors_have_their_errno(action: str, number: int, tmp_path: Path):
    arm(f"checkpoint.payload:{action}", str(tmp_path))
    with pytest.raises(OSError, match=r"failpoint checkpoint\.payload") as caught:
        failpoint("checkpoint.payload")
    assert caught.value.errno == number


def test_raise_sleep_and_gil(tmp_path: Path):
    arm("train.loss:raise;evaluate:sleep(0.05);data.read:gil(0.2)", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"failpoint train\.loss"):
        failpoint("train.loss")
    started = time.monotonic()
    failpoint("evaluate")
    assert time.monotonic() - started >= 0.05

    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    time.sleep(0.02)
    began = time.monotonic()
    failpoint("data.read")
    ended = time.monotonic()
    stop.set()
    ticking.join()
    meanwhile = [t for t in ticks if began + 0.02 < t < ended - 0.02]
    assert ended - began >= 0.2
    assert not meanwhile  # no Python thread ran


# ------------------------------------------------------------------ in the package


def sites_called() -> set[str]:
    calls = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "failpoint":
                first = node.args[0]
                assert isinstance(first, ast.Constant), f"{path}: a site that is no literal"
                calls[first.value] = path
    return set(calls)


def test_the_listed_sites_are_exactly_those_in_the_code():
    assert sites_called() == set(SITES)


def test_an_unarmed_failpoint_costs_less_than_a_microsecond():
    """A lookup in an empty dictionary: 0.05 us, a hundredth of a log line."""
    assert not failpoints._armed
    count = 20_000
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        for step in range(count):
            failpoint("train.before_step", 1, step)
        best = min(best, (time.perf_counter() - started) / count)
    assert best < 1e-6
