"""What ddp.shard_optimizer saves and costs: beside DistributedDataParallel and torch's
ZeroRedundancyOptimizer.

    python benchmarks/shard_optimizer.py [--rounds N] [--out FILE.md FILE.json]
    python benchmarks/shard_optimizer.py --quick

An MLP of 24.5 M parameters with AdamW (8 bytes of state a parameter), on 3 gloo workers of this
machine, a thread each. Each round runs every way once, each time beginning with another way.

- state: bytes of the optimizer's tensors in a process, of the worker with the most
- step: median over the steps of a run, from one to the next
- whole state: until all of it is in the CPU memory of rank 0, as a checkpoint needs it
- peak memory: the highest resident memory of a worker, with the libraries; after that checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from series import (
    HERE,
    Series,
    describe_machine,
    import_all_once,
    in_turn,
    run_to_end,
    spread,
    table,
    torchrun,
)

WAYS = ("DDP", "ZeRO", "fit", "fit, shared")
NAMES = {
    "DDP": "plain DDP",
    "ZeRO": "DDP, ZeroRedundancyOptimizer",
    "fit": "fit",
    "fit, shared": "fit, ddp.shard_optimizer",
}
WORKERS, STEPS, LIMIT_S = 3, 40, 300.0


@dataclass(frozen=True)
class Run:
    """One run of one way."""

    way: str
    round: int
    load: float  # of the machine (1 minute) before
    state_bytes: list[int]  # by rank
    step_s: float
    whole_s: float
    peak_bytes: list[int]  # by rank


def main() -> int:
    args = parse()
    series: Series[Run] = Series(describe_machine())
    import_all_once()
    for number in range(args.rounds):
        for way in in_turn(WAYS, number):
            measured = partial(measure, way, number + 1)
            series.add(f"round {number + 1}, {way}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {NAMES[run.way]:<28}  state {max(run.state_bytes) / 1e6:5.0f} MB"
        f"  step {1e3 * run.step_s:5.0f} ms  whole state {run.whole_s:5.2f} s"
        f"  memory {max(run.peak_bytes) / 1e6:5.0f} MB"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    return args


def measure(way: str, number: int) -> Run:
    """Raises:
    RuntimeError: it failed.
    TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shares-") as name:
        script = str(HERE / "shard_optimizer_way.py")
        run_to_end([*torchrun(WORKERS), script, way, str(STEPS), name], LIMIT_S)
        notes = [Path(name) / f"rank-{rank}.json" for rank in range(WORKERS)]
        found: list[dict[str, Any]] = [json.loads(note.read_text()) for note in notes]
    return Run(
        way,
        number,
        load,
        state_bytes=[each["state_bytes"] for each in found],
        step_s=median(found[0]["step_s"]),
        whole_s=found[0]["whole_s"],
        peak_bytes=[each["peak_bytes"] for each in found],
    )


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    rows = []
    base = {run.round: run.step_s for run in series.runs if run.way == "DDP"}
    for way in WAYS:
        runs = [run for run in series.runs if run.way == way and run.round in base]
        if runs:
            state, peak = runs[0].state_bytes, [run.peak_bytes for run in runs]
            rows.append(
                [
                    NAMES[way],
                    ", ".join(f"{each / 1e6:.0f}" for each in state),
                    spread([1e3 * run.step_s for run in runs], 0),
                    spread([run.step_s / base[run.round] for run in runs], 2),
                    spread([run.whole_s for run in runs], 2),
                    f"{median(each[0] for each in peak) / 1e6:.0f}",
                    f"{median(max(each[1:]) for each in peak) / 1e6:.0f}",
                ]
            )
    head = ["", "state MB, by rank", "step ms", "ratio to plain DDP", "whole state on rank 0, s"]
    return [
        "# What ddp.shard_optimizer saves and costs",
        f"`python benchmarks/shard_optimizer.py --rounds {args.rounds}`",
        series.place(),
        "MLP of 24.5 M parameters, AdamW, 3 gloo workers on CPU, a thread each, 3 slots of 32 "
        "samples. Medians over the rounds (min .. max); ratios in the same round.",
        table([*head, "peak MB, rank 0", "peak MB, others"], rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
