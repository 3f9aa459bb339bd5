"""Failpoints: refused if invalid, and fired once per run."""

from __future__ import annotations

import ast
import errno
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python
from processes import ENVIRONMENT

import raytrain_ddp
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.failpoints import (
    FOLDER_VARIABLE,
    SITES,
    VARIABLE,
    arm,
    arm_from_environment,
    failpoint,
)


@pytest.fixture(autouse=True)
def _disarm(tmp_path: Path) -> Iterator[None]:
    yield
    arm("", str(tmp_path))


def fires(folder: Path, text: str, *visits: tuple[str, int, int]) -> list[bool]:
    """Whether each visit (site, rank, step) fires what was armed."""
    arm(text, str(folder))
    return [math.isnan(failpoint(*visit)) for visit in visits]


def test_an_invalid_failpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for text in (
        *("train.befor_step:kill", "train.loss:kil", "train.loss:kill@rnak=1", "train.loss"),
        *("train.loss:kill@rank=-1", "train.loss:kill@rank", "train.loss:sleep(1.2.3)"),
        *("train.loss:kill@rank=²", "train.loss:kill;;oops", "train.loss:kill@rank=1 step=2"),
    ):
        with pytest.raises(ConfigError):
            arm(text, str(tmp_path))
    monkeypatch.setenv(VARIABLE, "train.loss:nan")
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        arm_from_environment()


def test_a_failpoint_fires_once_when_all_conditions_hold(tmp_path: Path):
    visits = [("train.loss", 0, 7), ("train.loss", 1, 6), ("train.after_step", 1, 7)]
    visits += [("train.loss", 1, 7)] * 2
    armed = "train.loss:nan@rank=1,step=7"
    assert fires(tmp_path / "a", armed, *visits) == [False, False, False, True, False]
    assert [path.read_text() for path in (tmp_path / "a").iterdir()] == ["1 7"]
    # What has fired is recorded in the folder, not in memory.
    assert fires(tmp_path / "a", armed, *visits) == [False] * 5
    assert fires(tmp_path / "b", armed, *visits[-1:]) == [True]


@pytest.mark.parametrize(
    ("armed", "visits", "fired"),
    [
        ("@step=5,hit=3", [(0, 4), (0, 5), (0, 5), (0, 4), (0, 5), (0, 5)], [4]),
        ("@rank=2,from=7", [(2, 6), (0, 7), (1, 7), (0, 8), (2, 9), (2, 10)], [4]),
        ("@hit=1;train.loss:nan@hit=2", [(0, 1)] * 3, [0, 1]),
        ("@after=1;train.loss:nan@step=1", [(0, 0), (0, 1), (0, 2), (0, 3)], [1, 2]),
    ],
    ids=["hit", "from", "two", "after"],
)  # fmt: skip
def test_conditions_count_visits_steps_and_other_failpoints(
    armed: str, visits: list[tuple[int, int]], fired: list[int], tmp_path: Path
):
    found = fires(tmp_path, f"train.loss:nan{armed}", *(("train.loss", *visit) for visit in visits))
    assert [place for place, each in enumerate(found) if each] == fired


def test_only_one_of_several_processes_fires(tmp_path: Path):
    code = "from raytrain_ddp.failpoints import failpoint; import sys; sys.stdin.read(1)\n"
    code += "print(failpoint('train.loss'), end='')"
    armed = {VARIABLE: "train.loss:nan@hit=1", FOLDER_VARIABLE: str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        warm_python.WarmPython(
            [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT, **armed}, **pipes
        )
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == [b"1"] * 5 + [b"nan"]


@pytest.mark.parametrize(
    ("action", "status"), [("kill", -signal.SIGKILL), ("exit(3)", 3), ("term", -signal.SIGTERM)]
)
def test_a_process_ends_as_its_failpoint_specifies_and_passes_it_the_next_time(
    action: str, status: int, tmp_path: Path
):
    code = (
        "from raytrain_ddp.failpoints import failpoint; failpoint('train.loss', 1, 2); print('on')"
    )
    armed = {VARIABLE: f"train.loss:{action}@rank=1,step=2", FOLDER_VARIABLE: str(tmp_path)}
    ends = [
        warm_python.run(
            [sys.executable, "-c", code],
            env={**os.environ, **ENVIRONMENT, **armed},
            capture_output=True,
            text=True,
        )
        for _ in range(2)
    ]
    assert [(end.returncode, end.stdout) for end in ends] == [(status, ""), (0, "on\n")]


def test_errors_are_raised_in_the_caller(tmp_path: Path):
    arm("checkpoint.payload:enospc;checkpoint.begin:eio;train.loss:raise", str(tmp_path))
    for site, number in (("checkpoint.payload", errno.ENOSPC), ("checkpoint.begin", errno.EIO)):
        with pytest.raises(OSError, match="failpoint") as caught:
            failpoint(site)
        assert caught.value.errno == number
    with pytest.raises(RuntimeError, match="failpoint"):
        failpoint("train.loss")


def test_the_listed_sites_are_exactly_those_in_the_code():
    called = set()
    for path in Path(raytrain_ddp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "failpoint":
                called.add(ast.literal_eval(node.args[0]))
    assert called == set(SITES)
