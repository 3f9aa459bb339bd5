"""Asks a fork server for a process: a fork of a Python that has the heavy modules loaded.

Ray's raylet runs ``python -I -S fork_client.py OWNER THREADS default_worker.py ARGUMENTS`` in place
of Python. The forked process gets the arguments, environment, open files, working folder, limits,
niceness and signal handling of this one, and this one ends. If anything is not as expected,
this process turns into an ordinary worker by exec.

It imports nothing but the standard library: starting it must cost milliseconds.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

READY = b"r"
NUMBER = struct.Struct("!i")
LEAST_FREE = 0.1  # of the memory; below, no server is started
OF_NODE = "raytrain-fork-node"
_OF_RUN = "raytrain-fork-run"
_READY_WITHIN_S = 60.0
_BOUND_WITHIN_S = 10.0
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
    owner, threads, *command = argv
    with suppress(OSError, ValueError, KeyError):
        address, pid = address_of(int(owner), int(threads), command[0]), int(owner) or raylet()
        request = own_state(command)
        start = lambda: start_server(address, pid, int(threads))  # noqa: E731
        if not unsuited() and forked(address, start, request):
            return
    os.execv(sys.executable, [sys.executable, *command])


def unsuited(environment: Mapping[str, str] = os.environ) -> str:
    """Why a process with this environment cannot be forked; "" if it can."""
    names = [f"PYTHON{name}" for name in _OF_PYTHON if environment.get(f"PYTHON{name}")]
    return f"{names[0]} is set" if names else ""


class Forked:
    """A forked process, as far as its server reports it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection
        self.returncode: int | None = None

    def wait(self, within_s: float | None = None) -> int | None:
        """Its exit status (negative: the signal that ended it) if it ends within that time; None:
        it has not ended. Only if the request has said that the status is wanted."""
        if self.returncode is None and select.select([self._connection], [], [], within_s)[0]:
            answer = self._connection.recv(NUMBER.size)
            self.returncode = NUMBER.unpack(answer)[0] if answer else 1  # the server has ended
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def forked(
    address: str,
    start: Callable[[], int],
    request: Mapping[str, Any],
    files: Sequence[int] = (0, 1, 2),
) -> Forked | None:
    """Makes the server at an address fork a process; None: it refuses, or does not start.

    Args:
        start: starts the server and returns its pid, if there is none; see `start_server`.
        request: what the process is to be: `own_state`, and how the server handles it.
        files: its first three files.
    """
    connection = connect(address, start)
    if connection is None:
        return None
    with ExitStack() as unless_forked:
        unless_forked.enter_context(connection)
        connection.settimeout(_READY_WITHIN_S)
        if not is_own(connection) or connection.recv(1) != READY:
            return None
        connection.settimeout(None)  # from now on, a second process could be the result
        send_request(connection, request, files)
        if pid := connection.recv(NUMBER.size):
            unless_forked.pop_all()
            return Forked(NUMBER.unpack(pid)[0], connection)
        return None


def send_request(connection: socket.socket, request: Any, files: Sequence[int] = (0, 1, 2)) -> None:
    encoded = marshal.dumps(request)
    socket.send_fds(connection, [NUMBER.pack(len(encoded))], [*files])
    connection.sendall(encoded)


def address_of(
    owner: int, threads: int, script: str, environment: Mapping[str, str] = os.environ
) -> str:
    """The abstract socket of the server for this process's Python, packages and environment.

    Args:
        owner: the process that the server ends with; 0: this node's raylet.
        threads: OMP_NUM_THREADS while the server loads its modules, unless it is set.
        script: Ray's default_worker.py; installing or removing a package changes the folder that
            Ray is in.
    """
    packages = os.path.abspath(script).rpartition("/ray/_private/")[0]
    changed = [os.stat(path).st_mtime_ns for path in (sys.executable, packages or "/")]
    facts = [owner or raylet(environment), threads, sys.executable, packages, changed]
    read = sorted((name, v) for name, v in environment.items() if is_read_at_start(name))
    digest = hashlib.sha256(repr((facts, read)).encode()).hexdigest()[:24]
    return f"{_OF_RUN if owner else OF_NODE}-{os.getuid()}-{digest}"


def raylet(environment: Mapping[str, str] = os.environ) -> int:
    """The pid of the raylet that has started a process with this environment."""
    return int(environment["RAY_RAYLET_PID"])


def is_read_at_start(name: str) -> bool:
    return name in _ALSO_READ or (name.startswith(_READ_AT_START) and name not in _READ_LATER)


def connect(address: str, start: Callable[[], int] | None = None) -> socket.socket | None:
    """A connection to the server at this abstract socket; None if there is none.

    Args:
        start: starts it, if there is none, and returns its pid; it ends if there is another one.
    """
    server, deadline = 0, time.monotonic() + _BOUND_WITHIN_S
    while True:
        ended = server and os.waitpid(server, os.WNOHANG)[0]
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{address}")
            return connection
        except ConnectionRefusedError:
            connection.close()
        if start is None or ended or time.monotonic() >= deadline:
            return None
        server = server or start()
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
    environ: Mapping[str, str] = os.environ,
    modules: Sequence[str] = (),
) -> int:
    """Starts a server in the background, with no terminal and no output; returns its pid.

    Args:
        owner: the process that it ends with.
        environ: of the server.
        modules: loaded besides the usual ones.

    Raises:
        OSError: too little memory is free, there is no such owner, or this system cannot watch it:
            Linux before 5.3.
    """
    if free_memory() < LEAST_FREE:
        raise OSError
    os.close(os.pidfd_open(owner))
    server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
    # Folders of PYTHONPATH join the path of each worker.
    environment = {name: v for name, v in environ.items() if name != "PYTHONPATH"}
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    files = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    command = [sys.executable, server, address, str(owner), *modules]
    return os.posix_spawn(sys.executable, command, environment, file_actions=files, setsid=True)


def own_state(
    command: Sequence[str], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """What a process started by exec would inherit from this one: a script and its arguments."""
    mask = os.umask(0)
    os.umask(mask)
    limits = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom_score = file.read()
    return {
        "command": [*command],
        "session": True,
        "waits": False,  # whether its exit status is wanted
        "environment": {os.fsencode(k): os.fsencode(v) for k, v in environment.items()},
        "folder": os.getcwd(),
        "mask": mask,
        # Python itself ignores SIGPIPE and, in places, SIGXFSZ.
        "ignored": [int(number) for number in signal.valid_signals() if is_ignored(number)],
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
