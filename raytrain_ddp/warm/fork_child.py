"""What a process that was forked does: it becomes the one that Python itself would have started.

Spares are forked before they are asked for, have loaded Ray, too, and wait: a worker that is one of
them starts sooner.

Loaded by fork_server.py, from its folder.
"""

from __future__ import annotations

import importlib
import io
import marshal
import os
import resource
import signal
import socket
import struct
import sys
import time
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_ddp.warm import fork_client as client
else:
    import fork_client as client

_QUIET_S = 3.0  # after the last request: loading takes half a second of CPU
_EXPECTED_WITHIN_S = 30.0
_RAY = ("ray", "ray.train", "ray.train.torch")
_JOB = b"RAY_JOB_ID"
# Not read when Ray is loaded. RAY_JOB_ID is: Ray ends a worker that has that of another job.
_READ_LATER = (b"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",)
_TAKEN_WITHIN_S = 2.0


def received_request(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What send_request() of fork_client.py has sent: the request, and three open files.

    Raises:
        EOFError: the other end has closed the connection.
    """
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    try:
        if len(head) != 4 or len(files) != 3:
            raise EOFError
        return received(connection, struct.unpack("!I", head)[0]), files
    except BaseException:
        close(files)
        raise


def received(connection: socket.socket, size: int) -> bytes:
    if size > client.MOST_BYTES:
        raise ValueError(size)
    parts = io.BytesIO()
    while parts.tell() < size:
        part = connection.recv(min(1 << 16, size - parts.tell()))
        if not part:
            raise EOFError
        parts.write(part)
    return parts.getvalue()


def become(given: dict[str, Any], files: list[int], variables: dict[str, str]) -> None:
    """Makes this forked process the one that was asked for; does not return."""
    status = 1
    try:
        inherit(given, files)
        take_environment(given, variables)
        run(given)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def inherit(given: dict[str, Any], files: list[int]) -> None:
    """Takes over what exec would have passed on."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    close_all_but({0, 1, 2})
    os.umask(given["mask"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in given["ignored"]
        if ignored != client.is_ignored(number):
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, given["blocked"])
    for number, limits in given["limits"]:
        with suppress(OSError, ValueError):
            resource.setrlimit(number, limits)
    with suppress(OSError):
        os.sched_setaffinity(0, given["cpus"])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, given["niceness"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(given["oom_score"])


def close_all_but(kept: set[int]) -> None:
    found = os.listdir("/proc/self/fd")  # not up to the limit, which may be a billion
    close([int(name) for name in found if int(name) not in kept])


def close(files: list[int]) -> None:
    for file in files:
        with suppress(OSError):  # the one that listed them
            os.close(file)


def take_environment(given: dict[str, Any], variables: dict[str, str]) -> None:
    """Takes over the environment and the working folder.

    Args:
        variables: added to the environment, unless it has them.
    """
    os.environb.clear()
    os.environb.update(given["environment"])
    os.environ.update({k: v for k, v in variables.items() if k not in os.environ})
    os.chdir(given["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


def module_folders(given: dict[str, Any]) -> list[str]:
    """The folders that come before those of Python: that of the script, and PYTHONPATH."""
    script = os.path.dirname(os.path.realpath(given["command"][0]))
    folders = os.fsdecode(given["environment"].get(b"PYTHONPATH", b"")).split(os.pathsep)
    return [script, *(os.path.normpath(os.path.join(given["folder"], f)) for f in folders if f)]


def run(given: dict[str, Any]) -> None:
    """Runs a script as ``python SCRIPT ARGUMENTS`` does."""
    command = given["command"]
    script = command[0]
    sys.path[:0] = module_folders(given)
    sys.argv[:], sys.orig_argv[:] = command, [sys.executable, *command]
    # Python's own generator is seeded anew by a fork, these are not.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)


@dataclass
class Spare:
    """A process that waits.

    Args:
        loaded_with: what its modules depend on, see _read_by_ray().
        connection: to the process.
        ready: whether it has loaded Ray.
    """

    pid: int
    loaded_with: object
    connection: socket.socket
    ready: bool = False


@dataclass
class Spares:
    """The spares of a server.

    Args:
        variables: added to the environments of the processes.
        waiting: by the file number of their connections.
        last: the last request, or one like it of an expected job.
        due: when there are to be as many as it wants, like it.
        expected: how many are still to be started for that job.
    """

    variables: dict[str, str]
    waiting: dict[int, Spare] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    due: float = float("inf")
    expected: int = 0

    @property
    def look_s(self) -> float:
        """Seconds after which fill() has something to do."""
        return max(0.0, self.due - time.monotonic())

    def take(self, given: dict[str, Any], request: bytes, files: list[int]) -> int:
        """The pid of a spare that becomes the process that was asked for; 0: there is none."""
        self.last, self.due = given, time.monotonic() + _QUIET_S
        wanted = _read_by_ray(given)
        for file, spare in sorted(self.waiting.items(), key=lambda each: not each[1].ready):
            if spare.loaded_with != wanted:
                continue
            del self.waiting[file]
            with suppress(OSError), spare.connection as connection:
                client.send_request(connection, request, files)
                if not spare.ready:  # it is ahead of a new process
                    self._start_expected()
                    return spare.pid
                if connection.recv(1) == client.READY:
                    return spare.pid
            _end(spare)  # so that there are not two
        self._start_expected()
        return 0

    def hear(self, file: int) -> None:
        """Handles what a spare has sent: it is ready, or has ended."""
        spare = self.waiting[file]
        with suppress(OSError):
            spare.ready = spare.connection.recv(1) == client.READY
        if not spare.ready:
            _end(self.waiting.pop(file))
        self._start_expected()

    def expect(self, processes: int, job: bytes) -> None:
        """A new job will soon ask for so many: spares for it load Ray meanwhile.

        Args:
            job: its RAY_JOB_ID; empty: presumably the next one.
        """
        if self.last is None or not self.last["spares"]:
            return
        self.last = _of_job(self.last, job)
        wanted = _read_by_ray(self.last)
        waiting = sum(spare.loaded_with == wanted for spare in self.waiting.values())
        self.expected = max(0, processes - waiting)
        self.due = time.monotonic() + _EXPECTED_WITHIN_S
        self._start_expected()

    def _start_expected(self) -> None:
        """Leaves a core to the new job's driver, which is starting, too."""
        at_once = max(1, len(os.sched_getaffinity(0)) - 1)
        while self.expected and self.last and client.free_memory() > client.LEAST_FREE:
            if sum(not spare.ready for spare in self.waiting.values()) >= at_once:
                return
            self.expected -= 1
            self._start(self.last)

    def fill(self) -> None:
        """If it is time, starts as many as the last request wants, and ends those that do not suit
        it."""
        if self.last is None or time.monotonic() < self.due:
            return
        self.due, self.expected, given = float("inf"), 0, self.last
        if client.free_memory() < client.LEAST_FREE:
            return
        loaded_with = _read_by_ray(given)
        for file, spare in [*self.waiting.items()]:
            if spare.loaded_with != loaded_with or len(self.waiting) > given["spares"]:
                _end(self.waiting.pop(file))
        while len(self.waiting) < given["spares"]:
            self._start(given)

    def _start(self, given: dict[str, Any]) -> None:
        own, its = socket.socketpair()
        with its:
            pid = os.fork()
            if pid == 0:
                wait(its, given, self.variables)
        own.settimeout(_TAKEN_WITHIN_S)
        self.waiting[own.fileno()] = Spare(pid, _read_by_ray(given), own)


def wait(connection: socket.socket, given: dict[str, Any], variables: dict[str, str]) -> None:
    """In the forked process: loads Ray, and waits for a request; does not return."""
    try:
        close_all_but({0, 1, 2, connection.fileno()})
        take_environment(given, variables)
        before = [*sys.path]
        sys.path[:0] = module_folders(given)
        for name in _RAY:
            importlib.import_module(name)
        sys.path[:] = before
        with suppress(BrokenPipeError):  # it was taken before it was ready
            connection.sendall(client.READY)
        request, files = received_request(connection)
        with suppress(BrokenPipeError):
            connection.sendall(client.READY)
    except BaseException:  # the server has ended, or Ray cannot be loaded
        os._exit(1)
    become(marshal.loads(request), files, variables)


def _read_by_ray(given: dict[str, Any]) -> object:
    """What of a request may change the modules of Ray: the environment, and where they lie."""
    environment = {k: v for k, v in given["environment"].items() if k not in _READ_LATER}
    return environment, module_folders(given)


def _of_job(given: dict[str, Any], job: bytes) -> dict[str, Any]:
    """A request as this job's would be; see `Spares.expect`. Ray numbers its jobs: four bytes, the
    lowest first."""
    environment = dict(given["environment"])
    with suppress(KeyError, ValueError, OverflowError):
        last = int.from_bytes(bytes.fromhex(environment[_JOB].decode()), "little")
        environment[_JOB] = job or (last + 1).to_bytes(4, "little").hex().encode()
    return {**given, "environment": environment}


def _end(spare: Spare) -> None:
    spare.connection.close()
    with suppress(ProcessLookupError):
        os.kill(spare.pid, signal.SIGKILL)
    os.waitpid(spare.pid, 0)
