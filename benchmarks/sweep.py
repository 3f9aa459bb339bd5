"""Trials per hour of a sweep over the digits, beside Ray Tune and Optuna with loops by hand.

    python benchmarks/sweep.py [--rounds N] [--trials N] [--out FILE.md FILE.json]

Each round runs every contender once, each time beginning with another one. All train the same
network on the same samples with the same batch, schedule and number of epochs, two trials at a time
with one thread each, evaluate after each epoch, and keep a checkpoint; the points are random. The
time is that of the whole command: starting Ray, and loading torch, are part of it. "Between two
starts" is the mean time from one trial's start to that of the next, times two, as two run side by
side: what a trial costs once all is running.

The sweep does more per trial: exact resumption, metrics, events, checkpoints that are verified.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from series import (
    HERE,
    Series,
    describe_machine,
    end_tree,
    environment,
    import_all_once,
    in_turn,
    spread,
    table,
    warn_of_bytecode,
)

PROGRAMS = HERE / "sweep_programs"
PARALLEL = 2
LIMIT_S = 1200
CONTENDERS = {
    "sweep": "sweep",
    "tune": "Ray Tune, loop by hand in a function",
    "tune-trainer": "Ray Tune, TorchTrainer in each trial",
    "optuna": "Optuna, loop by hand, two processes",
}


@dataclass(frozen=True)
class Run:
    """One run of one contender."""

    contender: str
    round: int
    trials: int
    total_s: float  # of the command
    first_s: float  # until the first trial began to train
    between_s: float  # of one trial's process, from start to start
    load: float  # of the machine (1 minute) before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=12, help="an even number, at least 4")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    if args.trials < 2 * PARALLEL:  # the time between two starts is that of later ones
        parser.error(f"--trials {args.trials}: at least {2 * PARALLEL}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    series: Series[Run] = Series(describe_machine())
    warn_of_bytecode(series.machine)
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        import_all_once()
        for number in range(args.rounds):
            for contender in in_turn(args.only.split(","), number):
                place = Path(folder) / f"{number}-{contender}"
                (place / "stamps").mkdir(parents=True)
                measured = partial(measure, contender, number, args, place)
                series.add(f"round {number + 1}, {contender}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.contender:<14}  {3600 * run.trials / run.total_s:6.0f} an hour"
        f"  first after {run.first_s:5.1f} s  between {run.between_s:5.1f} s  load {run.load:.1f}"
    )


def command(contender: str, args: argparse.Namespace, place: Path) -> list[str]:
    sizes = ["--trials", str(args.trials), "--epochs", str(args.epochs)]
    if contender == "sweep":
        words = ["-m", "raytrain_ddp.tools.sweep", "digits", *sizes, "--parallel", str(PARALLEL)]
        words += ["--space", "optim.lr=log:1e-3:1", "model.dropout=0:0.5"]
        words += ["--storage", str(place), "--name", "s", "--micro-batch", "64"]
        return [sys.executable, *words]
    program = "naive_optuna.py" if contender == "optuna" else "naive_tune.py"
    words = [str(PROGRAMS / program), *sizes, "--stamps", str(place / "stamps")]
    words += ["--storage", str(place), *["--trainer"] * (contender == "tune-trainer")]
    return [sys.executable, *words]


def measure(contender: str, number: int, args: argparse.Namespace, place: Path) -> Run:
    """Raises RuntimeError if it failed, TimeoutExpired if it took longer than LIMIT_S."""
    load = os.getloadavg()[0]
    began, began_wall = time.monotonic(), time.time()
    process = subprocess.Popen(
        command(contender, args, place),
        cwd=place,
        env=environment(),
        stdout=(place / "output").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        process.wait(LIMIT_S)
    except BaseException:
        end_tree(process.pid)
        raise
    total_s = time.monotonic() - began
    starts = sorted(starts_of(contender, place))
    if process.returncode or len(starts) != args.trials:
        said = (place / "output").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"exit status {process.returncode}, {len(starts)} trials\n{said}")
    gaps = [later - earlier for earlier, later in pairwise(starts[PARALLEL:])]
    between_s = PARALLEL * sum(gaps) / len(gaps)
    first_s = starts[0] - began_wall
    return Run(contender, number + 1, args.trials, total_s, first_s, between_s, load)


def starts_of(contender: str, place: Path) -> list[float]:
    """When each trial began to train, in seconds since 1970."""
    if contender != "sweep":
        return [int(path.name) / 1e9 for path in (place / "stamps").iterdir()]
    found = []
    for path in place.glob("s/trial-*/events.jsonl"):
        first = json.loads(path.read_text().splitlines()[0])
        assert first["kind"] == "plan", first
        # Events have whole seconds: the file was made when the first was written.
        found.append(path.with_name("config.toml").stat().st_mtime)
    return found


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    rows = []
    for name, title in CONTENDERS.items():
        own = [run for run in series.runs if run.contender == name]
        rows.append(
            [
                title,
                spread([3600 * run.trials / run.total_s for run in own], 0),
                spread([run.first_s for run in own], 1),
                spread([run.between_s for run in own], 1),
            ]
        )
    each = [
        [
            str(r.round),
            CONTENDERS[r.contender],
            f"{3600 * r.trials / r.total_s:.0f}",
            f"{r.load:.1f}",
        ]
        for r in series.runs
    ]
    head = ["", "trials per hour", "first trial after s", "s between two starts"]
    flags = f"--rounds {args.rounds} --trials {args.trials} --epochs {args.epochs}"
    return [
        "# Trials per hour of a sweep",
        f"`python benchmarks/sweep.py {flags}`",
        series.place(),
        "Medians over the rounds (min .. max). Trials per hour are those of the whole command. "
        "Between two starts of the same process: the mean, without the first two trials.",
        table(head, rows),
        "Each run; other load on the machine makes all of them slower:",
        table(["round", "", "trials per hour", "load before"], each),
    ]


if __name__ == "__main__":
    sys.exit(main())
