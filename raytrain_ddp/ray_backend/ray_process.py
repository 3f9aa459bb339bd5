"""Runs the code that connects to Ray in a separate process, forked from the caller's.

Ray changes the process that connects to it: environment, signal handlers, logging, hooks. If its
raylet dies, its C++ code ends that process, which no Python code there can prevent or notice. So
the caller's process does not connect: it shows the events, receives the signals, and reports the
end. What Ray prints goes to a file.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import RemoteTraceback, RetriesExhausted
from raytrain_ddp.signals import STOP_SIGNALS, handling, heeded, relayed_by

LOST = (
    "the connection to Ray is lost; committed checkpoints are kept; run the same command again to "
    "resume: "
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_END_WITHIN_S = 60.0

Show = Callable[[Any], None]
_callers: list[int] = []  # in a process that is forked here: the pid of its parent


def caller() -> int:
    """The pid of the process that called `fit`: this one, or the one this was forked from."""
    return (_callers or [os.getpid()])[-1]


def in_ray_process(work: Callable[[Show], None], show: Show) -> None:
    """Calls work(show) in a forked process. Its events are shown in this one, and its output is
    printed here after it has ended.

    Does not fork if this process has loaded Ray, whose threads the fork would lack, or if the
    system is not Linux.

    Raises:
        RetriesExhausted: the process ended before its work was done, as Ray ends it if a part of
            Ray is lost.
        BaseException: what `work` has raised.
    """
    if "ray" in sys.modules or sys.platform != "linux":
        work(show)
        return
    own, its = Pipe()
    parent, output = os.getpid(), tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads stay behind
        pid = os.fork()
    if pid == 0:
        try:
            own.close()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            _work(work, its, parent)
        finally:
            os._exit(0)
    its.close()
    sent: list[int] = []

    def relay(number: int, _: object) -> None:
        sent.append(number)
        with suppress(OSError):
            own.send(number)

    with own, output, handling(heeded(), relay):
        try:
            while (end := _received(own)) is not None and end.is_shown:
                show(end.event)
        except BaseException:
            _end(own, pid)
            raise
        finally:
            with suppress(ChildProcessError):  # the user ignores SIGCHLD
                os.waitpid(pid, 0)
            output.seek(0)
            if text := output.read():
                print(text, end="")
    if end is None:
        raise RetriesExhausted(
            f"{LOST}the process that was connected to it has ended (it or its raylet was "
            "killed or crashed)."
        )
    if end.event is not None:
        if isinstance(end.event, KeyboardInterrupt) and sent:
            end.event.args = (sent[-1],)
        raise end.event from RemoteTraceback(end.text)


class _Letter(NamedTuple):
    """An event to show; or the end of the work, with the exception that ended it, if any, and its
    traceback."""

    is_shown: bool
    event: Any
    text: str = ""


def _received(own: Connection) -> _Letter | None:
    """The next letter; None if the process has ended."""
    with suppress(EOFError, OSError):
        return _Letter(*own.recv())
    return None


def _end(own: Connection, pid: int) -> None:
    """Asks the process to end, and waits until it has."""
    timer = threading.Timer(_END_WITHIN_S, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with suppress(OSError):
        for number in (signal.SIGTERM, signal.SIGINT):  # the second one: without a checkpoint
            own.send(number)
    while _received(own) is not None:
        pass
    timer.cancel()


def _work(work: Callable[[Show], None], its: Connection, parent: int) -> None:
    """Runs in the forked process."""
    _callers.append(parent)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.setsid()  # a terminal signals the caller only
    # Another thread may have held the locks of these.
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" in sys.modules:  # OpenMP's threads stay behind
        sys.modules["torch"].set_num_threads(1)
    relayed_by(its.recv)
    lock, end = threading.Lock(), _Letter(False, None)

    def show(event: object) -> None:
        with lock:
            its.send((True, event))

    try:
        work(show)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
            raised: BaseException = error
        except Exception:
            raised = RuntimeError(f"{type(error).__name__}: {error}")
        end = _Letter(False, raised, "".join(traceback.format_exception(error)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    its.send(tuple(end))


# ------------------------------------------------------------------ what Ray prints


@contextmanager
def ray_output_to_file(run: Storage) -> Iterator[None]:
    """Redirects standard output and error of this thread, and of Ray's, to the run's
    logs/driver.log.

    A display created before keeps the terminal, as it writes to the stream itself.
    """
    path = Path(run.path) / LOGS / "driver.log" if run.is_local else Path("/dev/null")
    own = threading.current_thread()
    with (
        redirect_stdout(_ByThread(path, sys.stdout, own)),
        redirect_stderr(_ByThread(path, sys.stderr, own)),
    ):
        yield


class _ByThread(io.TextIOBase):
    """Appends what one thread and Ray's write to a file, created then, and passes the rest to the
    stream it replaces. Errors of the file, such as a full disk, are ignored."""

    def __init__(self, path: Path, replaced: TextIO, own: threading.Thread) -> None:
        self._path, self._replaced, self._own = path, replaced, own

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread is not self._own and not thread.name.startswith(("ray_", "ray-")):
            return self._replaced.write(text)
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        return len(text)

    def flush(self) -> None:
        if threading.current_thread() is not self._own:
            self._replaced.flush()
