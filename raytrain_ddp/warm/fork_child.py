"""What a process that was forked does: it becomes the one that Python itself would have started.

Loaded by fork_server.py, from its folder.
"""

from __future__ import annotations

import importlib
import marshal
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_ddp.warm import fork_client as client
else:
    import fork_client as client


_RAY = ("ray", "ray.train", "ray.train.torch")  # 0.4 s


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What send_request() of fork_client.py has sent: the request, and three open files.

    Raises:
        EOFError: the other end has closed the connection.
    """
    head, files, _, _ = socket.recv_fds(connection, client.NUMBER.size, 3)
    try:
        if len(head) != client.NUMBER.size or len(files) != 3:
            raise EOFError
        [size] = client.NUMBER.unpack(head)
        with connection.makefile("rb") as stream:
            return marshal.loads(stream.read(size)), files
    except BaseException:
        close(files)
        raise


def become(given: Mapping[str, Any], files: list[int], variables: Mapping[str, str]) -> None:
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


def wait(connection: socket.socket, given: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Loads Ray in this forked process, waits for the next request, which must be like `given`, and
    becomes the process that it asks for; does not return."""
    try:
        close_all_but({0, 1, 2, connection.fileno()})
        take_environment(given, variables)
        sys.path[:0] = module_folders(given)
        for name in _RAY:
            importlib.import_module(name)
        connection.sendall(client.READY)
        asked, files = received(connection)
        connection.sendall(client.READY)
    except BaseException:  # the server has ended, or Ray cannot be loaded
        os._exit(1)
    become(asked, files, variables)


def inherit(given: Mapping[str, Any], files: list[int]) -> None:
    """Takes over what exec would have passed on."""
    if given["session"]:
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
    close(int(name) for name in found if int(name) not in kept)


def close(files: Iterable[int]) -> None:
    for file in files:
        with suppress(OSError):  # the one that listed them
            os.close(file)


def take_environment(given: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Takes over the environment and the working folder.

    Args:
        variables: added to the environment, unless it has them.
    """
    os.environb.clear()
    os.environb.update(given["environment"])
    os.environ.update({k: v for k, v in variables.items() if k not in os.environ})
    os.chdir(given["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


def module_folders(given: Mapping[str, Any]) -> list[str]:
    """The folders that come before those of Python: that of the script, and PYTHONPATH."""
    script = os.path.dirname(os.path.realpath(given["command"][0]))
    folders = os.fsdecode(given["environment"].get(b"PYTHONPATH", b"")).split(os.pathsep)
    return [script, *(os.path.normpath(os.path.join(given["folder"], f)) for f in folders if f)]


def run(given: Mapping[str, Any]) -> None:
    """Runs a script as ``python SCRIPT ARGUMENTS`` does."""
    command = given["command"]
    script = command[0]
    folders = module_folders(given)
    sys.path[:0] = folders if sys.path[: len(folders)] != folders else []
    sys.argv[:], sys.orig_argv[:] = command, [sys.executable, *command]
    # Python's own generator is seeded anew by a fork, these are not.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)
