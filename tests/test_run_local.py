"""`run` without Ray: real agents, guards and scripts, and torchrun as the reference."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.orchestration.run import launch as launching
from raytrain_ddp.orchestration.run import ship
from raytrain_ddp.orchestration.run.agent import Agent
from raytrain_ddp.orchestration.run.crew import Crew
from raytrain_ddp.orchestration.run.order import Order
from raytrain_ddp.orchestration.run.plan import Seat, ranked
from raytrain_ddp.run import parse

GUARD = Path(ship.__file__).with_name("guard.py").read_text()


class Threads(types.ModuleType):
    """A Ray whose actors are objects of this process, and whose references are futures."""

    class RayError(Exception):
        pass

    RayActorError = GetTimeoutError = RayTaskError = type("Never", (RayError,), {})

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = Threads

    def wait(
        self, refs: list[Future[Any]], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        when = FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED"
        done, _ = wait_for(refs, timeout, when)
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    def get(self, ref: Future[Any], timeout: float | None = None) -> Any:
        return ref.result(timeout)


class Actor:
    """``actor.method.remote(...)`` for an agent of this process."""

    def __init__(self) -> None:
        self.agent, self._pool = Agent(GUARD), ThreadPoolExecutor(8)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.agent, name)
        return types.SimpleNamespace(remote=lambda *args: self._pool.submit(method, *args))

    def close(self) -> None:
        self.agent.signal("kill")
        self.agent.clean()
        self._pool.shutdown(wait=False)


@dataclass
class Ran:
    """What a run ended with and said. `told` are its own lines."""

    status: int
    out: str
    err: str
    told: list[str]
    seconds: float

    @property
    def report(self) -> str:
        """The final message."""
        return self.err[self.err.index("failed first") - len("rank 0 ") :]


class Local:
    """Runs a script on three ranks; `stops` get the numbers of signals."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.stops: list[int] = []
        self.stdin: Callable[[], bytes | None] | None = None
        self.logs: Path | None = None
        self.told: list[str] = []

    def __call__(self, script: str, flags: str = "", args: Sequence[str] = ()) -> Ran:
        (self.folder / "script.py").write_text(script)
        order = parse([*f"--num-workers 3 {flags}".split(), "script.py", *args])
        began = time.monotonic()
        actors = [Actor() for _ in range(3)]
        try:
            crew = self._crew(order, actors)
            crew.start("0" * 32, 0, lambda: None, feeds=self.stdin is not None)
            status, _ = launching._attempt(
                order, crew, self.logs, self.stops, lambda: None, self.stdin
            )
        finally:
            for actor in actors:
                actor.close()
        seconds = time.monotonic() - began
        said = self._capfd.readouterr()
        return Ran(status, said.out, said.err, self.told, seconds)

    def _crew(self, order: Order, actors: list[Actor]) -> Crew:
        crew = Crew.__new__(Crew)
        crew._order, crew._driver, crew._python = order, dict(os.environ), sys.executable
        crew._check, crew._here, crew._folders, crew._group = lambda: None, "here", {}, None
        crew._agents = actors
        crew.workers = ranked([Seat(n, "here", "127.0.0.1", "host") for n in range(3)])
        crew._facts = [{"environment": {}, "python": sys.executable}] * 3
        return crew


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Local]:
    monkeypatch.setitem(sys.modules, "ray", Threads())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    each = Local(tmp_path, capfd)
    monkeypatch.setattr(launching, "_tell", each.told.append)
    yield each
    assert not list(tmp_path.glob("raytrain-run-*"))


# ------------------------------------------------------------------ who failed first

HEAD = """
import atexit, os, signal, sys, threading, time, traceback
rank = int(os.environ["RANK"])
def until(name, within_s=20):
    end = time.monotonic() + within_s
    while not os.path.exists(name) and time.monotonic() < end:
        time.sleep(0.01)
def mark(name):
    open(name, "w").close()
"""
# Rank 0 fails when it sees that rank 1 has: `mark("raised")`.
FOLLOWS = """
if rank == 0:
    until("raised")
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
if rank == 2:
    time.sleep(60)
"""
# The same, but its error does not tell that it follows from another.
OTHER = FOLLOWS.replace("Connection closed by peer [127.0.0.1]:1234", "the second")

CAUSES = {
    "its exit takes 3 s": """
if rank == 1:
    atexit.register(time.sleep, 3)
    mark("raised")
    raise ValueError("the real cause")
""",
    "its exit takes longer than we wait": """
if rank == 1:
    atexit.register(time.sleep, 20)
    mark("raised")
    raise ValueError("the real cause")
""",
    "with torch's prefix": """
def hook(*error):
    text = "".join(traceback.format_exception(*error))
    sys.stderr.write("".join(f"[rank{rank}]: {line}\\n" for line in text.splitlines()))
if rank == 1:
    sys.excepthook = hook
    atexit.register(time.sleep, 20)
    threading.Timer(2.0, print, ["a thread of it goes on"]).start()
    mark("raised")
    raise ValueError("the real cause")
""",
    "behind a progress bar, in color": """
if rank == 1:
    sys.stderr.write("\\r 10%|#     | 1/10\\r 20%|##    | 2/10 ")
    sys.excepthook = lambda *e: sys.stderr.write("".join(traceback.format_exception(*e)).replace(
        'File "', 'File \\x1b[35m"').replace('"', '\\x1b[0m"', 0))
    atexit.register(time.sleep, 3)
    mark("raised")
    raise ValueError("the real cause")
""",
    "chained": """
if rank == 1:
    atexit.register(time.sleep, 2)
    mark("raised")
    try:
        def f(): raise KeyError("first")
        f()
    except KeyError as error:
        raise ValueError("the real cause") from error
""",
    "caught, printed, and exit(7) long after": """
def train(): raise ValueError("the real cause")
if rank == 1:
    try:
        train()
    except ValueError:
        traceback.print_exc()
        mark("raised")
        time.sleep(2)
        sys.exit(7)
""",
    "an exception in a thread": """
def load(): raise ValueError("the real cause")
if rank == 1:
    threading.Thread(target=load).start()
    mark("raised")
    time.sleep(60)
""",
    "sys.exit with words": """
if rank == 1:
    mark("raised")
    sys.exit("the real cause")
""",
    "os._exit": """
if rank == 1:
    print("the real cause", flush=True)
    mark("raised")
    os._exit(9)
""",
    "a signal": """
if rank == 1:
    print("the real cause", flush=True)
    mark("raised")
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "a fault": """
if rank == 1:
    import faulthandler; faulthandler.enable()
    print("the real cause", flush=True)
    mark("raised")
    os.kill(os.getpid(), signal.SIGSEGV)
""",
    "a recorded error": """
if rank == 1:
    import json
    def f(): raise ValueError("the real cause")
    stack = {"py_callstack": "Traceback\\nValueError: the real cause"}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "x", "extraInfo": stack}}, file)
    mark("raised")
    time.sleep(60)
""",
}
STATUSES = {
    "caught, printed, and exit(7) long after": 7,
    "os._exit": 9,
    "a signal": 137,
    "a fault": 139,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_rank_that_failed_first_is_named_with_its_cause_whatever_is_shown(
    cause: str, local: Local
):
    """Also where the others end before it, or it is sent a signal while it ends."""
    others = FOLLOWS if cause == "an exception in a thread" else OTHER
    ran = local(HEAD + CAUSES[cause] + others, "--tee none --grace-s 1")
    assert ran.report.startswith("rank 1 failed first, on host (127.0.0.1): "), ran.err
    assert "the real cause" in ran.report
    assert "the second" not in ran.report.partition("the others")[0]
    assert ran.status == STATUSES.get(cause, 1)


def test_a_rank_that_printed_a_traceback_and_went_on_is_not_blamed(local: Local):
    went_on = """
if rank == 1:
    try:
        raise ValueError("was handled")
    except ValueError:
        traceback.print_exc()  # in <module>, as if nobody had caught it
    for n in range(200):
        print("goes on", flush=True)
        time.sleep(0.1)
        if n == 10:
            mark("raised")
"""
    ran = local(HEAD + went_on + OTHER, "--tee none")
    assert ran.report.startswith("rank 0 failed first")
    assert "RuntimeError: the second" in ran.report.partition("the others")[0]
    assert ran.status == 1


def test_a_rank_that_logged_an_error_and_waits_is_not_blamed(local: Local):
    logged = """
def train():
    try:
        raise ValueError("was handled")
    except ValueError:
        traceback.print_exc()
if rank == 1:
    train()
    mark("raised")
    time.sleep(60)
"""
    ran = local(HEAD + logged + OTHER, "--tee none")
    assert ran.report.startswith("rank 0 failed first")
    assert "rank 1 had said: ValueError: was handled" in ran.report


def test_an_error_that_follows_is_not_the_first_even_if_it_came_first(local: Local):
    """The connection of a process that is killed may close before its end is seen."""
    script = """
if rank == 0:
    mark("followed")
    raise RuntimeError("Connection reset by peer")
if rank == 1:
    until("followed")
    time.sleep(0.2)
    os._exit(5)
time.sleep(60)
"""
    ran = local(HEAD + script)
    assert ran.report.startswith("rank 1 failed first, on host (127.0.0.1): exit status 5")
    assert ran.status == 5


def test_nobody_is_blamed_for_what_our_signal_made_it_print(local: Local):
    script = """
if rank == 0:
    time.sleep(0.5)
    sys.exit(4)
def ended(*_): raise ValueError("told to end")
signal.signal(signal.SIGTERM, ended)
time.sleep(60)
"""
    ran = local(HEAD + script)
    assert ran.report.startswith("rank 0 failed first, on host (127.0.0.1): exit status 4")
    assert "told to end" not in ran.report
    assert ran.status == 4
