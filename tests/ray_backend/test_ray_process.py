"""The process that is connected to Ray, with work that does without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import warm_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, there is none")

SCRIPT = """
import os, signal, sys, time
from raytrain_ddp.ray_backend.ray_process import caller, in_ray_process
from raytrain_ddp.signals import STOP_SIGNALS, handling

def fails(show):
    print("printed")
    os.environ["CHANGED"] = "1"
    show(caller() == os.getppid())
    raise ZeroDivisionError("why")

def killed(show):
    show("before")
    os.kill(os.getpid(), signal.SIGKILL)

def handles(show):
    numbers = []
    with handling(STOP_SIGNALS, lambda number, _: numbers.append(number)):
        os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler: both processes
        os.kill(os.getppid(), signal.SIGTERM)
        while not numbers:
            time.sleep(0.01)
    show(numbers)

def refused(show):
    try:
        show("refuse")
        while True:
            time.sleep(0.01)
    finally:
        print("cleaned up")

def orphaned(show):
    show(os.getpid())
    while True:
        time.sleep(0.01)

def shown(event):
    print("shown", event, flush=True)
    if event == "refuse":
        raise LookupError(event)
    if isinstance(event, int) and event > 1:
        os.kill(os.getpid(), signal.SIGKILL)

try:
    in_ray_process(globals()[sys.argv[1]], shown)
    print("done")
except BaseException as error:
    print("raised", type(error).__name__, *error.args)
print("changed" if "CHANGED" in os.environ else "unchanged")
"""
LOST = "raised RetriesExhausted the connection to Ray is lost"


def output_of(work: str, folder: Path) -> list[str]:
    done = warm_python.run([sys.executable, "-c", SCRIPT, work], cwd=folder, timeout=60)
    assert done.stderr == ""
    return [str(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("work", "lines"),
    [
        ("fails", ["shown True", "printed", "raised ZeroDivisionError why"]),
        ("killed", ["shown before", LOST]),
        ("handles", ["shown [15]", "done"]),
        ("refused", ["shown refuse", "cleaned up", "raised LookupError refuse"]),
    ],
)
def test_work_in_another_process_ends_as_it_would_here(work: str, lines: list[str], tmp_path: Path):
    *found, state = output_of(work, tmp_path)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))
    assert state == "unchanged"


def test_the_process_ends_with_its_caller(tmp_path: Path):
    [line] = output_of("orphaned", tmp_path)
    pid = int(line.split()[1])
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
