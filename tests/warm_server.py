"""A Python that has torch loaded, and forks from itself what is asked for; see warm_python.py.

It has one thread, does not import Ray, and ends, with all that it has forked, when its socket is
closed. A forked process ends as Python does: threads are joined, exit handlers are called, the
streams are flushed. Its memory is not cleared, which would take longer than most programs.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import linecache
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this tree, not the installed one
from raytrain_ddp import warm

sys.path.insert(0, str(warm.__path__[0]))  # test modules import each other from there
import fork_child
import fork_server

del sys.path[:2]

_MORE = ("matplotlib.pyplot", "torch.distributed.nn", "timm")


def main(channel: socket.socket) -> dict[str, Any]:
    """Forks on request; returns in the forked processes, with what they are to run."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, where its status goes)
    while True:
        ready, _, _ = select.select([channel, *children], [], [])
        for ended in children.keys() & set(ready):
            pid, report = children.pop(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError):
                os.write(report, struct.pack("!i", status))
            os.close(report)
            os.close(ended)
        if channel not in ready:
            continue
        head, files, _, _ = socket.recv_fds(channel, 4, 4)
        if not head:
            for pid, _ in children.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        request = json.loads(fork_child.received(channel, struct.unpack("!I", head)[0]))
        pid = os.fork()
        if pid == 0:
            _inherit(request, files[:3])
            return request
        children[os.pidfd_open(pid)] = (pid, files.pop())
        for file in files:
            os.close(file)
        channel.sendall(struct.pack("!I", pid))


def _inherit(request: dict[str, Any], files: list[int]) -> None:
    """Sets up what exec would have passed on."""
    if request["session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    fork_child.close_all_but({0, 1, 2})
    os.environ.clear()
    os.environ.update({**VARIABLES, **request["environment"]})
    os.chdir(request["folder"])


def run(command: list[str]) -> None:
    """As ``python COMMAND``: -m MODULE, -c CODE, - or a script, with arguments."""
    extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(folder) for folder in extra if folder]
    sys.orig_argv[:] = [sys.executable, *command]
    sys.modules["numpy"].random.seed()  # Python's own generator is seeded anew by a fork
    sys.modules["torch"].seed()
    this = sys.modules["__main__"] = types.ModuleType("__main__")
    this.__dict__["__builtins__"] = builtins
    kind, *arguments = command
    if kind == "-m":
        sys.argv[:] = ["-m", *arguments[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.argv[:], place, code = ["-c", *arguments[1:]], "<string>", arguments[0]
        sys.path.insert(0, "")
    elif kind == "-":
        sys.argv[:], place, code = command, "<stdin>", sys.stdin.read()
        sys.path.insert(0, "")
    else:
        sys.argv[:], place, code = command, kind, Path(kind).read_text(encoding="utf-8")
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        this.__dict__["__file__"] = place = os.path.abspath(kind)
    if sys.version_info >= (3, 13) and place == "<string>":  # its tracebacks show the code
        linecache.cache[place] = len(code), None, code.splitlines(keepends=True), place
    exec(compile(code, place, "exec", dont_inherit=True), this.__dict__)


def end(error: BaseException | None) -> None:
    """Ends this process as Python does after `error`."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        trace, status = error.__traceback__, 1
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    VARIABLES = fork_server.load()
    gc.disable()
    for name in _MORE:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # a process's garbage collector would copy the pages
    assert fork_server.is_fit_to_fork(), "has threads, or Ray"
    ordered = main(socket.socket(fileno=int(sys.argv[1])))
    ended: BaseException | None = None
    try:
        run(ordered["command"])
    except BaseException as error:
        ended = error
    end(ended)
