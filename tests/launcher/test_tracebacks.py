"""Tracebacks that a rank has printed, of Python and of rich."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from raytrain_ddp.launcher.tracebacks import TracebackFinder

CAUGHT = (
    "import traceback\ndef f():\n try: 1/0\n except ArithmeticError: traceback.print_exc()\nf()"
)
CHAINED = "def f(*x):\n try: 1/0\n except ArithmeticError: raise KeyError('real')\n"
PRINTED = [
    ("def f(): 1/0\nf()", True, False, "ZeroDivisionError: division by zero"),
    (CAUGHT, False, False, "ZeroDivisionError: division by zero"),
    (CAUGHT + "\nraise ValueError('x')", True, False, "ValueError: x"),
    ("import threading as t; t.Thread(target=int, args='x').start()", False, True, "ValueError: "),
    ("try: 1/0\nexcept ArithmeticError as e: raise KeyError(1) from e", True, False, "KeyError: 1"),
    ("raise ValueError('a\\nb\\nc')", True, False, "ValueError: a"),
    ("from rich import traceback as t; t.install()\ndef f(): 1/0\nf()", True, False, "ZeroDivis"),
    ("class A:\n def __del__(self): 1/0\nA()", False, False, "ZeroDivisionError: "),
    (
        CHAINED + "import torch.multiprocessing as m\nm.start_processes(f, start_method='fork')",
        *(True, False, "KeyError: 'real'"),
    ),
]


@pytest.mark.parametrize(("code", "uncaught", "in_thread", "error"), PRINTED)
def test_python_tracebacks_are_parsed(
    code: str, uncaught: bool, in_thread: bool, error: str, tmp_path: Path
):
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, tmp_path / "script.py"]
    environment = {**os.environ, "COLUMNS": "40" if "rich" in code else "100"}
    run = warm_python.run if "torch" in code else subprocess.run
    done = run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    for prefix in ("", "\x1b[31m", "[rank1]: "):
        watch = TracebackFinder()
        for line in done.stderr.splitlines():
            watch.line("stderr", prefix + line, 1.0)
        raised = watch.raised
        assert raised is not None
        assert raised.error.startswith(error)
        assert raised.uncaught == (uncaught or prefix.startswith("[rank"))
        assert raised.in_thread == in_thread
        assert raised.ending == raised.uncaught
