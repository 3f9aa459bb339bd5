"""The guard of a script, and the agent that starts it: every process ends, nothing said is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import STUBBORN, alive, wait_until

from raytrain_ddp.launcher import guard
from raytrain_ddp.launcher.agent import Agent

GUARD = Path(guard.__file__)


class Guarded:
    """A command under a guard in the background, as the agent runs it."""

    def __init__(self, folder: Path, *command: str) -> None:
        reported, tells = os.pipe()
        (folder / "own").mkdir()
        own = shutil.copy(GUARD, folder / "own")
        guard = [sys.executable, "-I", "-S", str(own), str(tells), os.devnull, str(folder)]
        starter = subprocess.Popen([*guard, *command], stdin=subprocess.PIPE, pass_fds=[tells])
        os.close(tells)
        assert starter.wait(10) == 0
        assert starter.stdin is not None
        self.pipe, self._reports = starter.stdin, os.fdopen(reported)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.pipe.closed:
            self.pipe.close()
        self._reports.close()

    def report(self) -> dict[str, float]:
        return json.loads(self._reports.readline())

    def over(self) -> bool:
        """Waits for the end of the guard."""
        return not self._reports.read()

    def say(self, word: str) -> None:
        self.pipe.write(f"{word}\n".encode())
        self.pipe.flush()


def pids_in(file: Path) -> list[int]:
    """The PIDs that a STUBBORN script has recorded, as soon as they exist."""
    wait_until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize("end", ["its owner goes", "a signal that is ignored"])
def test_the_guard_leaves_no_processes(end: str, tmp_path: Path):
    stubborn = [sys.executable, "-c", STUBBORN, str(tmp_path / "pids")]
    with Guarded(tmp_path, *stubborn) as guarded:
        pids = pids_in(tmp_path / "pids")
        if end == "a signal that is ignored":
            guarded.say("15 0.1")
        else:
            guarded.pipe.close()
        assert guarded.report()["status"] == -9
        assert guarded.over(), "the guard has ended"
        assert not any(map(alive, pids))
        assert not (tmp_path / "own").exists()


def test_a_signal_goes_to_the_script_and_its_children_and_leftovers_end_with_it(tmp_path: Path):
    """Only the script ignores SIGTERM; SIGUSR1 ends it; its daemon is left over."""
    with Guarded(tmp_path, sys.executable, "-c", STUBBORN, str(tmp_path / "pids")) as guarded:
        script, child, daemon = pids_in(tmp_path / "pids")
        guarded.say("15 600")
        wait_until(lambda: not alive(child))
        assert alive(script)
        assert alive(daemon)
        guarded.say(f"{int(signal.SIGUSR1)} 600")
        ended = guarded.report()
        assert (ended["status"], ended["asked"]) == (-signal.SIGUSR1, signal.SIGUSR1)
        wait_until(lambda: not alive(daemon))


@pytest.fixture
def agent() -> Iterator[Agent]:
    each = Agent(GUARD.read_text())
    yield each
    each.signal(9, 0)
    each.clean()


def started(agent: Agent, script: str, folder: Path) -> None:
    command = [sys.executable, "-c", script]
    agent.start(command, dict(os.environ), str(folder), False, os.devnull)


def taken(agent: Agent) -> list[tuple[str, Any]]:
    """All news."""
    news: list[tuple[str, Any]] = []
    deadline = time.monotonic() + 30
    while ("closed", None) not in news:
        assert time.monotonic() < deadline, news
        news += agent.take(1.0)[1]
    return news


def test_all_lines_of_a_script_arrive_even_long_after_its_end(agent: Agent, tmp_path: Path):
    started(agent, "for n in range(30_000): print(n)\nraise SystemExit(3)", tmp_path)
    news = taken(agent)
    said = b"".join(value for kind, value in news if kind == "stdout")
    assert said.decode() == "".join(f"{n}\n" for n in range(30_000))
    assert [value["status"] for kind, value in news if kind == "end"] == [3]


def test_a_signal_right_after_the_start_is_not_lost(tmp_path: Path):
    for _ in range(3):
        agent = Agent(GUARD.read_text())
        started(agent, "import time; time.sleep(600)", tmp_path)
        agent.signal(15, 600)
        (end,) = (value for kind, value in taken(agent) if kind == "end")
        assert (end["status"], end["asked"]) == (-15, 15)
        agent.clean()
