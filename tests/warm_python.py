"""Python processes that start in a tenth of a second, as torch is loaded in the one that they are
forked from. Each process of pytest has one such server, started when it is first needed.

For tests of what a program does. Those of how Python itself starts, of the console script, of what
is imported and of how long it takes have processes of their own, by `subprocess`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import ENVIRONMENT

from raytrain_ddp.warm import fork_client

PROGRAM = str(Path(__file__).with_name("given_program.py"))
MORE = ("matplotlib.pyplot", "torch.distributed.nn", "timm")


def _start() -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return fork_client.start_server(_address(), os.getpid(), 1, environ=environment, modules=MORE)


def _address() -> str:
    return f"raytrain-fork-test-{os.getpid()}"


class WarmPython(subprocess.Popen[Any]):
    """``subprocess.Popen([sys.executable, ...])``, as far as a fork can be equivalent.

    The command is ``-m MODULE``, ``-c CODE``, ``-``, or a script, with arguments. The environment
    must have OMP_NUM_THREADS=1: it is read when torch is loaded.
    """

    _forked: fork_client.Forked

    def _execute_child(self, args: Sequence[Any], *given: Any) -> None:  # type: ignore[override]
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = given
        pipes, session = rest[:6], rest[11]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        python, *command = map(os.fspath, args)
        environment = os.environ if env is None else env
        assert python == sys.executable
        assert not any((preexec_fn, pass_fds, shell))
        assert environment.get("OMP_NUM_THREADS") == "1"
        request = {
            **fork_client.own_state([PROGRAM, *command], environment),
            "folder": os.path.abspath(cwd or "."),
            "session": session,
            "waits": True,
        }
        files = [own if own >= 0 else n for n, own in enumerate((p2cread, c2pwrite, errwrite))]
        forked = fork_client.forked(_address(), _start, request, files)
        if forked is None:  # a module on PYTHONPATH hides one that is loaded
            raise AssertionError("the server has refused, or has ended")
        self._forked, self.pid, self._child_created = forked, forked.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        self.returncode = self._forked.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        self.returncode = self._forked.poll()
        return self.returncode


def run(
    command: Sequence[Any],
    input: Any = None,
    timeout: float | None = None,
    capture_output: bool = True,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run([sys.executable, ...])`` with a `WarmPython`; texts, by default with the
    package of this tree."""
    options = {"text": True, "env": {**os.environ, **ENVIRONMENT}, **options}
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


def fit(folder: Path, *flags: str, **variables: str) -> WarmPython:
    """``fit`` in the background, with these variables besides; its errors are in its output."""
    environment = {**os.environ, **ENVIRONMENT, **variables}
    command = [sys.executable, "-m", "raytrain_ddp.fit", *flags]
    out, err = subprocess.PIPE, subprocess.STDOUT
    return WarmPython(command, cwd=folder, env=environment, stdout=out, stderr=err, text=True)
