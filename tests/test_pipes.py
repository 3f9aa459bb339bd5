"""A reader of a command's output may exit early: no traceback, and the status of other Unix
tools."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_ddp.command_line import run_command
from raytrain_ddp.errors import PreflightError

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
COMMANDS = ("fit", "run", "evaluate", "convert", "doctor", "report", "chaos", "sweep")


def ended(folder: Path, script: str, unread: str) -> tuple[int, str]:
    """Exit status and other output of a command whose stream (``stdout`` or ``stderr``) has no
    reader."""
    reads, writes = os.pipe()
    os.close(reads)
    other = {"stdout": "stderr", "stderr": "stdout"}[unread]
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        text=True,
        env=BUFFERED,
        **{unread: writes, other: subprocess.PIPE},
    ) as process:
        os.close(writes)
        out, err = process.communicate(timeout=100)
        return process.returncode, out or err or ""


def run_cli(name: str, *argv: str) -> str:
    return (
        f"import runpy, sys; sys.argv = ['x', *{argv!r}]; "
        f"runpy.run_module('raytrain_ddp.{name}', run_name='__main__', alter_sys=True)"
    )


CALLS = {
    **{name: (name, "--help") for name in COMMANDS},
    "fit --help-all": ("fit", "--help-all"),
    "raytrain --help": ("__main__", "--help"),
    "raytrain fit --help": ("__main__", "fit", "--help"),
    "fit --print-config": ("fit", "--print-config"),
    "fit --dry-run": ("fit", "--dry-run"),
    "fit --emit": ("fit", "--emit", "command"),
    "run --dry-run": ("run", "--num-workers", "2", "--dry-run", "-m", "x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_fault_58_a_command_with_a_closed_output_pipe_exits_with_status_141_silently(
    call: str, tmp_path: Path
):
    assert ended(tmp_path, run_cli(*CALLS[call]), "stdout") == (141, "")


def test_a_command_with_a_closed_error_pipe_exits_with_status_141(tmp_path: Path):
    assert ended(tmp_path, run_cli("run", "--num-workers", "2"), "stderr")[0] == 141


# A command's main, in a separate process.
MAIN = """
import sys
from raytrain_ddp.command_line import run_command
from raytrain_ddp.errors import PreflightError
def main(argv):
    {0}
run_command(main)
"""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("print('x', flush=True); return 0", 141),
        ("print('x'); return 0", 141),
        ("print('x'); return 6", 6),  # the failure is more informative
        ("import rich.console; rich.console.Console().print('x'); return 0", 141),
        ("return 0", 0),
    ],
)
def test_a_broken_pipe_sets_the_exit_status_unless_the_command_failed(
    body: str, status: int, tmp_path: Path
):
    assert ended(tmp_path, MAIN.format(body), "stdout") == (status, "")


def test_a_broken_connection_is_not_treated_as_a_closed_output_pipe():
    def main(argv: object) -> int:
        raise BrokenPipeError("of a socket")

    with pytest.raises(BrokenPipeError):
        run_command(main)


@pytest.mark.parametrize(
    ("body", "buffered"),
    [
        ("print('x'); return 0", True),
        ("print('x', flush=True); return 0", True),
        ("print('x' * 100_000); return 0", True),
        ("print('x'); return 0", False),
        ("import rich.console; rich.console.Console().print('x'); return 0", True),
    ],
)
def test_a_full_disk_is_an_error_in_one_line(body: str, buffered: bool):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN.format(body)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=BUFFERED if buffered else {**BUFFERED, "PYTHONUNBUFFERED": "1"},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: [Errno 28] No space left on device\n"


def test_a_deleted_working_folder_is_an_error_in_one_line(tmp_path: Path):
    line = f'cd {tmp_path} && rmdir {tmp_path} && exec "$0" -m raytrain_ddp.report runs/x'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == PreflightError.exit_status
    assert done.stderr.startswith("error: the working folder cannot be used (No such file")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_elsewhere_keeps_its_traceback():
    def main(argv: object) -> int:
        raise OSError(errno.ENOSPC, "of a data set")

    with pytest.raises(OSError, match="of a data set"):
        run_command(main)


def test_files_do_not_reuse_the_descriptors_of_closed_streams(tmp_path: Path):
    body = "f = open('data', 'w'); print('lost', file=sys.stderr); f.write('kept'); return 0"
    script = MAIN.format(f"print('said'); {body}")
    closed = f"exec '{sys.executable}' -c \"$SCRIPT\" 2>&- <&-"
    done = subprocess.run(
        ["sh", "-c", closed],
        cwd=tmp_path,
        env={**BUFFERED, "SCRIPT": script},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "said\n")
    assert (tmp_path / "data").read_text() == "kept"
