"""A step of 25 M parameters on two hosts, by network and by what `fit` has against slow ones.

    python benchmarks/network.py [--rounds N] [--lab LAB.SH] [--out FILE.md FILE.json]
    python benchmarks/network.py --quick                         1 Gbit/s alone, one round

Needs Linux, root and psutil. The hosts are two network namespaces of this machine (tests/lab); each
runs ``torchrun -m raytrain_ddp.fit``, a worker with one thread, over gloo.
Each round runs every way at every speed once, each time beginning with another way.

- step: median over the steps of a run, from the log of rank 0
- communication: the share of the step that a worker would not need if it were alone, the arithmetic
  of compression included; measured by two such at once, one on each host, which send nothing
- loss: of the evaluation after the same number of steps; the network has no part in it
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from series import (
    HERE,
    Series,
    describe_machine,
    end_tree,
    import_all_once,
    in_turn,
    spread,
    table,
)

HOSTS = ("one", "two")
PORT = 29500
LIMIT_S = 600.0
SKIP = 2  # first steps
SAMPLES = 64  # of one worker and step
SPEEDS = {"full": "", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
WAYS = {
    "default": ("DDP's default", []),
    "buckets": ("buckets of 100 MiB", ["--ddp.bucket-cap-mb", "100"]),
    "bf16": ("bf16", ["--ddp.compression", "bf16"]),
}
BASE = "default"


@dataclass(frozen=True)
class Run:
    """One run of one way. `checkpoint_s` is what its one checkpoint took from the training."""

    way: str
    speed: str
    round: int
    load: float  # of the machine (1 minute) before
    steps: int
    step_s: float
    alone_s: float  # a step without communication, in the same round
    loss: float
    checkpoint_s: float


def main() -> int:
    args = parse()
    series: Series[Run] = Series(describe_machine())
    import_all_once()
    with lab(args.lab) as hosts:
        for number in range(args.rounds):
            alone_s = hosts.alone(f"{number}-alone")
            print(f"round {number + 1}  without communication {1e3 * alone_s:.0f} ms", flush=True)
            for speed in args.speeds:
                hosts.limit(SPEEDS[speed])
                for way in in_turn(args.only, number):
                    measured = partial(measure, hosts, way, speed, number + 1, alone_s)
                    series.add(f"round {number + 1}, {way}, {speed}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.speed:<10}  {run.way:<9}  step {1e3 * run.step_s:5.0f} ms"
        f"  loss {run.loss:.4f}  checkpoint {run.checkpoint_s:.2f} s  load {run.load:.1f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lab", type=Path, default=HERE.parent / "tests" / "lab" / "lab.sh")
    parser.add_argument("--only", default=",".join(WAYS), help="some of the ways")
    parser.add_argument("--speeds", default=",".join(SPEEDS), help="some of the speeds")
    parser.add_argument("--quick", action="store_true", help="1 Gbit/s alone, one round")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.only, args.speeds = args.only.split(","), args.speeds.split(",")
    if args.quick:
        args.rounds, args.speeds = 1, ["1 Gbit/s"]
    for name, known in (("only", WAYS), ("speeds", SPEEDS)):
        unknown = [each for each in getattr(args, name) if each not in known]
        if unknown:
            parser.error(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
    if not args.lab.exists() or os.geteuid() != 0:
        parser.error(f"needs root and {args.lab}")
    return args


class Hosts:
    """Two hosts that see this repository, this Python and `folder`."""

    def __init__(self, script: Path, folder: Path) -> None:
        name = f"network{os.getpid()}"
        self._script, self.folder = script, folder
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self._environment = {
            **os.environ,
            "NETLAB_NAME": name,
            "NETLAB_DIR": f"/var/tmp/{name}",
            "NETLAB_NET": "10.78.0",
            "PATH": path,
        }

    def do(self, *words: str) -> str:
        """Raises RuntimeError with what the script said, if it failed."""
        done = subprocess.run(
            [str(self._script), *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self._script.name} {' '.join(words)}: {done.stderr}")
        return done.stdout

    def up(self) -> None:
        shared = {Path(sys.prefix), Path(sys.base_prefix), HERE.parent, self.folder}
        self.do("up", *(word for path in shared for word in ("-s", str(path))), *HOSTS)
        self._address = self.do("ip", HOSTS[0]).strip()

    def limit(self, rate: str) -> None:
        for host in HOSTS:
            self.do(*(("slow", host, rate) if rate else ("fast", host)))

    def alone(self, name: str) -> float:
        """Median seconds of a step without communication: a worker on each host, both at once."""
        folders = [self.folder / f"{name}-{host}" for host in HOSTS]
        started = [
            self._start(host, [sys.executable, *fit(folder, SAMPLES, 1), "--local"])
            for host, folder in zip(HOSTS, folders, strict=True)
        ]
        wait(started)
        return median(step_s(folder) for folder in folders)

    def together(self, name: str, epochs: int, flags: Sequence[str]) -> tuple[Path, str]:
        """Trains with both as the workers of one run; its folder, and what rank 0 printed."""
        folder = self.folder / name
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(HOSTS)}"]
        torchrun += [f"--master-addr={self._address}", f"--master-port={PORT}"]
        train = [*fit(folder, SAMPLES * len(HOSTS), epochs), *flags]
        started = [
            self._start(host, [*torchrun, f"--node-rank={rank}", *train])
            for rank, host in enumerate(HOSTS)
        ]
        return folder, wait(started)

    def _start(self, host: str, command: Sequence[str]) -> subprocess.Popen[str]:
        words = [f"PYTHONPATH={HERE.parent}", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"]
        return subprocess.Popen(
            [str(self._script), "exec", host, "env", *words, *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def lab(script: Path) -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="network-", dir="/var/tmp") as folder:
        hosts = Hosts(script, Path(folder))
        try:
            hosts.up()
            yield hosts
        finally:
            hosts.do("down")


def fit(folder: Path, batch_size: int, epochs: int) -> list[str]:
    command = ["-m", "raytrain_ddp.fit"]
    command += ["--name", folder.name, "--storage", str(folder.parent)]
    command += ["--task", f"{HERE / 'network_task.py'}:WideDigits"]
    command += ["--batch-size", str(batch_size), "--micro-batch", str(SAMPLES)]
    command += ["--epochs", str(epochs), "--optim.lr", "0.02", "--schedule.warmup-epochs", "0"]
    command += ["--eval.every-epochs", "0", "--checkpoint.every-epochs", "0"]
    command += ["--checkpoint.every-s", "0", "--log.every-steps", "1", "--log.no-tensorboard"]
    return command


def wait(started: Sequence[subprocess.Popen[str]]) -> str:
    """What the first printed. Raises RuntimeError with what all did, unless they end well."""
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    except subprocess.TimeoutExpired as expired:
        raise RuntimeError(f"no end after {LIMIT_S:.0f} s") from expired
    finally:
        for process in started:
            end_tree(process.pid)
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(text[-3000:] for text in printed))
    return printed[0]


def measure(hosts: Hosts, way: str, speed: str, number: int, alone_s: float) -> Run:
    """Trains for an epoch; without a limit for three, so that the loss tells something."""
    load = os.getloadavg()[0]
    _, flags = WAYS[way]
    name = f"{number}-{way}-{SPEEDS[speed]}"
    folder, printed = hosts.together(name, 1 if SPEEDS[speed] else 3, flags)
    stalled = re.search(r"checkpoints ([\d.]+) s", printed)
    assert stalled is not None, printed
    return Run(
        way,
        speed,
        number,
        load,
        steps=len(records(folder, "train")),
        step_s=step_s(folder),
        alone_s=alone_s,
        loss=records(folder, "eval")[-1]["metrics"]["loss"],
        checkpoint_s=float(stalled[1]),
    )


def records(folder: Path, kind: str) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def step_s(folder: Path) -> float:
    """Median seconds from one step to the next."""
    seconds = [record["seconds"] for record in records(folder, "train")]
    return median(after - before for before, after in pairwise(seconds[SKIP:]))


def as_markdown(series: Series[Run], args: Any) -> list[str]:
    runs = series.runs
    alone = sorted({run.alone_s for run in runs}) or [0.0]
    parts = [
        "# A step on two hosts, by network",
        f"`python benchmarks/network.py --rounds {args.rounds}`",
        series.place(),
        f"MLP of 25.2 M parameters, two workers, {SAMPLES} samples each; without communication a "
        f"step takes {spread([1e3 * value for value in alone], 0)} ms. Medians over the rounds "
        "(min .. max); ratios to DDP's default in the same round.",
    ]
    for speed in SPEEDS:
        own = [run for run in runs if run.speed == speed]
        if own:
            rows = [row(way, own) for way in WAYS if any(run.way == way for run in own)]
            title = f"loss after {own[0].steps} steps"
            head = ["", "step ms", "ratio", "communication", title, "checkpoint s"]
            parts += [f"## {speed}", table(head, rows)]
    return parts


def row(way: str, runs: Sequence[Run]) -> list[str]:
    base = {run.round: run.step_s for run in runs if run.way == BASE}
    own = [run for run in runs if run.way == way]
    return [
        WAYS[way][0],
        spread([1e3 * run.step_s for run in own], 0),
        spread([run.step_s / base[run.round] for run in own if run.round in base], 2),
        f"{median(1 - run.alone_s / run.step_s for run in own):.0%}",
        spread([run.loss for run in own], 3),
        spread([run.checkpoint_s for run in own], 2),
    ]


if __name__ == "__main__":
    sys.exit(main())
