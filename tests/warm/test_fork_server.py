"""The fork server without Ray: a forked process behaves like one that Python started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, wait_until

from raytrain_ddp.warm import fork_client
from raytrain_ddp.warm.warm_start import py_executable

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")

PROBE = """
import json, os, random, resource, signal, sys, threading
import numpy
torch = sys.modules.get("torch")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))

def signals(kind):  # glibc keeps the first ones behind these for itself
    return hex(int(status[kind], 16) & 0x7fffffff)

print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0),
    "random": [random.random(), numpy.random.rand(), *(torch.rand(1).tolist() if torch else ())],
    "same": {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "main": [__name__, __file__, sys.modules["__main__"].__file__],
        "executable": sys.executable, "dont_write_bytecode": sys.dont_write_bytecode,
        "environment": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0),
        "files": sorted(os.listdir("/proc/self/fd")), "input": sys.stdin.read(),
        "signals": [signals(kind) for kind in ("SigBlk", "SigIgn", "SigCgt")],
        "limits": [resource.getrlimit(n) for n in range(16)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "cpus": sorted(os.sched_getaffinity(0)),
        "oom": open("/proc/self/oom_score_adj").read(), "threads": threading.active_count(),
    },
}), flush=True)
print("to stderr", file=sys.stderr, flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(3)
"""


class Place:
    """A copy of the fork server that imports little, for workers of a fake Ray.

    Args:
        **changes: replacements in the text of these files.
    """

    def __init__(self, folder: Path, owner: int, **changes: str) -> None:
        self.folder, self.owner = folder, owner
        self.workers = folder / "lib" / "python3" / "ray" / "_private" / "workers"
        self.workers.mkdir(parents=True)
        (self.workers / "probe.py").write_text(PROBE)
        for source in Path(fork_client.__file__).parent.glob("fork_*.py"):
            text = source.read_text()
            head, _, rest = text.partition('_MODULES = """')
            if rest:
                modules = '_MODULES = """json numpy numpy.random"""'
                text = f"{head}{modules}{rest.partition(chr(34) * 3)[2]}"
            for word, instead in changes.items():
                text = text.replace(word, instead)
            (folder / source.name).write_text(text)
        self.command = [sys.executable, "-I", "-S", str(folder / "fork_client.py")]
        self.command += [str(owner), "1", str(self.workers / "probe.py")]

    def run(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """The probe's output, and whether the process was forked."""
        with self.start(*arguments, **options) as client:
            return reported(client)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
        command = [*self.command, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)

    def spare(self) -> int:
        """The pid of the process that waits to become the next one."""
        wait_until(lambda: [*self.folder.glob("ready-*")])
        [ready] = self.folder.glob("ready-*")
        ready.unlink()
        return int(ready.name.partition("-")[2])

    def servers(self) -> list[Any]:
        """The servers that run from this folder."""
        server = str(self.folder / "fork_server.py")
        found = psutil.process_iter(["cmdline", "ppid"])
        from_it = {p.pid: p for p in found if server in (p.info["cmdline"] or ())}
        return [p for p in from_it.values() if p.info["ppid"] not in from_it]


def reported(client: subprocess.Popen[str]) -> dict[str, Any]:
    assert client.stdout is not None
    report: dict[str, Any] = json.loads(client.stdout.readline())
    return {**report, "forked": report["pid"] != client.pid}


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for the raylet: when it ends, the server ends."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


@pytest.fixture
def place(tmp_path: Path, owner: subprocess.Popen[bytes]) -> Place:
    return Place(tmp_path, owner.pid)


VARIABLES = [
    "PYTHONHASHSEED=0 PYTHONOPTIMIZE=1 PYTHONWARNINGS=ignore PYTHONMALLOC=malloc PYTHONDEBUG=",
    "PYTHONSTARTUP=/rc.py PYTHONBREAKPOINT=a.b PYTHON_VERSION=3.11.9 PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUTF8=1 PYTHONIOENCODING=latin-1 PYTHONNOUSERSITE=1 PYTHONDEVMODE=1",
]


@pytest.fixture
def sparing(tmp_path: Path, owner: subprocess.Popen[bytes]) -> Place:
    """A place whose spares load a small module instead of Ray, and write a file when they have."""
    wait = "        asked, files = received(connection)"
    changes = {
        '("ray", "ray.train", "ray.train.torch")': '("fractions",)',
        "_QUIET_S = 3.0": "_QUIET_S = 0.1",
    }
    changes[wait] = f"        open(f'{tmp_path}/ready-{{os.getpid()}}', 'w')\n{wait}"
    return Place(tmp_path, owner.pid, **changes)


def test_a_spare_becomes_the_next_process_if_it_is_like_the_last(sparing: Place):
    reports = [sparing.run("wait")]
    for _ in range(2):  # a spare is replaced when it is taken
        spare = sparing.spare()
        reports.append(sparing.run("wait"))
        assert reports[-1]["pid"] == spare
    assert len({number for each in reports for number in each["random"]}) == 6
    unlike = sparing.spare()
    assert sparing.run(env={**os.environ, "RAY_X": "1"})["forked"]  # which Ray reads when loaded
    assert not alive(unlike)
    stopped, [server] = sparing.spare(), sparing.servers()
    os.kill(stopped, signal.SIGSTOP)
    assert sparing.run(env={**os.environ, "RAY_X": "1"})["pid"] != stopped
    assert not alive(stopped)
    last = sparing.spare()
    server.kill()
    wait_until(lambda: not alive(last))
    for each in reports:
        os.kill(each["pid"], signal.SIGKILL)


@pytest.mark.parametrize("is_spare", [False, True])
@pytest.mark.parametrize("variables", VARIABLES)
def test_a_forked_process_behaves_like_one_started_by_python(
    sparing: Place, tmp_path: Path, variables: str, is_spare: bool
):
    place = sparing
    folder = tmp_path / "work"
    folder.mkdir()

    def differ() -> None:  # from the server in everything a process inherits
        os.umask(0o027)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
        os.nice(3)
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        Path("/proc/self/oom_score_adj").write_text("500")
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))

    extra = {"PYTHONPATH": f"{folder}", "A": "ö"}
    extra |= {each.partition("=")[0]: each.partition("=")[2] for each in variables.split()}
    options: dict[str, Any] = {
        "cwd": folder,
        "preexec_fn": differ,
        "env": {**{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}, **extra},
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    answers = []
    if is_spare:
        place.run(**{**options, "stdin": subprocess.DEVNULL})
        spare = place.spare()
    for command in (place.command, [sys.executable, place.command[-1]]):
        with subprocess.Popen([*command, "x", "ü"], **pipes, **options) as process:
            out, errors = process.communicate(b"typed", timeout=60)
        assert b"to stderr\n" in errors
        answers.append((json.loads(out), process))
    (forked, _), (usual, plain) = answers
    assert forked["same"] == usual["same"]
    assert not is_spare or forked["pid"] == spare
    assert forked["same"]["input"] == "typed"
    assert forked["pid"] == forked["group"]  # a session of its own
    assert forked["parent"] == place.servers()[0].pid
    assert usual["pid"] == plain.pid


def test_simultaneous_clients_share_one_server(place: Place):
    clients = [place.start() for _ in range(6)]
    answers = [reported(client) for client in clients]
    for client in clients:
        assert client.wait(20) == 0  # the client itself succeeds
        client.stdout.close()  # type: ignore[union-attr]
    assert all(answer["forked"] for answer in answers)
    assert len({answer["parent"] for answer in answers}) == 1
    assert len({number for answer in answers for number in answer["random"]}) == 12
    wait_until(lambda: len(place.servers()) == 1)  # servers that found another one exit


def test_a_server_outlives_its_processes_and_ends_with_its_owner(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    place = Place(tmp_path, owner.pid, **{"_GRACE_S = 5.0": "_GRACE_S = 0.5"})
    waiting = [place.run("wait") for _ in range(3)]
    [server] = place.servers()
    os.kill(waiting[0]["pid"], signal.SIGKILL)
    wait_until(lambda: not alive(waiting[0]["pid"]))
    assert place.run()["parent"] == server.pid
    assert alive(waiting[1]["pid"])
    owner.kill()
    wait_until(lambda: not server.is_running())
    # Ray's own processes would have ended by themselves.
    assert not any(alive(each["pid"]) for each in waiting)


def test_fault_59_forked_processes_survive_a_killed_server(place: Place):
    waiting = place.run("wait")
    [server] = place.servers()
    server.kill()
    server.wait(20)
    after = place.run()
    assert after["forked"]  # by a new server
    assert after["parent"] != server.pid
    assert alive(waiting["pid"])
    os.kill(waiting["pid"], signal.SIGKILL)


def test_fault_59_another_python_or_module_path_starts_python_instead_of_forking(
    place: Place, tmp_path: Path
):
    assert place.run()["forked"]
    for name in ("SAFEPATH", "INSPECT", "VERBOSE", "PROFILEIMPORTTIME"):
        assert not place.run(env={**os.environ, f"PYTHON{name}": "1"})["forked"], name
    (tmp_path / "sitecustomize.py").touch()
    path = os.pathsep.join(["/not/there", str(tmp_path)])
    assert not place.run(env={**os.environ, "PYTHONPATH": path})["forked"]
    (tmp_path / "sitecustomize.py").rename(tmp_path / "json.py")  # the server has loaded another
    with place.start(env={**os.environ, "PYTHONPATH": path}) as client:
        assert client.communicate()[0] == ""


def test_a_new_installation_or_environment_starts_another_server(place: Place):
    first = place.run()["parent"]
    (place.workers.parents[2] / "new-package").mkdir()
    second = place.run()["parent"]
    third = place.run(env={**os.environ, "MKL_NUM_THREADS": "3"})["parent"]
    fourth = place.run(env={**os.environ, "OMP_NUM_THREADS": "3"})["parent"]
    assert len({first, second, third}) == 3
    assert fourth == second  # Ray sets it per worker; torch uses another number


def test_fault_59_python_is_started_when_forking_is_impossible(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    reasons = {
        "return threads == 1": "return threads == 0",  # a library has started a thread
        "LEAST_FREE = 0.1": "LEAST_FREE = 1.1",  # no memory is free
        "listener.bind(": "sys.exit(",  # the server does not start
    }
    for number, (word, instead) in enumerate(reasons.items()):
        report = Place(tmp_path / str(number), owner.pid, **{word: instead}).run("x")
        assert not report["forked"], word
        assert report["same"]["argv"][1:] == ["x"]
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    place = Place(tmp_path / "gone", gone.pid)
    assert not place.run()["forked"]
    assert place.servers() == []


def test_an_idle_server_exits_once_no_process_of_a_job_lives(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    changes = {"IDLE_S = 3600.0": "IDLE_S = 0.2", "_LOOK_S = 10.0": "_LOOK_S = 0.1"}
    place = Place(tmp_path / "job", owner.pid, **changes)
    waiting = place.run("wait")
    [server] = place.servers()
    os.kill(waiting["pid"], signal.SIGKILL)
    wait_until(lambda: not server.is_running())


def test_ray_runs_the_command_with_python_installed_elsewhere(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    client = str(tmp_path / "fork_client.py")
    monkeypatch.setattr(fork_client, "__file__", client)

    def as_ray(command: str) -> dict[str, Any]:  # see RuntimeEnvContext.exec_worker
        line = f"exec {command} {place.command[-1]} 'two words'"
        with subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True) as worker:
            report = reported(worker)
        assert report["same"]["argv"][1:] == ["two words"]
        return report

    assert as_ray(py_executable(place.owner, 1))["forked"]
