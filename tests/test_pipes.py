"""A reader of a command's output may exit early: no traceback, and the status of other Unix
tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from processes import ENVIRONMENT

from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import PreflightError

BUFFERED = {k: v for k, v in {**os.environ, **ENVIRONMENT}.items() if k != "PYTHONUNBUFFERED"}
CALLS = [
    *("fit --help", "fit --help-all", "fit --print-config", "fit --dry-run", "fit --emit command"),
    *("run --help", "report --help", "convert --help"),
]
# A command's main.
MAIN = """
import sys
from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import PreflightError
def main(argv):
    {0}
run_command(main)
"""


def ended(folder: Path, command: list[str], unread: str = "stdout") -> tuple[int, str]:
    """Exit status and other output of a command one of whose streams has no reader."""
    reads, writes = os.pipe()
    os.close(reads)
    streams: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, unread: writes}
    with warm_python.WarmPython(
        [sys.executable, *command], cwd=folder, text=True, env=BUFFERED, **streams
    ) as process:
        os.close(writes)
        out, err = process.communicate(timeout=100)
        return process.returncode, out or err or ""


def test_fault_58_a_command_with_a_closed_output_pipe_exits_with_status_141_silently(
    tmp_path: Path,
):
    for call in CALLS:
        assert ended(tmp_path, ["-m", "raytrain_ddp", *call.split()]) == (141, ""), call
    words = ["-m", "raytrain_ddp.run", "--num-workers", "2"]
    assert ended(tmp_path, words, "stderr")[0] == 141


def test_a_broken_pipe_sets_the_exit_status_unless_the_command_failed(tmp_path: Path):
    for body, status in (
        ("print('x', flush=True); return 0", 141),
        ("print('x'); return 6", 6),  # the failure is more informative
        ("import rich.console; rich.console.Console().print('x'); return 0", 141),
        ("return 0", 0),
    ):
        assert ended(tmp_path, ["-c", MAIN.format(body)]) == (status, ""), body


def test_a_full_disk_is_an_error_in_one_line():
    for body in ("print('x'); return 0", "print('x' * 100_000); return 0"):
        with Path("/dev/full").open("w") as full:
            done = warm_python.run(
                [sys.executable, "-c", MAIN.format(body)],
                capture_output=False,
                stdout=full,
                stderr=subprocess.PIPE,
                env=BUFFERED,
            )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "No space left on device" in done.stderr


def test_errors_of_other_files_and_sockets_keep_their_tracebacks():
    def main(argv: object) -> int:
        raise BrokenPipeError("x")

    with pytest.raises(BrokenPipeError):
        run_command(main)


def test_a_deleted_working_folder_is_an_error_in_one_line(tmp_path: Path):
    line = f'cd {tmp_path} && rmdir {tmp_path} && exec "$0" -m raytrain_ddp.fit'
    words = ["sh", "-c", line, sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=BUFFERED)
    assert done.returncode == PreflightError.exit_status
    assert done.stderr.count("\n") == 1
