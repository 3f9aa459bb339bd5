"""From the SIGKILL of one of two workers to the next optimizer step, by phase.

    python benchmarks/recovery.py [--rounds N] [--only torchrun,fit-ray] [--out FILE.md FILE.json]
    python benchmarks/recovery.py --quick

Each round runs every contender once, each time beginning with another one: the MLP of launch.py
with a checkpoint every few steps, killed from outside once a number of steps is done. All are
stamped by the same hooks, which Python loads at its start (recovery_programs/site), or the task
in processes that are forked (the marks before it are then those of the task). They run with the
settings that they come with; torchrun gets --max-restarts 3, the naive TorchTrainer
max_failures = 3, fit nothing: its retries are on by default. With --exact, the other worker goes on
alone until the new one joins, as it does with torchft, which drops the samples of the step, and of
the dead worker until then; "all restarted" is what fit does if no worker is replaced alone.
torchft takes part if it is installed (pip install torchft).

A phase ends when the only new worker, or the later one of two, has reached the mark (with --exact,
the one that goes on):

- all old workers gone: the death is noticed, the survivor is taken down, unless it stays
- Python up: the new workers' interpreters run
- torch imported; process group: rendezvous done
- model in DDP: the data are opened, the model is built and wrapped
- checkpoint loaded: for fit this includes a warm-up pass and the check of each byte
- first step: the first optimizer step is done; some steps are then done again, see "redone"

With --breakdown a run of fit has more marks, which the table does not have. Needs psutil.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from series import (
    HERE,
    Series,
    describe_machine,
    end_tree,
    environment,
    import_all_once,
    in_turn,
    middle,
    spread,
    table,
    warn_of_bytecode,
)

PROGRAMS = HERE / "recovery_programs"
WORKERS = 2
STEPS_AFTER = 10  # the kill
LIMIT_S = 180.0
GOES_ON_S = 90.0  # and comes to its end: longer after the kill is a failure
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
FORKED = ("fit-ray", "fit-exact", "fit-restart")
BASE = "torchrun"
MARKS = {
    "gone": "all old workers gone",
    "python": "Python up",
    "torch": "torch imported",
    "group": "process group",
    "ddp": "model in DDP",
    "loaded": "checkpoint loaded",
    "step": "first step",
}


@dataclass(frozen=True)
class Stamp:
    """One line of the stamps file."""

    at: float
    pid: int
    event: str
    rank: int | None


@dataclass(frozen=True)
class Run:
    """One kill of one contender. Times are seconds since the kill; `phases_s` are differences."""

    contender: str
    round: int
    load: float  # of the machine (1 minute) before
    recovery_s: float
    phases_s: dict[str, float]
    marks_s: dict[str, float]
    redone: int  # steps of rank 0 that were done a second time
    step_s: float  # median undisturbed


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    series: Series[Run] = Series(describe_machine())
    warn_of_bytecode(series.machine)
    shown = partial(line, breakdown=args.breakdown)
    with ExitStack() as stack:
        if args.keep:
            folder = tempfile.mkdtemp(prefix="recovery-", dir="/tmp")
            print(f"kept: {folder}", flush=True)
        else:
            made = tempfile.TemporaryDirectory(prefix="recovery-", dir="/tmp")
            folder = stack.enter_context(made)
        import_all_once()
        for number in range(args.rounds):
            for contender in in_turn(args.only, number):
                measured = partial(measure_apart, contender, number + 1, args, Path(folder))
                for _ in range(TRIES):
                    if series.add(f"round {number + 1}, {contender}", measured, shown):
                        break
    return series.publish(as_markdown(series, args), args.out)


def measure_apart(contender: str, number: int, args: Any, folder: Path) -> Run:
    """In a folder of its own; see `measure`."""
    place = Path(tempfile.mkdtemp(prefix=f"{number}-{contender}-", dir=folder))
    try:
        return measure(contender, number, args, place)
    finally:
        if not args.keep:
            shutil.rmtree(place, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill-after", type=int, default=42, help="steps")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--victim", type=int, choices=range(WORKERS), default=1, help="rank")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--quick", action="store_true", help="one round, no naive TorchTrainer")
    parser.add_argument("--breakdown", action="store_true", help="print all marks of each run")
    parser.add_argument("--keep", action="store_true", help="leave the folder of each run")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if find_spec("torchft") is None:
        args.only = [name for name in args.only if name != "torchft"]
    if args.quick:
        args.rounds, args.only = 1, [name for name in args.only if name != "naive-ray"]
    unknown = [name for name in args.only if name not in CONTENDERS]
    if unknown:
        parser.error(f"no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    if not 0 < args.every < args.kill_after:
        parser.error("--every must be above 0 and below --kill-after: else nothing is resumed")
    return args


def command(contender: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of a contender, which trains on for a while after the kill."""
    python, steps = sys.executable, str(steps_of(args))
    common = ["--steps", steps, "--every", str(args.every), "--storage", str(folder)]
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
    torchrun += ["--standalone", "--max-restarts", "3"]
    fit = ["-m", "raytrain_ddp.fit", "--name", "recovery", "--storage", str(folder / "runs")]
    fit += ["--task", f"{PROGRAMS / 'task.py'}:LaunchTask"]
    fit += ["--task-options", "stamps", str(folder / "unused"), "steps", steps]
    fit += ["--epochs", "1", "--batch-size", "64", "--micro-batch", "32"]
    fit += ["--optim.lr", "0.01", "--optim.no-nesterov", "--optim.weight-decay", "0"]
    fit += ["--schedule.name", "constant", "--schedule.warmup-epochs", "0"]
    fit += ["--checkpoint.every-steps", str(args.every), "--checkpoint.every-s", "0"]
    return {
        "torchrun": [*torchrun, str(PROGRAMS / "by_hand.py"), *common],
        "fit-torchrun": [*torchrun, *fit],
        "fit-ray": [python, *fit],
        "fit-exact": [python, *fit, "--exact"],
        "fit-restart": [python, *fit, "--scaling.replace-workers", "false"],
        "naive-ray": [python, str(PROGRAMS / "naive_ray.py"), *common],
        "torchft": [python, str(PROGRAMS / "by_torchft.py"), *common],
    }[contender]


def steps_of(args: argparse.Namespace) -> int:
    return args.kill_after + STEPS_AFTER


def measure(contender: str, number: int, args: argparse.Namespace, folder: Path) -> Run:
    """Runs a contender, kills one worker of it, and lets it come to its end.

    Raises:
        RuntimeError: it failed, or did not go on.
    """
    load, file = os.getloadavg()[0], folder / "stamps"
    paths = [str(PROGRAMS / "site"), os.environ.get("PYTHONPATH", "")]
    env = {**environment(), "RECOVERY_STAMPS": str(file)}
    if contender not in FORKED:  # they are forked only if Python starts as usual
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    log = folder / "log"
    process = subprocess.Popen(
        command(contender, args, folder),
        cwd=HERE.parent,
        env=env,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        killed_at, gone_at, old = kill_one(process, file, args)
        while process.poll() is None and time.monotonic() - killed_at < GOES_ON_S:
            time.sleep(0.05)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from None
    finally:
        end_tree(process.pid)
    found = read(file)
    if process.returncode or not any(s.event == "step" and s.at > killed_at for s in found):
        text = log.read_text(errors="replace")
        raise RuntimeError(f"exit status {process.returncode} after the kill\n{text[-3000:]}")
    total = steps_of(args)
    return reckon(contender, number, load, found, (killed_at, gone_at, old), total)


def kill_one(
    process: subprocess.Popen[bytes], file: Path, args: argparse.Namespace
) -> tuple[float, float, set[int]]:
    """(time of the kill, time at which the old workers that do not stay were gone, all their
    pids)."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = read(file)
        steps = [stamp for stamp in found if stamp.event == "step"]
        if sum(stamp.rank == 0 for stamp in steps) >= args.kill_after:
            break
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"exit status {process.poll()} after {len(steps)} steps of both")
        time.sleep(POLL_S)
    pids = {stamp.rank: stamp.pid for stamp in steps}
    killed_at = time.monotonic()
    os.kill(pids[args.victim], signal.SIGKILL)
    old = set(pids.values())
    gone_at = killed_at
    alive = old
    while alive and not any(s.event == "step" and s.at > killed_at for s in read(file)[-20:]):
        if time.monotonic() - killed_at > LIMIT_S:
            raise RuntimeError("there is no step after the kill")
        time.sleep(POLL_S)
        left = {pid for pid in alive if lives(pid)}
        gone_at, alive = (time.monotonic() if left != alive else gone_at), left
    return killed_at, gone_at, old


def lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def read(file: Path) -> list[Stamp]:
    if not file.exists():
        return []
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    return [
        Stamp(float(line[0]), int(line[1]), line[2], int(line[3]) if len(line) > 3 else None)
        for line in lines
        if len(line) > 2
    ]


def reckon(
    contender: str,
    number: int,
    load: float,
    found: Sequence[Stamp],
    kill: tuple[float, float, set[int]],
    total: int,
) -> Run:
    """Phases from stamps: of each mark the time at which the later new worker had reached it."""
    killed_at, gone_at, old = kill
    later = [s for s in found if s.at > killed_at]
    new = {s.pid for s in later if s.event == "step" and s.pid not in old}
    before = [s.at for s in found if s.event == "step" and s.rank == 0 and s.at <= killed_at]
    if contender == "torchft":  # who goes on may first end its step
        times = [before[-1], *(s.at for s in later if s.event == "step" and s.rank == 0)]
        again_at = max(pairwise(times), key=lambda pair: pair[1] - pair[0])[1]
        new = {next(s.pid for s in later if s.at == again_at)}
        later = [s for s in later if s.at >= again_at or s.event != "step"]
    if contender == "fit-exact":  # who goes on loads the state of its last step
        new = {next(s.pid for s in later if s.event == "loaded" and s.pid in old)}
        again_at = next(s.at for s in later if s.event == "loaded" and s.pid in new)
        later = [s for s in later if s.event != "step" or s.at > again_at]
    marks = {"gone": gone_at - killed_at}
    for event in dict.fromkeys(s.event for s in later if s.pid in new):
        firsts = [
            min(s.at for s in later if (s.pid, s.event) == (pid, event))
            for pid in new
            if any((s.pid, s.event) == (pid, event) for s in later)
        ]
        marks[event] = max(firsts) - killed_at
    reached, phases = 0.0, {}
    for name in MARKS:
        at = max(reached, marks.get(name, reached))
        phases[name], reached = at - reached, at
    after = [s for s in found if s.event == "step" and s.rank == 0 and s.at > killed_at]
    gaps = sorted(b - a for a, b in pairwise(before[2:]))
    return Run(
        contender,
        number,
        load,
        recovery_s=reached,
        phases_s=phases,
        marks_s=dict(sorted(marks.items(), key=lambda pair: pair[1])),
        redone=max(0, len(before) + len(after) - total),  # with torchft, one may be taken over
        step_s=gaps[len(gaps) // 2],
    )


def line(run: Run, breakdown: bool) -> str:
    phases = "  ".join(f"{MARKS[name]} {spent:.2f}" for name, spent in run.phases_s.items())
    marks = [f"{at:8.2f} s  {name}" for name, at in run.marks_s.items()] if breakdown else []
    return "\n    ".join(
        [
            f"round {run.round}  {run.contender:<12}  {run.recovery_s:5.1f} s to the next step"
            f"  redone {run.redone}  load {run.load:.1f}",
            phases,
            *marks,
        ]
    )


def as_markdown(series: Series[Run], args: Any) -> list[str]:
    runs = series.runs
    order = [name for name in CONTENDERS if any(run.contender == name for run in runs)]
    return [
        "# From the SIGKILL of a worker to the next optimizer step",
        f"`python benchmarks/recovery.py --rounds {args.rounds} --kill-after {args.kill_after} "
        f"--every {args.every} --victim {args.victim}`",
        series.place(),
        f"Rank {args.victim} of {WORKERS} CPU workers is killed after {args.kill_after} steps; a"
        f" checkpoint is made every {args.every} steps. Medians over"
        " the rounds (min .. max); ratios to the hand-written loop under torchrun, same round. Who"
        f" does not go on is run again, up to {TRIES} times a round; each failure is listed.",
        table(
            ["", "seconds to the next step", "ratio", "steps redone", "step ms"],
            [contender_row(name, runs) for name in order],
        ),
        "Where it goes (median seconds; a phase ends when the later new worker has reached it):",
        phase_table(order, runs),
    ]


def contender_row(contender: str, runs: Sequence[Run]) -> list[str]:
    base = {run.round: run.recovery_s for run in runs if run.contender == BASE}
    own = [run for run in runs if run.contender == contender]
    return [
        CONTENDERS[contender],
        spread([run.recovery_s for run in own], 1),
        spread([run.recovery_s / base[run.round] for run in own if run.round in base], 2),
        spread([float(run.redone) for run in own], 0),
        spread([1e3 * run.step_s for run in own], 0),
    ]


def phase_table(contenders: Sequence[str], runs: Sequence[Run]) -> str:
    own = {name: [run for run in runs if run.contender == name] for name in contenders}
    rows = [
        [title, *(f"{float(middle([r.phases_s[mark] for r in own[c]])):.1f}" for c in contenders)]
        for mark, title in MARKS.items()
    ]
    sums = [middle([run.recovery_s for run in own[c]]) for c in contenders]
    head = ["until", *(CONTENDERS[c] for c in contenders)]
    return table(head, [*rows, ["sum", *sums]])


if __name__ == "__main__":
    sys.exit(main())
