"""Code that runs in the interpreter that forks loader processes, and in these processes."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch

from raytrain_ddp.data.loading import shared_memory
from raytrain_ddp.errors import RaytrainError, TaskError, first_line
from raytrain_ddp.signals import STOP_SIGNALS

END_S = 5.0  # time to finish an item before its process is killed
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def serve(number: int) -> NoReturn:
    """Forks loader processes on request over a socket; ends them and itself when the other side
    closes it."""
    for name in STOP_SIGNALS:  # meant for the training process only; SIG_IGN would be inherited
        signal.signal(name, lambda *_: None)
    parent = os.getppid()
    channel = socket.socket(fileno=number)
    for module in json.loads(channel.recv(4096) or b"[]"):
        __import__(module)
    gc.enable()  # was disabled for the imports, which take a fifth less CPU without it
    torch.set_num_threads(1)
    # Messages waiting to be received count as open files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    gc.collect()
    gc.freeze()  # otherwise, garbage collection in each process would copy shared pages
    children: dict[int, int] = {}  # pid -> number
    statuses: dict[int, int] = {}
    while os.getppid() == parent:
        _reap(children, statuses)
        if not select.select([channel], [], [], _LOOK_S)[0]:
            continue
        order, files, _, _ = socket.recv_fds(channel, 64, 2, socket.MSG_CMSG_CLOEXEC)
        if not order:
            break
        asked = json.loads(order)
        if "fork" in asked:
            pid = _fork(channel, *files)
            children[pid] = asked["fork"]
            for file in files:
                os.close(file)
        else:
            _answer_status(channel, asked["status"], children, statuses)
    until = time.monotonic() + END_S
    while children and time.monotonic() < until:
        time.sleep(0.01)
        _reap(children, statuses)
    os._exit(0)


def _reap(children: dict[int, int], statuses: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        statuses[children.pop(pid)] = os.waitstatus_to_exitcode(status)


def _answer_status(
    channel: socket.socket, number: int, children: dict[int, int], statuses: dict[int, int]
) -> None:
    until = time.monotonic() + END_S
    while number not in statuses and time.monotonic() < until:  # it is exiting
        time.sleep(0.001)
        _reap(children, statuses)
    channel.send(json.dumps(statuses.get(number)).encode())


def _fork(server: socket.socket, channel: int, work: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            server.close()
            _work(socket.socket(fileno=channel), work)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ------------------------------------------------------------------ in a loader process


def _work(channel: socket.socket, file: int) -> None:
    """Processes items until the other end is closed."""
    work, outcome = _unpacked(file)
    os.close(file)
    while True:
        try:
            item = shared_memory.receive(channel)
        except EOFError:
            return
        try:
            if work is not None:
                outcome = (True, work(item), "")
        except Exception as error:
            outcome = _raised(error)
        try:
            shared_memory.send(channel, outcome)
        except ConnectionError:
            return  # the other end is closed
        except Exception as error:
            message = f"a batch cannot be sent to the training process: {first_line(error)}."
            shared_memory.send(channel, (False, TaskError(message), ""))


def _unpacked(file: int) -> tuple[Callable[[Any], Any] | None, tuple[bool, Any, str]]:
    try:
        _, work = shared_memory.unpack(file)  # unpickling the first registers its modules
        return work, (True, None, "")
    except Exception as error:
        return None, (
            False,
            TaskError(
                "the data set and collate cannot be unpickled in a loader process: "
                f"{type(error).__name__}: {first_line(error)}. Define them in a module that can be "
                "imported there, or load in the training process with --data.workers 0."
            ),
            "",
        )


def _raised(error: Exception) -> tuple[bool, Exception, str]:
    """An outcome: the exception, or a picklable one with the same message; and its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[2])
    mine = [n for n, frame in enumerate(frames) if frame.filename.startswith(package)]
    users = frames[mine[-1] + 1 :] or frames
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    text = "".join(lines + traceback.format_exception_only(type(error), error))
    try:
        error = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return False, error, "" if isinstance(error, RaytrainError) else text
