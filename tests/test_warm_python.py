"""What tests rely on: a forked process behaves like one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from processes import ENVIRONMENT, ROOT
from warm_python import WarmPython

# The last one is set by torch, when it is loaded.
ENV = {**os.environ, **ENVIRONMENT, "A": "ü", "TORCHINDUCTOR_CACHE_DIR": ""}
STATE = """
import os, signal, sys
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
print(sys.argv, sys.path, sys.orig_argv, __name__, os.getcwd(), sorted(os.environ))
print(ignored, signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sorted(os.listdir("/proc/self/fd")), os.environ["A"], sys.stdin.read())
print(len(os.listdir("/proc/self/task")), "ray" in sys.modules)
"""
PROGRAMS = {
    "state": ["-c", STATE, "x", "-y"],
    "error": ["-c", "def f(): 1/0\nf()"],
    "status": ["-c", "raise SystemExit(7)"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "interrupt": ["-c", "import signal; signal.raise_signal(2)"],
    "module": ["-m", "raytrain_ddp", "evaluate", "nothing"],
    "script": ["script.py", "z"],
    "threads and handlers": [
        *("-c", "import atexit, threading, time\natexit.register(print, 'last')"),
    ],
}
PROGRAMS["threads and handlers"][1] += (
    "\nthreading.Thread(target=lambda: (time.sleep(0.1), print('first'))).start()"
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_forked_python_responds_like_a_started_one(program: str, tmp_path: Path):
    code = "import sys\nprint(sys.argv, __file__ if __name__ != '__main__' else __name__)\nx"
    (tmp_path / "script.py").write_text(code)
    command: Any = [sys.executable, *PROGRAMS[program]]
    options: dict[str, Any] = {"input": code, "capture_output": True, "text": True}
    options |= {"cwd": tmp_path, "timeout": 100}
    options["env"] = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    warm = warm_python.run(command, **options)
    usual = subprocess.run(command, check=False, **options)
    ended = [(done.returncode, done.stdout, done.stderr) for done in (warm, usual)]
    assert ended[0] == ended[1]


def test_a_forked_python_can_be_polled_stopped_and_waited_for():
    code = "import time; print('on', flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with WarmPython(command, env=ENV, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        assert process.poll() is None
        assert os.getpgid(process.pid) == os.getpgid(0)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=100) == ("", None)
    assert process.returncode == -signal.SIGTERM
    with WarmPython(command, env=ENV, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        assert os.getsid(process.pid) == process.pid
        process.kill()
    assert process.returncode == -signal.SIGKILL
