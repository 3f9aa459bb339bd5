"""Measures the time from the SIGKILL of one of two workers to the next optimizer step, by phase.

    python benchmarks/recovery.py [--rounds N] [--only torchrun,fit-ray] [--out FILE.md]

What is trained is in programs/workload.py, with a checkpoint every few steps; one worker is killed
from outside once a number of steps is done. All contenders run with their default settings, except
for retries: torchrun gets --max-restarts 3, and the naive TorchTrainer max_failures = 3; `fit`
retries by default. With --exact, the other worker continues alone until the new one joins, as with
torchft, which drops the samples of the step, and those of the dead worker until then. "All
restarted" is what `fit` does if no worker is replaced alone. torchft takes part if it is installed.

A phase ends when the only new worker, or the later one of two, has reached its mark (with --exact
and torchft, the worker that continues):

- started: the death is noticed, workers that do not stay have ended, new processes or forks run
- task: Python and torch are imported (on Ray, the process group made, too), the task is there
- model in DDP: the data are opened, the model is built and wrapped
- loaded: the checkpoint is loaded; with `fit`, after a warm-up pass and the check of each byte
- first step: the first optimizer step is done; "repeated" counts those that are done again
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from series import (
    PROGRAMS,
    Column,
    Series,
    end_session,
    fit_flags,
    import_all_once,
    parse,
    parser,
    start,
    tail,
    torchrun,
)

WORKERS = 2
STEPS_AFTER = 10  # the kill
LIMIT_S = 180.0
CONTINUES_S = 90.0  # time limit from the kill to the end of the run
TRIES = 3  # of a contender in a round: torchrun's restart does not always succeed
POLL_S = 0.005
CONTENDERS = {
    "torchrun": "hand-written DDP, torchrun restarts",
    "fit-torchrun": "fit under torchrun, which restarts",
    "fit-ray": "fit, embedded Ray",
    "fit-exact": "fit --exact, embedded Ray",
    "fit-restart": "fit, embedded Ray, all restarted",
    "naive-ray": "naive TorchTrainer, embedded Ray",
    "torchft": "torchft, two replicas",
}
PHASES = {
    "started": "started",
    "here": "task",
    "ddp": "model in DDP",
    "loaded": "loaded",
    "step": "first step",
}
COLUMNS = (
    Column("seconds to the next step", "recovery_s", 1, has_ratio=True),
    Column("steps repeated", "repeated"),
    Column("step ms", "step_s", 0, 1e3),
)


@dataclass(frozen=True)
class Mark:
    """One line of the file of marks; only a step has a `rank`."""

    at: float
    pid: int
    name: str
    rank: int | None


def main() -> int:
    contenders = dict(CONTENDERS)
    if find_spec("torchft") is None:
        del contenders["torchft"]
    flags = parser(__doc__, rounds=3)
    flags.add_argument("--kill-after", type=int, default=42, help="steps")
    flags.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    flags.add_argument("--victim", type=int, choices=range(WORKERS), default=1, help="rank")
    args = parse(flags, contenders)
    if not 0 < args.every < args.kill_after:
        flags.error("--every must be above 0 and below --kill-after: else nothing is resumed")
    args.steps = args.kill_after + STEPS_AFTER
    series = Series(contenders, base="torchrun")
    import_all_once()
    series.measure(args, partial(measure, args), tries=TRIES)
    phases = [Column(title, f"{name}_s", 1) for name, title in PHASES.items()]
    return series.publish(
        "From the SIGKILL of a worker to the next optimizer step",
        [
            f"Rank {args.victim} of {WORKERS} CPU workers is killed after {args.kill_after} steps,"
            f" with a checkpoint every {args.every} steps. A contender that does not continue is"
            f" run again, up to {TRIES} times in a round.",
            series.table(COLUMNS),
            "The phases, in seconds:",
            series.table(phases),
        ],
        args.out,
    )


def command(contender: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The command of a contender, which trains on for a while after the kill."""
    python, stamps, steps = sys.executable, folder / "stamps", args.steps
    common = ["--steps", str(steps), "--every", str(args.every), "--storage", str(folder)]
    common += ["--stamps", str(stamps)]
    restarting = torchrun(WORKERS, "--standalone", "--max-restarts", "3")
    fit = fit_flags(steps, stamps, folder / "runs")
    fit += ["--checkpoint.every-steps", str(args.every), "--checkpoint.every-s", "0"]
    return {
        "torchrun": [*restarting, str(PROGRAMS / "by_hand.py"), *common],
        "fit-torchrun": [*restarting, *fit],
        "fit-ray": [python, *fit],
        "fit-exact": [python, *fit, "--exact"],
        "fit-restart": [python, *fit, "--scaling.replace-workers", "false"],
        "naive-ray": [python, str(PROGRAMS / "naive_ray.py"), *common],
        "torchft": [python, str(PROGRAMS / "by_torchft.py"), *common],
    }[contender]


def measure(args: argparse.Namespace, contender: str, _: str) -> Mapping[str, float]:
    """Runs a contender, kills one of its workers, and lets it come to its end.

    Raises:
        RuntimeError: it failed, or did not continue.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-", dir="/tmp") as name:
        folder = Path(name)
        log, stamps = folder / "log", folder / "stamps"
        process = start(command(contender, args, folder), log)
        try:
            killed_at, old = kill_one(process, stamps, args)
            while process.poll() is None and time.monotonic() - killed_at < CONTINUES_S:
                time.sleep(0.05)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{tail(log)}") from None
        finally:
            end_session(process.pid)
        found = read(stamps)
        if process.returncode or not any(m.name == "step" and m.at > killed_at for m in found):
            raise RuntimeError(f"{process.returncode} after the kill\n{tail(log)}")
        return reckon(contender, found, killed_at, old, args.steps)


def kill_one(
    process: subprocess.Popen[bytes], stamps: Path, args: argparse.Namespace
) -> tuple[float, set[int]]:
    """Kills a worker once enough steps are done. Returns the time, and the process ids of all
    workers until then."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        steps = [mark for mark in read(stamps) if mark.name == "step"]
        if sum(mark.rank == 0 for mark in steps) >= args.kill_after:
            break
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"exit status {process.poll()} after {len(steps)} steps of both")
        time.sleep(POLL_S)
    pids = {mark.rank: mark.pid for mark in steps}
    os.kill(pids[args.victim], signal.SIGKILL)
    return time.monotonic(), set(pids.values())


def read(stamps: Path) -> list[Mark]:
    lines = stamps.read_text(encoding="ascii").splitlines() if stamps.exists() else []
    words = [line.split() for line in lines]
    return [
        Mark(float(at), int(pid), name, int(rank[0]) if rank else None)
        for at, pid, name, *rank in (line for line in words if len(line) > 2)
    ]


def reckon(
    contender: str, found: Sequence[Mark], killed_at: float, old: set[int], total: int
) -> Mapping[str, float]:
    """The seconds of each phase, from the marks. A phase ends with the mark of the later worker."""
    later = sorted((m for m in found if m.at > killed_at), key=lambda mark: mark.at)
    new = {m.pid for m in later if m.name == "step" and m.pid not in old}
    before = [m.at for m in found if m.name == "step" and m.rank == 0 and m.at <= killed_at]
    after = [m.at for m in later if m.name == "step" and m.rank == 0]
    if contender == "torchft":  # the one that continues may first end its step
        again_at = max(pairwise([before[-1], *after]), key=lambda pair: pair[1] - pair[0])[1]
        new = {next(m.pid for m in later if m.at == again_at)}
        later = [m for m in later if m.at >= again_at or m.name != "step"]
    if contender == "fit-exact":  # the one that continues loads the state of its last step
        again = next(m for m in later if m.name == "loaded" and m.pid in old)
        new = {again.pid}
        later = [m for m in later if m.name != "step" or m.at > again.at]
    marks = dict[str, float]()
    for name in {m.name for m in later if m.pid in new}:
        firsts: dict[int, float] = {}
        for mark in later:
            if mark.name == name and mark.pid in new:
                firsts.setdefault(mark.pid, mark.at)
        marks[name] = max(firsts.values()) - killed_at
    reached, phases = 0.0, {}
    for name in PHASES:
        at = max(reached, marks.get(name, reached))
        phases[f"{name}_s"], reached = at - reached, at
    return {
        "recovery_s": reached,
        "repeated": max(0, len(before) + len(after) - total),  # with torchft, one may be taken over
        "step_s": median(b - a for a, b in pairwise(before[2:])),
        **phases,
    }


if __name__ == "__main__":
    sys.exit(main())
