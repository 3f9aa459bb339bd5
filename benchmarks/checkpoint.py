"""What a checkpoint costs the training loop, in five ways to save.

    python benchmarks/checkpoint.py [--rounds N] [--only ours,torch-save] [--out FILE.md FILE.json]
    python benchmarks/checkpoint.py --quick

A multi-layer perceptron with AdamW (fused) trains on a few samples; its state, with AdamW's, is
three times its parameters in float32. Checkpoints are made one after another, each when the one
before is durable and some steps are done. Each round measures every way once, in a process of its
own, each time beginning with another one; a ratio is to torch.save in the same round.

- blocked: how long the call to save holds the loop up, with the wait for the commit before. For
  ours also the look for NaN. Median without the first one, which allocates.
- lost: how much longer the steps until durable took, the call included, than they do undisturbed.
- durable: from the call until all is on disk, after fsync. Ours has hashed each byte by then.
- extra memory: highest resident memory while training with checkpoints, less that before, in
  units of the state.
- restart: to load the newest checkpoint, and what is read for it. The files are in the page cache.

The loop has one thread, so that on two cores the background work has the other, as the CPU work
of a trainer that computes on a GPU has. With --threads 2 they compete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from series import HERE, Series, describe_machine, environment, in_turn, spread, table

WAYS = {
    "ours": "raytrain_ddp",
    "torch-save": "torch.save + fsync",
    "dcp-save": "DCP save",
    "dcp-async": "DCP async_save",
    "dcp-cached": "DCP async_save, memory kept",
}
BASE = "torch-save"
INTERVAL_S = 20.0  # the goal: blocked less than 1 % of it
LIMIT_S = 300
MILLION = 1_000_000


@dataclass(frozen=True)
class Run:
    """One measurement of one way, at one size."""

    way: str
    millions: int
    round: int
    load: float  # of the machine (1 minute) before
    found: dict[str, Any]


def main() -> int:
    args = parse()
    machine = describe_machine()
    del machine["bytecode"]
    series: Series[Run] = Series({**machine, "disk": written_at(args.folder)})
    for millions in args.millions:
        for number in range(args.rounds):
            for way in in_turn(args.only, number):
                measured = partial(measure, way, millions, number + 1, args)
                series.add(f"{millions} M, round {number + 1}, {way}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--millions", default="25,100", help="of parameters")
    parser.add_argument("--checkpoints", type=int, default=5, help="of a run; the first: apart")
    parser.add_argument("--idle-s", type=float, default=1.0, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="of the training loop")
    parser.add_argument("--only", default=",".join(WAYS), help="some of the ways")
    parser.add_argument("--folder", default="/tmp", help="on the disk that is written to")
    parser.add_argument("--quick", action="store_true", help="one round, 5 M parameters")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.millions, args.checkpoints, args.idle_s = 1, "5", 3, 0.3
    args.only = args.only.split(",")
    args.millions = [int(text) for text in args.millions.split(",")]
    unknown = [name for name in args.only if name not in WAYS]
    if unknown:
        parser.error(f"no way {', '.join(unknown)}; there are {', '.join(WAYS)}")
    if args.checkpoints < 2:
        parser.error("--checkpoints must be 2 or more: the first one is listed by itself")
    return args


def measure(way: str, millions: int, number: int, args: argparse.Namespace) -> Run:
    """One way in a process of its own.

    Raises:
        RuntimeError: it failed.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        given = {
            "way": way,
            "parameters": millions * MILLION,
            "checkpoints": args.checkpoints,
            "idle_s": args.idle_s,
            "threads": args.threads,
            "folder": folder,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "checkpoint_ways.py"), json.dumps(given)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stderr[-2000:]}")
    return Run(way, millions, number, load, json.loads(done.stdout.splitlines()[-1]))


def line(run: Run) -> str:
    found = run.found
    return (
        f"{run.millions:>4} M  round {run.round}  {run.way:<11}"
        f"  blocked {1e3 * found['blocked_s']:6.0f} ms  lost {1e3 * found['lost_s']:6.0f} ms"
        f"  durable {found['durable_s']:5.2f} s  extra {found['extra_states']:4.2f} states"
        f"  restart {found['load_s']:5.2f} s  load {run.load:.1f}"
    )


def written_at(folder: str) -> str:
    """The file system of `folder` and how fast it takes 256 MiB, with fsync."""

    kinds = {}
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split()
        kinds[place] = kind
    here = Path(folder).resolve()
    kind = next(kinds[str(p)] for p in [here, *here.parents] if str(p) in kinds)
    data = os.urandom(2**28)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        spent = time.perf_counter() - began
    free = shutil.disk_usage(folder).free / 2**30
    return f"{kind}, {2**28 / spent / 1e6:.0f} MB/s written with fsync, {free:.0f} GiB free"


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    runs = series.runs
    parts = [
        "# What a checkpoint costs the training loop",
        f"`python benchmarks/checkpoint.py --rounds {args.rounds} --millions "
        f"{','.join(map(str, args.millions))} --checkpoints {args.checkpoints} "
        f"--threads {args.threads}`",
        series.place(),
        "Medians over the rounds (min .. max); ratios to torch.save in the same round. AdamW's"
        " state is saved, too: 12 bytes a parameter. Ours and torch.save leave one durable file or"
        " none; only ours has a hash of each byte, and has verified it at restart.",
    ]
    for millions in args.millions:
        own = [run for run in runs if run.millions == millions]
        if own:
            state_mb = own[0].found["state_bytes"] / 1e6
            parts += [f"## {millions} M parameters, {state_mb:.0f} MB of state", loop_table(own)]
            parts += ["While the background writes, and at a restart:", other_table(own)]
    return parts


def loop_table(runs: Sequence[Run]) -> str:
    head = ["", "blocked ms", "ratio", f"of {INTERVAL_S:.0f} s", "first blocked ms", "lost ms"]
    head += ["ratio", "durable s", "ratio", "extra memory, states"]
    rows = []
    for way, title in WAYS.items():
        own = [run for run in runs if run.way == way]
        if own:
            shares = [f"{100 * run.found['blocked_s'] / INTERVAL_S:.2f}" for run in own]
            rows.append(
                [
                    title,
                    values(own, "blocked_s", 1e3, 0),
                    ratios(own, runs, "blocked_s"),
                    f"{max(shares, key=float)} % at most",
                    values(own, "first_blocked_s", 1e3, 0),
                    values(own, "lost_s", 1e3, 0),
                    ratios(own, runs, "lost_s"),
                    values(own, "durable_s", 1, 2),
                    ratios(own, runs, "durable_s"),
                    values(own, "extra_states", 1, 2),
                ]
            )
    return table(head, rows)


def other_table(runs: Sequence[Run]) -> str:
    head = ["", "step ms, p50", "p99", "undisturbed, p50", "p99", "restart s", "ratio"]
    head += ["read, states"]
    rows = []
    for way, title in WAYS.items():
        own = [run for run in runs if run.way == way]
        if own:
            rows.append(
                [
                    title,
                    values(own, "during_p50_s", 1e3, 0),
                    values(own, "during_p99_s", 1e3, 0),
                    values(own, "idle_p50_s", 1e3, 0),
                    values(own, "idle_p99_s", 1e3, 0),
                    values(own, "load_s", 1, 2),
                    ratios(own, runs, "load_s"),
                    values(own, "load_states", 1, 1),
                ]
            )
    return table(head, rows)


def values(own: Sequence[Run], key: str, scale: float, digits: int) -> str:
    return spread([scale * r.found[key] for r in own if r.found[key] is not None], digits)


def ratios(own: Sequence[Run], runs: Sequence[Run], key: str) -> str:
    base = {run.round: run.found[key] for run in runs if run.way == BASE}
    return spread([run.found[key] / base[run.round] for run in own if run.round in base], 2)


if __name__ == "__main__":
    sys.exit(main())
