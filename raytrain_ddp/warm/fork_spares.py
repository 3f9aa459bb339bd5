"""Forked processes that have loaded Ray, too, and wait: a worker that is one of them starts sooner.

Loaded by fork_server.py, from its folder.
"""

from __future__ import annotations

import importlib
import marshal
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_ddp.warm import fork_child as child
    from raytrain_ddp.warm import fork_client as client
else:
    import fork_child as child
    import fork_client as client

QUIET_S = 3.0  # after the last request: loading takes half a second of CPU
_RAY = ("ray", "ray.train", "ray.train.torch")
# Not read when Ray is loaded. RAY_JOB_ID is: Ray ends a worker that has that of another job.
_READ_LATER = (b"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",)
_TAKEN_WITHIN_S = 2.0


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
        like: the last request; None once there are spares for the next one.
    """

    variables: dict[str, str]
    waiting: dict[int, Spare] = field(default_factory=dict)
    like: dict[str, Any] | None = None

    @property
    def look_s(self) -> float:
        """Seconds after which fill() may have something to do."""
        return QUIET_S if self.like else float("inf")

    def take(self, given: dict[str, Any], request: bytes, files: list[int]) -> int:
        """The pid of a spare that becomes the process that was asked for; 0: there is none."""
        self.like = given
        wanted = _read_by_ray(given)
        for file, spare in [*self.waiting.items()]:
            if not spare.ready or spare.loaded_with != wanted:
                continue
            del self.waiting[file]
            with suppress(OSError), spare.connection as connection:
                client.send_request(connection, request, files)
                if connection.recv(1) == client.READY:
                    return spare.pid
            _end(spare)  # so that there are not two
        return 0

    def hear(self, file: int) -> None:
        """Handles what a spare has sent: it is ready, or has ended."""
        spare = self.waiting[file]
        with suppress(OSError):
            spare.ready = spare.connection.recv(1) == client.READY
        if not spare.ready:
            _end(self.waiting.pop(file))

    def fill(self) -> None:
        """Starts as many as the last request wants, and ends those that do not suit it."""
        if self.like is None or client.free_memory() < client.LEAST_FREE:
            return
        given, self.like = self.like, None
        loaded_with = _read_by_ray(given)
        for file, spare in [*self.waiting.items()]:
            if spare.loaded_with != loaded_with or len(self.waiting) > given["spares"]:
                _end(self.waiting.pop(file))
        while len(self.waiting) < given["spares"]:
            own, its = socket.socketpair()
            with its:
                pid = os.fork()
                if pid == 0:
                    wait(its, given, self.variables)
            own.settimeout(_TAKEN_WITHIN_S)
            self.waiting[own.fileno()] = Spare(pid, loaded_with, own)


def wait(connection: socket.socket, given: dict[str, Any], variables: dict[str, str]) -> None:
    """In the forked process: loads Ray, and waits for a request; does not return."""
    try:
        child.close_all_but({0, 1, 2, connection.fileno()})
        child.take_environment(given, variables)
        before = [*sys.path]
        sys.path[:0] = child.module_folders(given)
        for name in _RAY:
            importlib.import_module(name)
        sys.path[:] = before
        connection.sendall(client.READY)
        request, files = child.received_request(connection)
        connection.sendall(client.READY)
    except BaseException:  # the server has ended, or Ray cannot be loaded
        os._exit(1)
    child.become(marshal.loads(request), files, variables)


def _read_by_ray(given: dict[str, Any]) -> object:
    """What of a request may change the modules of Ray: the environment, and where they lie."""
    environment = {k: v for k, v in given["environment"].items() if k not in _READ_LATER}
    return environment, child.module_folders(given)


def _end(spare: Spare) -> None:
    spare.connection.close()
    with suppress(ProcessLookupError):
        os.kill(spare.pid, signal.SIGKILL)
    os.waitpid(spare.pid, 0)
