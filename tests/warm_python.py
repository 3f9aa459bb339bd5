"""Python processes that start in a tenth of a second, as torch is loaded in the one that they are
forked from. Each process of pytest has one such server, started when it is first needed.

For tests of what a program does. Those of how Python itself starts, of the console script, of what
is imported and of how long it takes have processes of their own, by `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("warm_server.py")


class _Server:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channel: socket.socket | None = None

    def start(self) -> socket.socket:
        if self.channel is None:
            self.channel, theirs = socket.socketpair()
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, str(SERVER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**environment, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            atexit.register(self.end)
        return self.channel

    def end(self) -> None:
        assert self.channel is not None
        self.channel.close()
        self._process.wait()


_server = _Server()


class WarmPython(subprocess.Popen[Any]):
    """``subprocess.Popen([sys.executable, ...])``, as far as a fork can be equivalent.

    The command is ``-m MODULE``, ``-c CODE``, ``-``, or a script, with arguments. The environment
    must have OMP_NUM_THREADS=1: it is read when torch is loaded.
    """

    _status: int  # a pipe

    def _execute_child(self, args: Sequence[Any], *given: Any) -> None:  # type: ignore[override]
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = given
        pipes, session = rest[:6], rest[11]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        python, *command = map(os.fspath, args)
        environment = dict(os.environ if env is None else env)
        assert python == sys.executable
        assert not any((preexec_fn, pass_fds, shell))
        assert environment.get("OMP_NUM_THREADS") == "1"
        self._status, theirs = os.pipe()
        request = {
            "command": command,
            "environment": environment,
            "folder": os.path.abspath(cwd or "."),
            "session": session,
        }
        data = json.dumps(request).encode()
        files = [own if own >= 0 else n for n, own in enumerate((p2cread, c2pwrite, errwrite))]
        with _server.lock:
            channel = _server.start()
            socket.send_fds(channel, [struct.pack("!I", len(data))], [*files, theirs])
            channel.sendall(data)
            answer = channel.recv(4)
        assert answer, "the server has ended"
        (self.pid,) = struct.unpack("!I", answer)
        self._child_created = True
        os.close(theirs)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            (self.returncode,) = struct.unpack("!i", os.read(self._status, 4))
            os.close(self._status)
        return self.returncode

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None


def run(
    command: Sequence[Any],
    input: Any = None,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run([sys.executable, ...])`` with a `WarmPython`."""
    pipes = ["stdin"] * (input is not None) + ["stdout", "stderr"] * capture_output
    with WarmPython(command, **options, **dict.fromkeys(pipes, subprocess.PIPE)) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
