"""Launching the same training in seven ways: seconds to the first step, of a step, in all.

    python benchmarks/launch.py [--rounds N] [--only by-hand,fit-standing] [--out FILE.md FILE.json]

Each round runs every contender once, each time beginning with another one; a ratio compares with
the hand-written loop of the same round, so a machine that is busy for a while disturbs both sides.
The workload is in launch_programs/workload.py: a 24 M-parameter MLP on made-up samples, two gloo
workers with one thread each, SGD with momentum, one epoch, a checkpoint at its end.

Ray runs its workers at niceness 15, torchrun at 0: other load on the machine slows the former more.
Compare on a quiet one; whether the loop itself costs anything, "fit under torchrun" tells best.

A standing Ray is started before each contender that wants one, with a port and folder of its own,
left to settle, and ended process by process after it: no other Ray on this machine is touched, and
none idles beside the other contenders. Needs psutil (extra `test`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from series import (
    HERE,
    Series,
    describe_machine,
    end_tree,
    environment,
    free_port,
    import_all_once,
    in_turn,
    middle,
    spread,
    table,
    warn_of_bytecode,
)

PROGRAMS = HERE / "launch_programs"
WORKERS = 2
LIMIT_S = 300
SKIPPED_STEPS = 5  # of the steady step time: the first ones allocate and lay buckets anew
FITS_LINE = re.compile(r"^ *(?:[\d.]+ s|\d+m\d\ds)  (?P<name>\S.*)$")
CONTENDERS = {
    "by-hand": "hand-written DDP, torchrun",
    "fit-torchrun": "fit under torchrun",
    "fit-fresh": "fit, embedded Ray",
    "fit-standing": "fit, standing Ray, its first job",
    "fit-again-standing": "fit, standing Ray, its second job",
    "naive-fresh": "naive TorchTrainer, fresh Ray",
    "naive-standing": "naive TorchTrainer, standing Ray",
}


@dataclass(frozen=True)
class Run:
    """One run of one contender."""

    contender: str
    round: int
    first_step_s: float  # from the command to the end of the first optimizer step
    step_s: float  # median of the steps behind the first few
    total_s: float  # from the command to its exit
    load: float  # of the machine (1 minute) before
    phases_s: dict[str, float] = field(default_factory=dict)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    series: Series[Run] = Series(describe_machine())
    warn_of_bytecode(series.machine)
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp") as folder:
        import_all_once()
        for number in range(args.rounds):
            for contender in in_turn(args.only, number):
                measured = partial(measure_apart, contender, number, args.steps, Path(folder))
                series.add(f"round {number + 1}, {contender}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.contender:<14}  first step {run.first_step_s:6.1f} s"
        f"  step {1e3 * run.step_s:6.1f} ms  total {run.total_s:6.1f} s  load {run.load:.1f}"
    )


def measure_apart(contender: str, number: int, steps: int, folder: Path) -> Run:
    """In a folder of its own, with the Ray that it wants; see `measure`."""
    place = folder / f"{number}-{contender}"
    place.mkdir()
    try:
        with standing_ray(place, contender) as address:
            if contender == "fit-again-standing":
                (place / "first").mkdir()
                measure("fit-standing", number, SKIPPED_STEPS + 2, address, place / "first")
            return measure(contender, number, steps, address, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in CONTENDERS]
    if unknown:
        parser.error(f"no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    if args.steps < SKIPPED_STEPS + 2:
        parser.error(f"--steps must be {SKIPPED_STEPS + 2} or more")
    return args


def command(contender: str, steps: int, address: str, folder: Path) -> list[str]:
    """The command line of a contender; it stamps its steps into `folder`/stamps."""
    python, stamps = sys.executable, str(folder / "stamps")
    common = ["--steps", str(steps), "--stamps", stamps]
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
    torchrun += ["--master-port", str(free_port())]
    task = f"{HERE / 'launch_task.py'}:LaunchTask"
    fit = ["-m", "raytrain_ddp.fit", "--name", "launch", "--storage", str(folder / "runs")]
    fit += ["--task", task, "--task-options", "stamps", stamps, "steps", str(steps)]
    fit += ["--epochs", "1", "--batch-size", "64", "--micro-batch", "32"]
    fit += ["--optim.lr", "0.01", "--optim.no-nesterov", "--optim.weight-decay", "0"]
    fit += ["--schedule.name", "constant", "--schedule.warmup-epochs", "0"]
    naive = [python, str(PROGRAMS / "naive_ray.py"), *common, "--storage", str(folder)]
    return {
        "by-hand": [
            *torchrun,
            str(PROGRAMS / "by_hand.py"),
            *common,
            "--checkpoint",
            str(folder / "checkpoint.pt"),
        ],
        "fit-torchrun": [*torchrun, *fit],
        "fit-fresh": [python, *fit],
        "fit-standing": [python, *fit, "--address", address],
        "fit-again-standing": [python, *fit, "--address", address],
        "naive-fresh": naive,
        "naive-standing": [*naive, "--address", address],
    }[contender]


def measure(contender: str, number: int, steps: int, address: str, folder: Path) -> Run:
    """Runs a contender to its end.

    Raises:
        RuntimeError: it failed, or did not do its steps.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    began = time.monotonic()
    process = subprocess.Popen(
        command(contender, steps, address, folder),
        cwd=HERE.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=read_lines, args=(process, lines), daemon=True)
    reader.start()
    try:
        process.wait(LIMIT_S)
    except BaseException:
        end_tree(process.pid)
        raise
    total_s = time.monotonic() - began
    reader.join(5)
    path = folder / "stamps"
    stamps = [float(line) for line in path.read_text().split()] if path.exists() else []
    if process.returncode or len(stamps) != steps:
        said = "".join(line for _, line in lines[-30:])
        raise RuntimeError(f"exit status {process.returncode}, {len(stamps)} steps\n{said}")
    later = stamps[SKIPPED_STEPS:]
    return Run(
        contender,
        number + 1,
        first_step_s=stamps[0] - began,
        step_s=median(b - a for a, b in pairwise(later)),
        total_s=total_s,
        load=load,
        phases_s=phases(began, stamps[0], lines) if contender.startswith("fit") else {},
    )


def read_lines(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic(), line))


def phases(began: float, first_step: float, lines: list[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each phase up to the first step: the names that fit prints, when they came."""
    starts = [(began, "until the first line (Python, config)")]
    for at, line in lines:
        match = FITS_LINE.match(line.rstrip())
        if match and " slots x " in line:
            starts.append((at, "from the plan to the end of step 1"))
            break
        if match:  # the address is another one in each benchmark
            starts.append((at, re.sub(r" at [\d.]+:\d+$", "", match["name"])))
    ends = [at for at, _ in starts[1:]] + [first_step]
    spent: dict[str, float] = {}
    for (at, name), end in zip(starts, ends, strict=True):
        spent[name] = spent.get(name, 0.0) + max(0.0, end - at)
    return spent


@contextmanager
def standing_ray(folder: Path, contender: str) -> Iterator[str]:
    """The address of a Ray that idles, for this contender only; "" if it wants none.

    Even an idle Ray on the machine makes the start of another one seconds slower.
    """
    if not contender.endswith("standing"):
        yield ""
        return
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2]),
            *("--ray-client-server-port", str(free_port())),
            *("--num-cpus", str(WORKERS), "--include-dashboard", "false"),
            *("--temp-dir", str(folder / "ray"), "--disable-usage-stats"),
        ],
        env=environment(),
        stdout=(folder / "ray-start.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_for_ray(process, address, folder / "ray-start.log")
        time.sleep(10)  # its own workers come up behind it
        yield address
    finally:
        end_tree(process.pid)


def wait_for_ray(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None:
            raise SystemExit(f"the standing Ray at {address} ended:\n{log.read_text()}")
        time.sleep(0.2)


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    runs = series.runs
    order = [name for name in CONTENDERS if any(run.contender == name for run in runs)]
    parts = [
        "# Launching the same training in several ways",
        f"`python benchmarks/launch.py --rounds {args.rounds} --steps {args.steps}`",
        series.place(),
        "Medians over the rounds (min .. max); ratios to the hand-written loop of the same round.",
        table(
            ["", "first step after s", "ratio", "step ms", "ratio", "total s", "ratio"],
            [contender_row(name, runs) for name in order],
        ),
    ]
    fits = [name for name in order if name.startswith("fit")]
    if fits:
        parts += ["Where fit's start-up goes (median seconds):", phase_table(fits, runs)]
    return parts


def contender_row(contender: str, runs: Sequence[Run]) -> list[str]:
    base = {run.round: run for run in runs if run.contender == "by-hand"}
    own = [run for run in runs if run.contender == contender]
    row = [CONTENDERS[contender]]
    for name, scale, digits in (("first_step_s", 1, 1), ("step_s", 1e3, 0), ("total_s", 1, 1)):
        values = [scale * getattr(run, name) for run in own]
        ratios = [getattr(r, name) / getattr(base[r.round], name) for r in own if r.round in base]
        row += [spread(values, digits), spread(ratios, 2)]
    return row


def phase_table(contenders: Sequence[str], runs: Sequence[Run]) -> str:
    own = {name: [run.phases_s for run in runs if run.contender == name] for name in contenders}
    names: list[str] = []
    for spent in (phases_s for several in own.values() for phases_s in several):
        for before, name in zip(
            [None, *spent], spent, strict=False
        ):  # a new name goes behind the one before it
            if name not in names:
                names.insert(names.index(before) + 1 if before else 0, name)
    rows = [
        [name, *(middle([spent.get(name) for spent in own[c]]) for c in contenders)]
        for name in names
    ]
    sums = [middle([sum(spent.values()) for spent in own[c]]) for c in contenders]
    return table(
        ["phase", *(CONTENDERS[c] for c in contenders)], [*rows, ["to the first step", *sums]]
    )


if __name__ == "__main__":
    sys.exit(main())
