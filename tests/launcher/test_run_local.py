"""`run` with a stand-in for Ray: real agents and scripts, with torchrun as the reference."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_python
from processes import wait_until
from thread_ray import ThreadRay

from raytrain_ddp.launcher.script_launch import run_script
from raytrain_ddp.launcher.torchrun_flags import parse


@dataclass
class Ran:
    """The exit status and output of a run."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def report(self) -> str:
        """The message about the first failure, from its rank on."""
        return self.err[self.err.index("failed first") - len("rank 0 ") :]


class Local:
    """Runs a script on three ranks."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd

    def __call__(self, script: str, flags: str = "", args: Sequence[str] = ()) -> Ran:
        (self.folder / "script.py").write_text(script)
        began = time.monotonic()
        options = parse([*f"--num-workers 3 {flags}".split(), "script.py", *args])
        status = run_script(options)
        said = self._capfd.readouterr()
        return Ran(status, said.out, said.err, time.monotonic() - began)


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Local]:
    ThreadRay().install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "PYTHONBREAKPOINT"))]:
        monkeypatch.delenv(name)  # `ray.init` of another test sets the latter
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield Local(tmp_path, capfd)
    wait_until(lambda: not list(tmp_path.glob("raytrain-run-*")))  # guards remove what they made


# ------------------------------------------------------------------ who failed first

HEAD = """
import atexit, os, signal, sys, time
rank = int(os.environ["RANK"])
def until(name, within_s=20):
    end = time.monotonic() + within_s
    while not os.path.exists(name) and time.monotonic() < end:
        time.sleep(0.01)
def mark(name):
    open(name, "w").close()
"""
# Rank 0 fails some time after rank 1.
FOLLOWS = """
if rank == 0:
    until("raised", 100)
    time.sleep(0.4)
    raise RuntimeError("the second")
if rank == 2:
    time.sleep(200)
"""
CAUSES = {
    "torch's error file, and an exit that takes longer than we wait": """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main(): raise ValueError("the real cause")
atexit.register(time.sleep, 20)
try:
    main()
finally:
    mark("raised")
""",
    "torch's error file, and an exit before that of the others": """
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write('{"message": "the real cause"}')
mark("raised")
sys.exit(7)
""",
    "os._exit": """
print("the real cause", flush=True)
mark("raised")
os._exit(9)
""",
    "a signal": """
print("the real cause", flush=True)
mark("raised")
os.kill(os.getpid(), signal.SIGKILL)
""",
}
STATUSES = dict(zip(CAUSES, (1, 7, 9, 137), strict=True))


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_failed_rank_is_named_with_its_cause(cause: str, local: Local):
    """Even if the others end before it, or it is sent a signal while it ends."""
    first = "if rank == 1:\n" + textwrap.indent(CAUSES[cause], "    ")
    ran = local(HEAD + first + FOLLOWS, "--show none --grace-s 1")
    assert ran.report.startswith("rank 1 failed first"), ran.err
    assert "the real cause" in ran.report
    assert "the second" not in ran.report.partition("the others")[0]
    assert ran.status == STATUSES[cause]


# ------------------------------------------------------------------ restarts


def test_all_ranks_are_restarted_together_until_none_fails(local: Local):
    """Rank 1 fails in two attempts; the others would wait forever."""
    script = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
mark(f"{sys.argv[2]}-{attempt}-{rank}")
for each in range(3):
    until(f"{sys.argv[2]}-{attempt}-{each}")
if rank == 1 and attempt == "0":
    raise ValueError("no such thing")
if rank == 1 and attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if attempt == sys.argv[1] else 600)
"""
    ran = local(HEAD + script, "--max-restarts 2", ["2", "a"])
    assert ran.status == 0
    assert sorted(ran.out.splitlines()) == [f"[rank {r}] attempt {a}" for r in "012" for a in "012"]
    ran = local(HEAD + script, "--max-restarts 1", ["2", "b"])
    assert ran.status == 137, "of the last attempt"
    assert len(ran.out.splitlines()) == 6
    assert local("raise SystemExit(5)").status == 5
    gc.collect()


# ------------------------------------------------------------------ input, output, signals

READS = """
import os, sys
rank = os.environ["RANK"]
data = sys.stdin.buffer.read()
print(rank, len(data), data == b"x" * len(data), flush=True)
"""


@contextmanager
def standard_input(fd: int) -> Iterator[None]:
    """This process reads from another file while in this context."""
    own = os.dup(0)
    os.dup2(fd, 0)
    try:
        yield
    finally:
        os.dup2(own, 0)
        os.close(own)


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_rank_0_gets_all_standard_input_and_the_others_none(kind: str, local: Local):
    data = b"x" * 700_007
    if kind == "file":
        (local.folder / "data").write_bytes(data)
        reads = os.open(local.folder / "data", os.O_RDONLY)
    else:
        reads, writes = os.pipe()

        def write() -> None:
            with os.fdopen(writes, "wb") as file:
                file.write(data)

        threading.Thread(target=write, daemon=True).start()
    with standard_input(reads):
        ran = local(READS)
    os.close(reads)
    assert ran.status == 0
    expected = ["[rank 0] 0 700007 True", "[rank 1] 1 0 True", "[rank 2] 2 0 True"]
    assert sorted(ran.out.splitlines()) == expected


DUMPS = r"""
import json, os, signal, sys, time
env = dict(os.environ)
env["SIGINT"] = str(signal.getsignal(signal.SIGINT))
env["MASK"] = str(signal.pthread_sigmask(signal.SIG_BLOCK, []))
env["OOM"] = open("/proc/self/oom_score_adj").read()
env["CWD"], env["ARGV"], env["MAIN"] = os.getcwd(), " ".join(sys.argv[2:]), __name__
with open(f"{sys.argv[1]}-{env['RANK']}", "w") as file:
    json.dump(env, file)
out, err = sys.stdout.buffer, sys.stderr.buffer
for n in range(3):
    out.write(b"\r%d%%" % (n * 50)); out.flush(); time.sleep(0.05)
out.write(b"\nwindows\r\n\xff\xfe\x00invalid\n")
out.write(b"z" * int(sys.argv[2]) + b"\n\n\n")
err.write(b"of rank %d\n" % int(os.environ["LOCAL_RANK"]))
out.write(b"no end"); out.flush()
"""
# The address of the rendezvous, who serves the store, this run's id; what readline sets in C; what
# torch sets in the process that the reference is forked from.
DIFFER = (
    r"MASTER_.*|TORCHELASTIC_(RUN_ID|USE_AGENT_STORE|ERROR_FILE)|RAY_.*|COLUMNS|LINES"
    r"|TORCHINDUCTOR_.*"
)


def test_environment_and_log_files_equal_torchruns(local: Local):
    args = ["3000000", "--rank"]
    ran = local(DUMPS, "--log-dir ours -t 3 --max-restarts 3", ["ours", *args])
    assert ran.status == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command = [*torchrun, "--max-restarts", "3", "--log-dir", "theirs", "-r", "3"]
    command += ["script.py", "theirs", *args]
    warm_python.run(command, check=True, env=os.environ)  # its three ranks are not
    logs = []
    for who in ("ours", "theirs"):
        (folder,) = (local.folder / who).glob("*_*/attempt_0")
        files = folder.rglob("*.log")
        logs.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert logs[0] == logs[1]
    assert len(logs[0]) == 6
    for rank in range(3):
        own, theirs = (
            json.loads((local.folder / f"{who}-{rank}").read_text()) for who in ("ours", "theirs")
        )
        assert own["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert Path(own["TORCHELASTIC_ERROR_FILE"]).name == "error.json"
        own, theirs = (
            {name: value for name, value in env.items() if not re.fullmatch(DIFFER, name)}
            for env in (own, theirs)
        )
        assert own == theirs


def test_a_progress_bar_is_shown_as_on_a_terminal(local: Local):
    ran = local(DUMPS, "--show 1", ["x", "10"])
    assert "[rank 1] of rank 1" in ran.err.splitlines()
    lines = ran.out.splitlines()
    assert lines[0] in ("[rank 1] 0%", "[rank 1] 100%")  # the first drawing, and the last
    assert [line for line in lines if "50%" in line] == []
    assert lines[-6:] == [
        *("[rank 1] windows", "[rank 1] \ufffd\ufffd\x00invalid", "[rank 1] " + "z" * 10),
        *("[rank 1] ", "[rank 1] ", "[rank 1] no end"),
    ]


def test_streams_are_selected_with_torchruns_flags(local: Local):
    script = "import sys; print('out'); print('err', file=sys.stderr)"
    ran = local(script, "-r 1 -t 1:1,2:3 --local-ranks-filter 0,1 --log-dir logs --rdzv-id ../../x")
    assert ran.out.splitlines() == ["[rank 1] out"]
    shown = sorted(line for line in ran.err.splitlines() if line.startswith("[rank"))
    assert shown == ["[rank 0] err", "[rank 1] err"]
    assert len(list((local.folder / "logs").glob("*/attempt_0/*/stdout.log"))) == 3, "stays inside"
    ran = local(script, "--log-line-prefix-template ${role_name}${local_rank}: --show 2 --role me")
    assert ran.out == "me2:out\n"


def test_ctrl_c_ends_stubborn_ranks_after_the_grace_and_a_second_one_at_once(local: Local):
    script = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(0 if os.environ["RANK"] == "1" else 100)
"""

    def interrupt(times: int) -> None:
        while len(list(local.folder.glob("ready-*"))) < 3:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the kernel would merge two at once

    for times, grace_s in ((1, 3), (2, 600)):
        for ready in local.folder.glob("ready-*"):
            ready.unlink()
        threading.Thread(target=interrupt, args=(times,), daemon=True).start()
        ran = local(script, f"--grace-s {grace_s}")
        assert ran.status == 130
        assert "failed first" not in ran.err
        assert ran.seconds < 60
        if times == 1:
            assert re.search(r"(?m)^run: .*ranks 0, 2", ran.err)
            assert ran.seconds >= grace_s
