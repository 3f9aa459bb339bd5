"""Loader processes: each has a copy of the data set, and makes batches from it.

A separate interpreter loads torch once and forks the loader processes. So nothing is forked from
the training process (a Ray worker has threads, and forking it can deadlock), the user's `__main__`
is not imported again, and each further process starts quickly and shares torch's memory. Linux
kills the loader processes when that interpreter ends, and it ends with the training process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain_ddp import user_code
from raytrain_ddp.data.loading import shared_memory
from raytrain_ddp.errors import (
    LoaderDied,
    PreflightError,
    RemoteTraceback,
    TaskError,
    first_line,
    signal_name,
)

_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[2]); "
    "from raytrain_ddp.data.loading.loader_worker import serve; serve(int(sys.argv[1]))"
)
_PRELOADED = ("torchvision", "torchvision.transforms.v2", "PIL.Image")  # if installed
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_END_S = 10.0  # longer than loader_worker.END_S


class Reply:
    """The result of an item, possibly not available yet."""

    def __init__(self, process: _Process, item: Any) -> None:
        self.item = item
        self.outcome: tuple[bool, Any, str] | None = None  # good, value or exception, traceback
        self._process = process

    def result(self) -> Any:
        """Waits for the result.

        Raises:
            LoaderDied: the process has died.
            Exception: the exception raised there, with a `RemoteTraceback` as its cause.
        """
        while self.outcome is None:
            self._process.receive()
        good, value, text = self.outcome
        if not good:
            raise value from (RemoteTraceback(text) if text else None)
        return value


class LoaderProcesses:
    """Processes that apply `work` to items, each in the order of its own items; started on first
    use.

    Args:
        work: copied now by pickle (by value if defined in a script or notebook).
        describe: describes an item for messages.

    Raises:
        TaskError: `work` cannot be copied.
        PreflightError: this process has too many open files.
    """

    def __init__(self, work: Callable[[Any], Any], describe: Callable[[Any], str]) -> None:
        with shared_memory.enough_files:
            self._server = _server()
        try:
            self._work = shared_memory.pack((user_code.received(), work))
        except PreflightError:
            raise
        except Exception as error:
            raise TaskError(
                "the data set and collate cannot be copied to loader processes: "
                f"{type(error).__name__}: {first_line(error)}. Open files when __getitem__ first "
                "needs them, and store no generators or locks; or load in the training process "
                "with --data.workers 0; or, if it draws no random numbers, let threads share it: "
                "MapSource(dataset, shared=True)."
            ) from error
        self._describe = describe
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end_processes, self._processes, self._work)
        """Ends the processes; a busy process first finishes its item."""

    def submit(self, item: Any, among: int) -> Reply:
        """Gives the item to the least busy of the first `among` processes; does not block.

        Raises:
            PreflightError: this process has too many open files.
        """
        with self._lock:
            if len(self._processes) < among:
                started = _Process(self._server, self._work, self._describe)
                self._processes.append(started)
            least = min(self._processes[:among], key=lambda process: len(process.pending))
            return least.submit(item)


def _end_processes(processes: list[_Process], work: int) -> None:
    for process in processes:
        process.channel.close()
    processes.clear()
    os.close(work)


class _Process:
    """One loader process, as seen by the training process."""

    def __init__(self, server: _Server, work: int, describe: Callable[[Any], str]) -> None:
        self.pending: deque[Reply] = deque()
        with shared_memory.enough_files:
            self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._number = server.fork(theirs.fileno(), work)
        self._server, self._describe = server, describe

    def submit(self, item: Any) -> Reply:
        with suppress(ConnectionError):  # the process is dead; `receive` will notice
            shared_memory.send(self.channel, item)
        reply = Reply(self, item)
        self.pending.append(reply)
        return reply

    def receive(self) -> None:
        """Waits for the oldest reply."""
        try:
            outcome = shared_memory.receive(self.channel)
        except EOFError:
            outcome = (False, self._death(), "")
        except Exception as error:  # its message is lost; the next one belongs to another item
            outcome = (False, error, "")
        self.pending.popleft().outcome = outcome

    def _death(self) -> LoaderDied:
        how = self._server.status_of(self._number)
        return LoaderDied(
            f"a loader process {how} while it loaded {self._describe(self.pending[0].item)}. "
            "If the system ran out of memory (see its log), use fewer loader processes with "
            "--data.workers, or lower --data.prefetch-mib."
        )


# ------------------------------------------------------------------ the interpreter that forks


class _Server:
    """The interpreter that forks the loader processes, as seen by the training process."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = json.dumps([*map(str, sys.path)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it must not receive signals to the process group
                env={**os.environ, **_ONE_THREAD},
            )
            preloaded = [name for name in _PRELOADED if name in sys.modules]
            self._channel.send(json.dumps(preloaded).encode())
        self.owner = os.getpid()
        self._forked, self._lock = 0, threading.Lock()
        weakref.finalize(self, _end_server, self._channel, self._process)

    def fork(self, channel: int, work: int) -> int:
        """The number of the new process, which serves `channel`."""
        self._forked += 1
        order = {"fork": self._forked}
        with suppress(OSError):  # it has ended, and so does the other end of `channel`
            socket.send_fds(self._channel, [json.dumps(order).encode()], [channel, work])
        return self._forked

    def status_of(self, number: int) -> str:
        """How an ended process ended, for messages."""
        try:
            with self._lock:
                self._channel.send(json.dumps({"status": number}).encode())
                answer = self._channel.recv(64)
        except OSError:
            answer = b""
        status = json.loads(answer or "null")
        if status is None:
            return "exited, or the process it was forked from did,"
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"exited with status {status}"


_running: weakref.ref[_Server] | None = None


def _server() -> _Server:
    """The server of this process; it ends with the last `LoaderProcesses` that uses it."""
    global _running  # noqa: PLW0603
    server = _running() if _running is not None else None
    if server is None or server.owner != os.getpid():  # this process is a fork of its owner
        server = _Server()
        _running = weakref.ref(server)
    return server


def _end_server(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
