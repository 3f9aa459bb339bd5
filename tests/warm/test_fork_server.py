"""The fork server without Ray: a forked process behaves like one that Python started."""

from __future__ import annotations

import json
import marshal
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from raytrain_ddp import TrainConfig
from raytrain_ddp.config.scaling_section import ScalingConfig
from raytrain_ddp.ray_backend.cluster import _warm
from raytrain_ddp.warm import fork_client
from raytrain_ddp.warm.warm_start import announce_job, py_executable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")

PROBE = """
import json, os, random, resource, signal, sys, threading
import numpy
torch = sys.modules.get("torch")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))

def signals(kind):  # glibc keeps the first ones behind these for itself
    return hex(int(status[kind], 16) & 0x7fffffff)

print(json.dumps({
    "loaded": "fractions" in sys.modules,
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
        spares: number of spare processes; they load a small module instead of Ray.
        **changes: replacements in the text of these files.
    """

    def __init__(self, folder: Path, owner: int, spares: int = 0, **changes: str) -> None:
        self.folder, self.owner = folder, owner
        self.started: set[int] = set()
        self.workers = folder / "lib" / "python3" / "ray" / "_private" / "workers"
        self.workers.mkdir(parents=True)
        (self.workers / "probe.py").write_text(PROBE)
        for source in Path(fork_client.__file__).parent.glob("fork_*.py"):
            text = source.read_text()
            head, _, rest = text.partition('_MODULES = """')
            if rest:
                text = f'{head}_MODULES = """json numpy"""{rest.partition(chr(34) * 3)[2]}'
            text = text.replace('"ray", "ray.train", "ray.train.torch"', '"fractions",')
            changes.setdefault("_QUIET_S = 3.0", "_QUIET_S = 0.1")
            ready = "        request, files = received"
            changes.setdefault(
                ready, f"        open(f'{folder}/ready-{{os.getpid()}}', 'w')\n{ready}"
            )
            for word, instead in changes.items():
                text = text.replace(word, instead)
            (folder / source.name).write_text(text)
        self.command = [sys.executable, "-I", "-S", str(folder / "fork_client.py"), "always"]
        self.command += [str(owner), "1", str(spares), str(self.workers / "probe.py")]

    def run(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """The probe's output, and whether the process was forked."""
        with self.start(*arguments, **options) as client:
            report = reported(client)
            self.started.add(report["pid"])
            return report

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
        command = [*self.command, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)

    def spares(self, number: int) -> list[psutil.Process]:
        """The waiting spare processes, as soon as this number is ready."""
        [server] = self.servers()
        deadline = time.monotonic() + 60
        while len(found := self.waiting(server)) != number:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found

    def waiting(self, server: psutil.Process) -> list[psutil.Process]:
        ready = {int(each.name.partition("-")[2]) for each in self.folder.glob("ready-*")}
        return [p for p in server.children() if p.pid in ready - self.started]

    def servers(self) -> list[psutil.Process]:
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


def wait_until(condition: Any, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("spares", [0, 1])
def test_a_forked_process_behaves_like_one_started_by_python(
    tmp_path: Path, owner: subprocess.Popen[bytes], spares: int
):
    place = Place(tmp_path, owner.pid, spares)
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
    options: dict[str, Any] = {
        "cwd": folder,
        "preexec_fn": differ,
        "env": {**{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}, **extra},
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if spares:
        place.run(stdin=subprocess.DEVNULL, cwd=folder, env=options["env"])
        place.spares(1)
    answers = []
    for command in (place.command, [sys.executable, place.command[-1]]):
        with subprocess.Popen([*command, "x", "ü"], text=True, **pipes, **options) as process:
            out, errors = process.communicate("typed", timeout=60)
        assert errors == "to stderr\n"
        answers.append((json.loads(out), process))
    (forked, _), (usual, plain) = answers
    assert forked["same"] == usual["same"]
    assert forked["loaded"] == bool(spares)
    assert forked["same"]["input"] == "typed"
    assert forked["pid"] == forked["group"]  # a session of its own
    assert forked["parent"] == place.servers()[0].pid
    assert usual["pid"] == plain.pid


def test_processes_have_different_random_numbers(tmp_path: Path, owner: subprocess.Popen[bytes]):
    place = Place(tmp_path, owner.pid, **{"json numpy": "json numpy torch"})
    first = place.run()
    second = place.run(env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert second["same"]["dont_write_bytecode"]
    assert first["forked"]
    assert second["forked"]
    assert len({*first["random"], *second["random"]}) == 6


def test_simultaneous_clients_share_one_server(place: Place):
    clients = [place.start() for _ in range(6)]
    answers = [reported(client) for client in clients]
    for client in clients:
        assert client.wait(20) == 0  # the client itself succeeds
        client.stdout.close()  # type: ignore[union-attr]
    assert all(answer["forked"] for answer in answers)
    assert len({answer["parent"] for answer in answers}) == 1
    wait_until(lambda: len(place.servers()) == 1)  # servers that found another one exit


def test_a_server_outlives_its_processes_and_ends_with_its_owner(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    place = Place(tmp_path, owner.pid, **{"_GRACE_S = 5.0": "_GRACE_S = 0.5"})
    waiting = [place.run("wait") for _ in range(3)]
    [server] = place.servers()
    os.kill(waiting[0]["pid"], signal.SIGKILL)
    wait_until(lambda: ended(waiting[0]["pid"]))
    assert place.run()["parent"] == server.pid
    assert not ended(waiting[1]["pid"])
    owner.kill()
    wait_until(lambda: not server.is_running())
    assert all(
        ended(each["pid"]) for each in waiting
    )  # Ray's own processes would have ended by themselves


def test_each_process_takes_a_spare_which_is_then_replaced(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    place = Place(tmp_path, owner.pid, 2)
    assert not place.run()["loaded"]
    waiting = place.spares(2)
    both = [place.run("wait") for _ in waiting]
    assert {each["pid"] for each in both} == {each.pid for each in waiting}
    assert len({*both[0]["random"], *both[1]["random"]}) == 4
    new = place.spares(2)
    os.kill(both[0]["pid"], signal.SIGKILL)
    # Ray reads its variables when it is loaded.
    assert not place.run(env={**os.environ, "RAY_X": "1"})["loaded"]
    wait_until(lambda: all(ended(each.pid) for each in new))
    place.spares(2)
    late = {"RAY_X": "1", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
    assert place.run(env={**os.environ, **late})["loaded"]
    assert not place.run(env={**os.environ, **late, "RAY_JOB_ID": "7"})["loaded"]
    [server] = place.servers()
    last = place.spares(2)
    server.kill()
    wait_until(lambda: all(ended(each.pid) for each in last))
    os.kill(both[1]["pid"], signal.SIGKILL)


def test_processes_of_an_announced_job_are_prepared(
    tmp_path: Path, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    name = f"raytrain-test-{owner.pid}"
    changes = {"raytrain-fork-node": name, "_EXPECTED_WITHIN_S = 30.0": "_EXPECTED_WITHIN_S = 9.0"}
    place = Place(tmp_path, 0, 1, **changes)  # owner 0: the raylet
    monkeypatch.setattr(fork_client, "_OF_NODE", name)
    monkeypatch.setenv("RAY_RAYLET_PID", str(owner.pid))

    def loaded(job: str) -> bool:
        report = place.run(env={**os.environ, "RAY_JOB_ID": job})
        assert report["same"]["environment"]["RAY_JOB_ID"] == job
        return bool(report["loaded"])

    fork_client.expect_job(3, "")  # no server yet
    assert not loaded("ff000000")
    old = place.spares(1)
    fork_client.expect_job(2, "")  # presumably the next one
    wait_until(lambda: len(place.waiting(place.servers()[0])) == 3)
    assert [loaded("00010000"), loaded("00010000")] == [True, True]
    wait_until(lambda: ended(old[0].pid))
    place.spares(1)
    fork_client.expect_job(2, "07000000")  # a process that has connected
    place.spares(3)
    assert [loaded("07000000"), loaded("07000000"), loaded("08000000")] == [True, True, False]
    place.spares(1)
    fork_client.expect_job(3, "")  # does not connect
    place.spares(4)
    place.spares(1)
    own = Place(tmp_path / "own", owner.pid, 1)  # from an embedded Ray
    own.run()
    own.spares(1)
    fork_client.expect_job(2, "")
    place.spares(3)
    assert len(own.spares(1)) == 1


def test_a_raylets_server_starts_before_its_first_process_and_prepares_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("bash") or "", program)
    variables = {"LANG": "C.UTF-8", "A": "=ö", "LD_PRELOAD": "/x/ray/core/libjemalloc.so"}
    command = [program, "-c", "read x", "raylet", "--gcs-address=10.0.0.7:6379", "x"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=variables, **pipes) as raylet:  # type: ignore[call-overload]
        wait_until(lambda: raylet.pid in fork_client.raylets("auto"))
        assert raylet.pid in fork_client.raylets("127.0.0.1:6379")
        assert raylet.pid in fork_client.raylets("10.0.0.7:6379")
        assert raylet.pid not in fork_client.raylets("127.0.0.1:379")
        assert raylet.pid not in fork_client.raylets("10.0.0.8:6379")
        environment = {"LANG": "C.UTF-8", "A": "=ö"}
        assert fork_client.environment_of(raylet.pid) == environment
        name = f"raytrain-test-{raylet.pid}"
        place = Place(tmp_path / "place", 0, 1, **{"raytrain-fork-node": name})
        monkeypatch.setattr(fork_client, "_OF_NODE", name)
        monkeypatch.setattr(fork_client, "__file__", str(place.folder / "fork_client.py"))
        monkeypatch.setattr(fork_client, "raylets", lambda _: [raylet.pid])
        ray = SimpleNamespace(origin=str(place.workers.parents[1] / "__init__.py"))
        monkeypatch.setattr("importlib.util.find_spec", lambda _: ray)
        announce_job("always", 1, 1, cluster="auto")
        announce_job("always", 1, 1, cluster="auto")
        wait_until(lambda: fork_client.expect_job(1, ""))  # the server listens
        [server] = place.servers()
        env = {**environment, "RAY_RAYLET_PID": str(raylet.pid)}
        first = place.run(env=env)
        assert (first["parent"], first["loaded"]) == (server.pid, False)
        place.spares(2)  # of three processes
        assert place.run(env=env)["loaded"]
        raylet.kill()


def test_a_spare_that_is_still_loading_is_used(tmp_path: Path, owner: subprocess.Popen[bytes]):
    counted = tmp_path / "counted"
    change = {"for name in _RAY:": f"open({str(counted)!r}, 'a').write('x')\n        time.sleep(1)"}
    change["            importlib.import_module(name)\n        sys.path[:]"] = "        sys.path[:]"
    place = Place(tmp_path, owner.pid, 1, **change)
    place.run()
    wait_until(counted.exists)
    [spare] = place.servers()[0].children()
    assert place.run()["pid"] == spare.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_without_a_spare_forks_itself(
    tmp_path: Path, owner: subprocess.Popen[bytes], number: int
):
    place = Place(tmp_path, owner.pid, 1, **{"_TAKEN_WITHIN_S = 2.0": "_TAKEN_WITHIN_S = 0.2"})
    place.run()
    [spare] = place.spares(1)
    spare.send_signal(number)
    report = place.run()
    assert report["forked"]
    assert not report["loaded"]
    assert ended(spare.pid)
    place.spares(1)  # another one
    [server] = place.servers()
    wait_until(
        lambda: server.num_fds() == 6
    )  # the first three, the owner's, the socket's, the spare's


def test_a_spare_that_cannot_load_ray_is_not_restarted_endlessly(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    counted = tmp_path / "counted"
    change = {
        "for name in _RAY:": f"open({str(counted)!r}, 'a').write('x')\n        for name in ['no']:"
    }
    place = Place(tmp_path, owner.pid, 1, **change)
    place.run()
    wait_until(counted.exists)
    time.sleep(0.5)
    assert counted.read_text() == "x"
    assert place.run()["forked"]


def test_fault_59_forked_processes_survive_a_killed_server(
    place: Place, owner: subprocess.Popen[bytes]
):
    waiting = place.run("wait")
    [server] = place.servers()
    server.kill()
    server.wait(20)
    after = place.run()
    assert after["forked"]  # by a new server
    assert after["parent"] != server.pid
    assert not ended(waiting["pid"])
    os.kill(waiting["pid"], signal.SIGKILL)


def test_a_client_that_dies_midway_leaves_no_process_or_open_file(place: Place):
    place.run()
    [server] = place.servers()
    address = fork_client.address_of(place.owner, 1, place.command[-1])
    for sent in (b"", struct.pack("!I", 100), struct.pack("!I", 100) + b"half"):
        connection = fork_client.connect(address)
        assert connection is not None
        with connection:
            assert connection.recv(1) == fork_client.READY
            if sent:
                socket.send_fds(connection, [sent], [0, 1, 2])
    assert place.run()["parent"] == server.pid
    wait_until(lambda: server.children() == [])  # the one that has just responded exits
    wait_until(lambda: server.num_fds() == 5)  # the first three, the owner's, the socket's


def test_a_process_whose_client_died_ends_with_its_owner(
    place: Place, owner: subprocess.Popen[bytes]
):
    place.run()
    [server] = place.servers()
    wait_until(lambda: server.children() == [])
    command = [str(place.workers / "probe.py"), "wait"]
    address = fork_client.address_of(owner.pid, 1, command[0])
    connection = fork_client.connect(address)
    assert connection is not None
    with connection, open(os.devnull, "r+") as nothing:
        assert connection.recv(1) == fork_client.READY
        request = marshal.dumps(fork_client.own_state(command, 0))
        fork_client.send_request(connection, request, [nothing.fileno()] * 3)
    wait_until(server.children)
    [child] = server.children()
    owner.kill()
    wait_until(lambda: ended(server.pid) and ended(child.pid))


def test_fault_59_another_python_or_module_path_starts_python_instead_of_forking(
    place: Place, tmp_path: Path
):
    assert place.run()["forked"]
    for name in ("SAFEPATH", "INSPECT", "VERBOSE", "PROFILEIMPORTTIME"):
        assert not place.run(env={**os.environ, f"PYTHON{name}": "1"})["forked"], name
    for name in ("numpy", "sitecustomize.py"):
        (tmp_path / name[:3]).mkdir()
        (tmp_path / name[:3] / name).symlink_to(np_folder() if name == "numpy" else os.devnull)
        path = os.pathsep.join(["/not/there", str(tmp_path / name[:3])])
        assert not place.run(env={**os.environ, "PYTHONPATH": path})["forked"]


@pytest.mark.parametrize(
    "variable",
    [
        *("PYTHONHASHSEED=0", "PYTHONOPTIMIZE=1", "PYTHONDEVMODE=1", "PYTHONWARNINGS=ignore"),
        *("PYTHONUTF8=1", "PYTHONIOENCODING=latin-1", "PYTHONNOUSERSITE=1", "PYTHONMALLOC=malloc"),
        *("PYTHONFAULTHANDLER=1", "PYTHONBREAKPOINT=ray.util.rpdb._driver_set_trace"),
        *("PYTHONSTARTUP=/rc.py", "PYTHON_VERSION=3.11.9", "PYTHONASYNCIODEBUG=1", "PYTHONDEBUG="),
    ],
)
def test_a_fork_follows_a_variable_of_python_as_a_new_python_does(place: Place, variable: str):
    name, _, value = variable.partition("=")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment[name] = value
    forked = place.run(env=environment, cwd=place.folder)
    plain = [sys.executable, place.command[-1]]
    options: dict[str, Any] = {"env": environment, "cwd": place.folder, "text": True}
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(plain, stdout=subprocess.PIPE, **quiet, **options) as process:
        usual = reported(process)
    assert forked["forked"]
    assert forked["same"] == usual["same"]


def np_folder() -> str:
    import numpy

    return str(Path(numpy.__file__).parent)


def test_a_new_installation_or_environment_starts_another_server(place: Place):
    first = place.run()["parent"]
    (place.workers.parents[2] / "new-package").mkdir()
    second = place.run()["parent"]
    third = place.run(env={**os.environ, "MKL_NUM_THREADS": "3"})["parent"]
    fourth = place.run(env={**os.environ, "OMP_NUM_THREADS": "3"})["parent"]
    assert len({first, second, third}) == 3
    assert fourth == second  # Ray sets it per worker; torch uses another number


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("return threads == 1", "return threads == 0"),  # a library has started a thread
        ("LEAST_FREE = 0.1", "LEAST_FREE = 1.1"),  # no memory is free
        ("listener.bind(", "sys.exit("),  # the server does not start
        ("_BOUND_WITHIN_S = 10.0", "_BOUND_WITHIN_S = 0.0"),  # or is slow
    ],
)
def test_fault_59_python_is_started_when_forking_is_impossible(
    tmp_path: Path, owner: subprocess.Popen[bytes], word: str, instead: str
):
    report = Place(tmp_path, owner.pid, **{word: instead}).run("x")
    assert not report["forked"]
    assert report["same"]["argv"][1:] == ["x"]


def test_an_idle_server_exits(tmp_path: Path, owner: subprocess.Popen[bytes]):
    place = Place(
        tmp_path,
        owner.pid,
        **{"IDLE_S = 3600.0": "IDLE_S = 0.2", "_LOOK_S = 10.0": "_LOOK_S = 0.1"},
    )
    waiting = place.run("wait")
    [server] = place.servers()
    time.sleep(0.5)
    assert server.is_running()  # as long as its process lives
    os.kill(waiting["pid"], signal.SIGKILL)
    wait_until(lambda: not server.is_running())


def test_an_idle_server_exits_although_an_actor_of_the_cluster_lives(
    tmp_path: Path, owner: subprocess.Popen[bytes]
):
    changes = {"IDLE_S = 3600.0": "IDLE_S = 0.2", "_LOOK_S = 10.0": "_LOOK_S = 0.1"}
    place = Place(tmp_path, owner.pid, **changes, AutoscalingCoordinator="fork_server")
    waiting = place.run("wait")  # its title is the server's
    wait_until(lambda: ended(waiting["parent"]))
    os.kill(waiting["pid"], signal.SIGKILL)


def test_auto_does_not_fork_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    assert not fork_client.unsuited("always")
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    assert "GPU" in fork_client.unsuited("auto")
    assert not fork_client.unsuited("always")


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

    assert as_ray(py_executable("always", place.owner, 1, 0))["forked"]
    real, used = sys.executable, tmp_path / "used"
    monkeypatch.setattr(sys, "executable", "/not here/python")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\ntouch {used}\nexec {real} "$@"\n')
    python.chmod(0o755)
    elsewhere = as_ray(py_executable("always", place.owner, 1, 0))
    assert not elsewhere["forked"]
    assert used.exists()


def test_processes_of_a_job_with_its_own_python_are_not_forked(
    monkeypatch: pytest.MonkeyPatch,
):
    config = TrainConfig()
    assert " auto 0 1 1 " in _warm(config, 0)["py_executable"]
    job = json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    assert _warm(config, 0)
    job = json.dumps({"runtime_env": {"pip": {"packages": ["x"]}}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    assert _warm(config, 0) == {}
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert _warm(replace(config, scaling=ScalingConfig(warm_processes=False)), 0) == {}


def test_a_server_exits_at_once_when_its_owner_is_dead(tmp_path: Path):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    place = Place(tmp_path, gone.pid)
    assert not place.run()["forked"]
    assert place.servers() == []


def test_a_worker_exits_when_its_raylet_dies_although_it_is_not_its_parent():
    code = (
        "import os; from raytrain_ddp.ray_backend.worker_process import end_with_raylet\n"
        "end_with_raylet(); print(flush=True); import time; time.sleep(60)"
    )
    with subprocess.Popen(["sleep", "60"]) as raylet:
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid)}
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            raylet.kill()
            assert select.select([worker.stdout], [], [], 20)[0]
            assert worker.wait(20) == -signal.SIGKILL
