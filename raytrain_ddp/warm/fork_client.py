"""Starts a Ray worker by a fork of this node's fork server; Ray runs it instead of Python.

Ray's raylet runs ``python -I -S fork_client.py MODE OWNER THREADS SPARES default_worker.py
ARGUMENTS``. The forked process gets the arguments, environment, open files, working folder,
limits, niceness and signal handling of this one, and this one ends. If anything is not as it
should be, this process becomes the usual worker by exec.

It imports nothing but the standard library: starting it must cost milliseconds.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

READY, REFUSED = b"r", b"n"
MOST_BYTES = 1 << 24
_READY_WITHIN_S = 60.0
_BOUND_WITHIN_S = 10.0
_ANNOUNCED_WITHIN_S = 0.2
_OF_RUN, _OF_NODE = "raytrain-fork-run", "raytrain-fork-node"
LEAST_FREE = 0.1  # of the memory; below, no server is started
# Read when Python or a library is loaded: another value needs another server.
_READ_AT_START = (
    *("BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "GLIBC_", "GOMP_", "KMP_", "LC_", "LD_", "MALLOC_"),
    *("MKL_", "MPL", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH"),
    "TRITON_",
)
_ALSO_READ = ("HOME", "LANG", "LANGUAGE", "TZ")
_READ_LATER = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUNBUFFERED"),
)
# These change how Python starts or ends: with one of them, the process is not forked.
_OF_PYTHON = ("INSPECT", "PROFILEIMPORTTIME", "SAFEPATH", "VERBOSE")


def main(argv: list[str]) -> None:
    mode, owner, threads, spares, *command = argv
    try:
        if not unsuited(mode) and fork_by_server(int(owner), int(threads), int(spares), command):
            return
    except (OSError, ValueError, KeyError):
        pass
    os.execv(sys.executable, [sys.executable, *command])


def unsuited(mode: str, environment: Mapping[str, str] = os.environ) -> str:
    """Why this machine or environment does not suit a fork; "" if it does.

    Args:
        mode: "auto": not on a machine with a GPU; or "always".
    """
    if mode == "auto" and os.path.exists("/dev/nvidiactl"):
        return "this machine has a GPU (--scaling.warm-processes true uses them anyway)"
    names = [f"PYTHON{name}" for name in _OF_PYTHON if environment.get(f"PYTHON{name}")]
    return f"{names[0]} is set" if names else ""


def fork_by_server(owner: int, threads: int, spares: int, command: list[str]) -> bool:
    """Whether a server has forked a process for `command`: a script and its arguments.

    Args:
        owner: the process whose server it is, and which it ends with; 0: this node's raylet.
        threads: OMP_NUM_THREADS while the server loads its modules, unless it is set.
        spares: processes that the server keeps ready for the next ones.
    """
    address = address_of(owner, threads, command[0])
    owner = owner or raylet()
    connection = connect(address)
    if connection is None:
        if free_memory() < LEAST_FREE:
            return False
        os.close(os.pidfd_open(owner))  # fails where the server would: on Linux before 5.3
        connection = connect(address, start_server(address, owner, threads))
    if connection is None:
        return False
    with connection:
        connection.settimeout(_READY_WITHIN_S)
        if not is_own(connection) or connection.recv(1) != READY:
            return False
        connection.settimeout(None)  # from now on, a second process could be the result
        send_request(connection, marshal.dumps(own_state(command, spares)), [0, 1, 2])
        return connection.recv(1) == READY


def send_request(connection: socket.socket, request: bytes, files: list[int]) -> None:
    """Sends what a process is to be, and its first three files."""
    socket.send_fds(connection, [struct.pack("!I", len(request))], files)
    connection.sendall(request)


def address_of(
    owner: int, threads: int, script: str, environment: Mapping[str, str] = os.environ
) -> str:
    """The abstract socket of the server for this process's Python, packages and environment.

    Args:
        owner: see `fork_by_server`.
        script: Ray's default_worker.py; installing or removing a package changes the folder that
            Ray is in.
    """
    packages = os.path.abspath(script).rpartition("/ray/_private/")[0]
    python = os.stat(sys.executable)
    prefix = _OF_RUN if owner else _OF_NODE
    owner = owner or raylet(environment)
    facts = [
        *(owner, started_at(owner), threads, sys.executable, python.st_mtime_ns, packages),
        os.stat(packages or "/").st_mtime_ns,
        *sorted((name, value) for name, value in environment.items() if is_read_at_start(name)),
    ]
    return f"{prefix}-{os.getuid()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"


def raylet(environment: Mapping[str, str] = os.environ) -> int:
    """The pid of the raylet that has started a process with this environment."""
    return int(environment["RAY_RAYLET_PID"])


def raylets(cluster: str) -> list[int]:
    """The pids of this user's raylets on this machine.

    Args:
        cluster: HOST:PORT that they were started with; "auto": any.
    """
    host, _, port = cluster.rpartition(":")
    if cluster == "auto":
        place = "[^\0]*"
    elif host == "localhost" or host.startswith("127."):  # Ray may use another of its addresses
        place = f"[^\0]*:{re.escape(port)}"
    else:
        place = re.escape(cluster)
    started_with = re.compile(os.fsencode(f"\0--gcs-address={place}\0"))
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with (
                open(f"/proc/{pid}/comm", "rb") as name,
                open(f"/proc/{pid}/cmdline", "rb") as line,
            ):
                is_raylet = name.read() == b"raylet\n" and started_with.search(line.read())
            if is_raylet and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                found.append(int(pid))
        except OSError:  # it has ended
            pass
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    with open(f"/proc/{pid}/environ", encoding="utf-8", errors="surrogateescape") as file:
        pairs = [line.partition("=") for line in file.read().split("\0")]
    found = {name: value for name, equals, value in pairs if equals}
    if "/ray/core/" in found.get("LD_PRELOAD", ""):  # Ray's jemalloc, for raylets only
        del found["LD_PRELOAD"]
    return found


def expect_job(processes: int, job: str) -> bool:
    """Announces to this node's servers that a new job will soon ask for so many processes; returns
    whether there are any.

    Args:
        job: its RAY_JOB_ID; "": the one after that of the last request.
    """
    is_known = False
    prefix = f"@{_OF_NODE}-{os.getuid()}-"
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        names = {line.split()[-1] for line in file}
    for name in names:
        if name.startswith(prefix) and (connection := connect(name[1:])) is not None:
            is_known = True
            with connection, suppress(TimeoutError):  # it is loading its modules
                connection.settimeout(_ANNOUNCED_WITHIN_S)
                if is_own(connection) and connection.recv(1) == READY:
                    request = marshal.dumps({"expected": processes, "job": job})
                    send_request(connection, request, [0, 1, 2])
    return is_known


def is_read_at_start(name: str) -> bool:
    return name in _ALSO_READ or (name.startswith(_READ_AT_START) and name not in _READ_LATER)


def started_at(pid: int) -> str:
    """The start of a process in clock ticks since boot.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


def connect(address: str, server: int = 0) -> socket.socket | None:
    """A connection to the server at this abstract socket; None if there is none.

    Args:
        server: the pid of one that is starting; it ends if there is another.
    """
    deadline = time.monotonic() + _BOUND_WITHIN_S
    while True:
        ended = not server or os.waitpid(server, os.WNOHANG)[0]
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{address}")
            return connection
        except ConnectionRefusedError:
            connection.close()
        if ended or time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def is_own(connection: socket.socket) -> bool:
    """Whether the other end belongs to the same user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def free_memory() -> float:
    """The part of the machine's memory that is available."""
    with open("/proc/meminfo", encoding="ascii") as file:
        found = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return found["MemAvailable"] / found["MemTotal"]


def start_server(
    address: str,
    owner: int,
    threads: int,
    expected: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Starts a server in the background, with no terminal and no output; returns its pid.

    Args:
        expected: processes of the same job that follow the first one soon.
        environ: of the server.
    """
    server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
    # Folders of PYTHONPATH join the path of each worker.
    environment = {name: v for name, v in environ.items() if name != "PYTHONPATH"}
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    files = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    command = [sys.executable, server, address, str(owner), str(expected)]
    return os.posix_spawn(sys.executable, command, environment, file_actions=files, setsid=True)


def own_state(command: list[str], spares: int) -> dict[str, Any]:
    """What a process started by exec would inherit from this one."""
    mask = os.umask(0)
    os.umask(mask)
    # Python itself ignores SIGPIPE and, in places, SIGXFSZ.
    ignored = [int(number) for number in signal.valid_signals() if is_ignored(number)]
    limits = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom_score = file.read()
    return {
        "command": command,
        "spares": spares,
        "environment": dict(os.environb),
        "folder": os.getcwd(),
        "mask": mask,
        "ignored": ignored,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "limits": [(number, resource.getrlimit(number)) for number in limits],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": list(os.sched_getaffinity(0)),
        "oom_score": oom_score,
    }


def is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


if __name__ == "__main__":
    main(sys.argv[1:])
