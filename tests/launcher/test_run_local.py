"""`run` without Ray: real agents, guards, and scripts, with torchrun as the reference."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm_python

from raytrain_ddp.launcher import code_shipping
from raytrain_ddp.launcher import script_launch as launching
from raytrain_ddp.launcher.agent import Agent
from raytrain_ddp.launcher.rank_environment import Placement, assign_ranks
from raytrain_ddp.launcher.run_options import RunOptions
from raytrain_ddp.launcher.supervisor import SCONTROL
from raytrain_ddp.launcher.tracebacks import TracebackFinder
from raytrain_ddp.launcher.worker_group import WorkerGroup
from raytrain_ddp.run import parse

GUARD = Path(code_shipping.__file__).with_name("supervisor.py").read_text()


class Threads(types.ModuleType):
    """A Ray whose actors are objects in this process, and whose references are futures."""

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
    """The exit status and output of a run. `reported` are its own lines."""

    status: int
    out: str
    err: str
    reported: list[str]
    seconds: float

    @property
    def report(self) -> str:
        """The final message."""
        return self.err[self.err.index("failed first") - len("rank 0 ") :]


class Local:
    """Runs a script on three ranks; `stops` receive the numbers of signals."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.stops: list[int] = []
        self.stdin: Callable[[], bytes | None] | None = None
        self.logs: Path | None = None
        self.reported: list[str] = []

    def __call__(self, script: str, flags: str = "", args: Sequence[str] = ()) -> Ran:
        (self.folder / "script.py").write_text(script)
        order = parse([*f"--num-workers 3 {flags}".split(), "script.py", *args])
        began = time.monotonic()
        actors = [Actor() for _ in range(3)]
        try:
            group = self._group_of(order, actors)
            group.start("0" * 32, 0, feeds=self.stdin is not None)
            status, _ = launching._attempt(
                order, group, self.logs, self.stops, lambda: None, self.stdin
            )
        finally:
            for actor in actors:
                actor.close()
        seconds = time.monotonic() - began
        said = self._capfd.readouterr()
        return Ran(status, said.out, said.err, self.reported, seconds)

    def _group_of(self, order: RunOptions, actors: list[Actor]) -> WorkerGroup:
        group = WorkerGroup.__new__(WorkerGroup)
        group._options, group._driver, group._python = order, dict(os.environ), sys.executable
        group._check, group._here, group._folders, group._group = lambda: None, "here", {}, None
        group._agents = actors
        group.workers = assign_ranks([Placement(n, "here", "127.0.0.1", "host") for n in range(3)])
        group._facts = [{"environment": {}, "python": sys.executable}] * 3
        return group


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Local]:
    monkeypatch.setitem(sys.modules, "ray", Threads())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # `ray.init` of another test sets it
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    each = Local(tmp_path, capfd)
    monkeypatch.setattr(launching, "_tell", each.reported.append)
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
# The same, but its error does not show that it is a consequence of another.
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
def test_the_first_failed_rank_is_named_with_its_cause(cause: str, local: Local):
    """Even if the others end before it, or it is sent a signal while it ends."""
    others = FOLLOWS if cause == "an exception in a thread" else OTHER
    ran = local(HEAD + CAUSES[cause] + others, "--tee none --grace-s 1")
    assert ran.report.startswith("rank 1 failed first, on host (127.0.0.1): "), ran.err
    assert "the real cause" in ran.report
    assert "the second" not in ran.report.partition("the others")[0]
    assert ran.status == STATUSES.get(cause, 1)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_rank_that_printed_a_traceback_and_continued_is_not_blamed(stream: str, local: Local):
    went_on = (
        f"""
out = sys.{stream}
"""
        + """
if rank == 1:
    try:
        raise ValueError("was handled")
    except ValueError:
        traceback.print_exc()  # in <module>, as if nobody had caught it
    for n in range(200):
        print("goes on", file=out, flush=True)
        time.sleep(0.6)
        if n == 2:
            mark("raised")
"""
    )
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
    assert "rank 1 had also raised: ValueError: was handled" in ran.report


def test_a_consequential_error_is_not_blamed_even_if_it_arrives_first(local: Local):
    """The connection of a killed process may close before its exit is noticed."""
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


def test_output_caused_by_our_signal_is_not_blamed(local: Local):
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


# ------------------------------------------------------------------ input, output, signals


def pieces(*data: bytes) -> Callable[[], bytes | None]:
    """The standard input of `run`, with pauses."""
    left = [part for each in data for part in (each, None)] + [b""]
    return lambda: left.pop(0) if left else b""


READS = """
import os, sys
rank = os.environ["RANK"]
data = sys.stdin.buffer.read()
print(rank, len(data), hash(data) == hash(b"x" * len(data)), data[:5], flush=True)
"""


def test_rank_0_gets_all_standard_input_and_the_others_none(local: Local):
    local.stdin = pieces(b"x" * 300_000, b"x" * 7)
    ran = local(READS)
    assert ran.status == 0
    assert sorted(ran.out.splitlines()) == [
        "[rank 0] 0 300007 True b'xxxxx'",
        "[rank 1] 1 0 True b''",
        "[rank 2] 2 0 True b''",
    ]


def test_a_script_that_does_not_read_standard_input_does_not_block(local: Local):
    local.stdin = lambda: b"x" * 300_000
    assert local("print('done')").status == 0


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_input_is_passed_on_from_a_pipe_or_a_file(kind: str, tmp_path: Path):
    script = """
from raytrain_ddp.launcher.script_launch import _standard_input
import time
take, data = _standard_input(), b""
while (piece := take()) != b"":
    data += piece or b""
    time.sleep(0.001)
assert take() == b""
print(len(data))
"""
    (tmp_path / "data").write_bytes(b"y" * 700_000)
    command = [sys.executable, "-c", script]
    with (tmp_path / "data").open("rb") as file:
        given = {"stdin": file} if kind == "file" else {"input": b"y" * 700_000}
        done = subprocess.run(command, **given, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"700000\n"


def test_a_terminal_and_dev_null_are_not_passed_on():
    check = (
        "from raytrain_ddp.launcher.script_launch import _standard_input as f; print(f() is None)"
    )
    ours, theirs = os.openpty()
    for fd in (theirs, subprocess.DEVNULL):
        command = [sys.executable, "-c", check]
        assert subprocess.check_output(command, stdin=fd) == b"True\n"
    command = ["sh", "-c", f"{sys.executable} -c '{check}' <&-"]
    assert subprocess.check_output(command) == b"True\n"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("import os\nif os.environ['RANK'] == '1': breakpoint()\n", "debugger"),
        ("import os\nif os.environ['RANK'] == '1': input()\n", "only rank 0 gets the standard"),
        ("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)", "memory"),
        (
            "import os\nif os.environ['RANK'] == '1':\n"
            "    os.write(2, b'terminate called without an active exception\\n')\n    os.abort()",
            "destroy_process_group",
        ),
    ],
)
def test_a_failure_report_has_a_matching_hint(script: str, hint: str, local: Local):
    ran = local(f"{script}\nimport time; time.sleep(60 if os.environ['RANK'] != '1' else 0)")
    assert re.search(f"^hint: .*{hint}", ran.report, re.MULTILINE)


def test_the_exit_of_rank_0_with_the_store_is_the_cause_of_later_errors(local: Local):
    ran = local(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0': sys.exit()\n"
        "time.sleep(0.5)\n"
        "raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]')\n"
    )
    assert "hint: rank 0, which keeps the store of the process group, had ended" in ran.report


def test_a_rank_has_the_same_oom_score_as_under_torchrun(local: Local):
    ran = local("print(open('/proc/self/oom_score_adj').read().strip(), end=';')")
    assert "0;" in ran.out


BYTES = r"""
import os, sys, time
rank = int(os.environ["LOCAL_RANK"])
out, err = sys.stdout.buffer, sys.stderr.buffer
for n in range(3):
    out.write(b"\r%d%%" % (n * 50)); out.flush(); time.sleep(0.05)
out.write(b"\nwindows\r\n\xff\xfe\x00invalid\n")
out.write(b"z" * 3_000_000 + b"\n\n\n")
err.write(b"of rank %d\n" % rank)
out.write(b"no end"); out.flush()
"""


def test_the_log_files_equal_torchruns_byte_for_byte(local: Local, tmp_path: Path):
    local.logs = tmp_path / "ours/none_x/attempt_0"
    assert local(BYTES, "--log-dir ours -t 3").status == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command = [*torchrun, "--log-dir", "theirs", "-r", "3", "script.py"]
    warm_python.run(command, check=True, capture_output=True)  # its three ranks are not
    (theirs,) = (tmp_path / "theirs").glob("*_*/attempt_0")
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.log"))
    assert sorted(str(p.relative_to(local.logs)) for p in local.logs.rglob("*.log")) == names
    assert len(names) == 6
    for name in names:
        assert (local.logs / name).read_bytes() == (theirs / name).read_bytes(), name


def test_a_progress_bar_is_shown_as_on_a_terminal(local: Local):
    ran = local(BYTES.replace("3_000_000", "10"), "--show 1")
    assert ran.err.splitlines() == ["[rank 1] of rank 1"]
    lines = ran.out.splitlines()
    assert lines[0] in ("[rank 1] 0%", "[rank 1] 100%")  # the first drawing, and the last
    assert [line for line in lines if "50%" in line] == []
    assert lines[-6:] == [
        *("[rank 1] windows", "[rank 1] \ufffd\ufffd\x00invalid", "[rank 1] " + "z" * 10),
        *("[rank 1] ", "[rank 1] ", "[rank 1] no end"),
    ]


def test_streams_are_selected_with_torchruns_flags(local: Local):
    script = "import sys; print('out'); print('err', file=sys.stderr)"
    ran = local(script, "-r 1 -t 1:1,2:3 --local-ranks-filter 0,1")
    assert ran.out.splitlines() == ["[rank 1] out"]
    assert sorted(ran.err.splitlines()) == ["[rank 0] err", "[rank 1] err"]
    ran = local(script, "--log-line-prefix-template ${role_name}${local_rank}: --show 2 --role me")
    assert ran.out == "me2:out\n"


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(0 if os.environ["RANK"] == "1" else 100)
"""


def stopped(local: Local, *after_s: float) -> None:
    def stop() -> None:
        while len(list(local.folder.glob("ready-*"))) < 3:
            time.sleep(0.01)
        for pause_s in after_s:
            time.sleep(pause_s)
            local.stops.append(signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()


def test_ctrl_c_names_the_ranks_it_waits_for_until_they_are_killed(
    local: Local, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raytrain_ddp.launcher.attempt._WAITING_EVERY_S", 1.0)
    stopped(local, 0.5)
    ran = local(STUBBORN, "--grace-s 4")
    assert len(ran.reported) >= 2
    for line in ran.reported:
        assert re.fullmatch(
            r"SIGINT sent; waiting for ranks 0, 2 to end .SIGKILL in \d s, or press Ctrl-C again.",
            line,
        )
    assert "failed first" not in ran.err


def test_a_second_ctrl_c_ends_all_ranks_at_once(local: Local):
    stopped(local, 0.5, 0.5)
    ran = local(STUBBORN, "--grace-s 600")
    assert ran.seconds < 15
    assert ran.reported == []


# ------------------------------------------------------------------ messages of torch

GLOO = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 1:
    if sys.argv[1] == "raises":
        import atexit; atexit.register(time.sleep, 3)
        raise ValueError("the real cause")
    print("the real cause", flush=True)
    os._exit(9)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(("how", "status"), [("raises", 1), ("exits", 9)])
def test_with_three_gloo_ranks_only_the_first_failed_one_is_blamed(
    how: str, status: int, local: Local
):
    ran = local(GLOO, "--show none", [how])
    assert ran.report.startswith("rank 1 failed first"), ran.err
    assert "the real cause" in ran.report
    assert ran.status == status
    if how == "raises":
        assert "[rank1]: ValueError: the real cause" in ran.report


# ------------------------------------------------------------------ printed tracebacks

CAUGHT = (
    "import traceback\ndef f():\n try: 1/0\n except ArithmeticError: traceback.print_exc()\nf()"
)
CHAINED = "def f(*x):\n try: 1/0\n except ArithmeticError: raise KeyError('real')\n"
REAL = (True, False, "KeyError: 'real'")
PRINTED = [
    ("1/0", True, False, "ZeroDivisionError: division by zero"),
    ("def f(): 1/0\nf()", True, False, "ZeroDivisionError: division by zero"),
    (CAUGHT, False, False, "ZeroDivisionError: division by zero"),
    (CAUGHT + "\nraise ValueError('x')", True, False, "ValueError: x"),
    ("import threading as t; t.Thread(target=int, args='x').start()", False, True, "ValueError: "),
    ("import logging\ntry: 1/0\nexcept ArithmeticError: logging.exception('x')", True, False, "Z"),
    ("try: 1/0\nexcept ArithmeticError as e: raise KeyError(1) from e", True, False, "KeyError: 1"),
    ("def f(): f()\nf()", True, False, "RecursionError: "),
    ("raise ValueError('a\\nb\\nc')", True, False, "ValueError: a"),
    ("import ast; ast.parse('a b')", True, False, "SyntaxError: "),
    (
        "from rich import traceback as t; t.install()\ndef f(): 1/0\nf()",
        True,
        False,
        "ZeroDivision",
    ),
    ("class A:\n def __del__(self): 1/0\nA()", False, False, "ZeroDivisionError: "),
    (CHAINED + "import concurrent.futures as c\nc.ProcessPoolExecutor().submit(f).result()", *REAL),
    (CHAINED + "import multiprocessing as m\nm.Pool(1).apply(f)", *REAL),
    (
        CHAINED + "import torch.multiprocessing as m\nm.start_processes(f, start_method='fork')",
        *REAL,
    ),
    (
        CHAINED + "from torch.utils.data import DataLoader as D\nlist(D([1], None, num_workers=1, "
        "collate_fn=f))",
        *REAL,
    ),
    (  # the error of another process is not always the last one
        CHAINED + "import torch.multiprocessing as m\ndef g():\n try: m.start_processes("
        "f, start_method='fork')\n except Exception as e: raise ValueError('outer') from e\ng()",
        *(True, False, "ValueError: outer"),
    ),
]


@pytest.mark.parametrize("width", [*range(42, 90, 3)])
def test_rich_tracebacks_are_parsed_wherever_lines_wrap(width: int, tmp_path: Path):
    code = "from rich import traceback as t; t.install()\ndef f(): 1/0\nf()"
    (folder := tmp_path / "a b").mkdir()
    (folder / "script.py").write_text(code)
    command, environment = [sys.executable, folder / "script.py"], {"COLUMNS": str(width)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    watch = TracebackFinder()
    for line in done.stderr.splitlines():
        watch.line("stderr", line, 1.0)
    assert watch.raised is not None
    assert watch.raised.error.startswith("ZeroDivision")
    assert watch.raised.uncaught


@pytest.mark.parametrize(("code", "uncaught", "in_thread", "error"), PRINTED)
def test_python_tracebacks_are_parsed(
    code: str, uncaught: bool, in_thread: bool, error: str, tmp_path: Path
):
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, tmp_path / "script.py"]
    environment = {**os.environ, "COLUMNS": "40" if "rich" in code else "100"}
    run = warm_python.run if "torch" in code else subprocess.run
    done = run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    for prefix in ("", "\x1b[31m", "[rank1]: "):
        watch = TracebackFinder()
        for line in done.stderr.splitlines():
            watch.line("stderr", prefix + line, 1.0)
        raised = watch.raised
        assert raised is not None
        assert raised.error.startswith(error)
        assert raised.error in "\n".join(raised.lines)
        assert raised.uncaught == (uncaught or prefix.startswith("[rank"))
        assert raised.in_thread == in_thread
        assert raised.ending == raised.uncaught


def test_an_ignored_exception_does_not_explain_an_exit():
    watch = TracebackFinder()
    for line in (
        "Traceback (most recent call last):",
        '  File "s.py", line 5, in <module>',
        "KeyError: 'real'",
        "Exception ignored in: <module 'threading' from 'threading.py'>",
        "Traceback (most recent call last):",
        '  File "threading.py", line 1560, in _shutdown',
        "OSError: [Errno 9] Bad file descriptor",
    ):
        watch.line("stderr", f"[rank1]: {line}", 1.0)
    assert watch.raised is not None
    assert watch.raised.error == "KeyError: 'real'"


QUOTING = """Traceback (most recent call last):
  File "x.py", line 1, in main
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "x.py", line 2, in _wrap
ValueError: real"""


def test_a_traceback_after_another_process_error_is_a_separate_one():
    watch = TracebackFinder()
    for line in QUOTING.splitlines():
        watch.line("stderr", line, 1.0)
    assert watch.raised is not None
    assert watch.raised.error == "ValueError: real"
    later = [
        "Traceback (most recent call last):",
        '  File "x.py", line 9, in <module>',
        "KeyError: 1",
    ]
    for line in later:
        watch.line("stderr", line, 5.0)
    assert watch.raised.lines == later
    assert watch.raised.ending


def test_a_very_long_traceback_keeps_its_beginning_and_end():
    watch = TracebackFinder()
    frames = [f'  File "x.py", line {n}, in <module>' for n in range(1000)]
    for line in ["Traceback (most recent call last):", *frames, "ValueError: the real cause"]:
        watch.line("stderr", line, 1.0)
    assert watch.raised is not None
    lines = watch.raised.lines
    assert len(lines) == 61
    assert (lines[1], lines[20], lines[-1]) == (
        frames[0],
        "... 942 lines omitted ...",
        "ValueError: the real cause",
    )


def test_the_hosts_are_found_with_any_slurm_installation(tmp_path: Path) -> None:
    own, real = tmp_path / "own", tmp_path / "real"
    for folder, text in ((own, SCONTROL), (real, '#!/bin/sh\necho "real: $*"; exit 7\n')):
        folder.mkdir()
        (folder / "scontrol").write_text(text)
        (folder / "scontrol").chmod(0o755)
    paths = {"real": f"{own}:{real}:{os.defpath}", "none": f"{own}:/usr/bin:/bin"}

    def ask(words: str, slurm: str) -> tuple[int, str]:
        environment = {"PATH": paths[slurm], "SLURM_JOB_NODELIST": "a,b"}
        command = ["scontrol", *words.split()]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        return done.returncode, done.stdout + done.stderr

    for slurm in paths:
        assert ask("show hostnames", slurm) == (0, "a\nb\n")
        assert ask("show hostname x,y,z", slurm) == (0, "x\ny\nz\n")
    assert ask("show job 3", "real") == (7, "real: show job 3\n")
    assert ask("show hostnames n[1-2]", "real") == (7, "real: show hostnames n[1-2]\n")
    if shutil.which("scontrol", path=paths["none"]) is None:
        said = "scontrol: on Ray, only 'show hostnames' is supported\n"
        assert ask("show job 3", "none") == (1, said)
