"""What `exact = true` costs: beside the default and plain DistributedDataParallel.

    python benchmarks/exact.py [--rounds N] [--out FILE.md FILE.json]
    python benchmarks/exact.py --quick

The MLP of 25 M parameters of network.py, 32 samples a slot, on gloo workers of this machine, a
thread each: `fit` under torchrun with and without ``--exact``, and plain DistributedDataParallel
with as many backward passes. Each round runs every way at every number of workers and slots once,
each time beginning with another way.

- step: median over the steps of a run, from one to the next
- network: without a limit, and with so many Gbit/s for each worker (the loopback interface of a
  network namespace of the run's own, shaped by tc; needs root)
- sent: bytes that a worker sends in a step, in units of the gradient; counted on that
  interface (left out without root)
- memory: the highest resident memory of a worker
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
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
    import_all_once,
    in_turn,
    run_to_end,
    spread,
    table,
    torchrun,
)

WAYS = {"default": [], "exact": ["--exact"], "plain": []}
NAMES = {"default": "fit", "exact": "fit, exact", "plain": "plain DDP"}
BASE = "default"
# workers, slots, Gbit/s for each worker (0: no limit)
SHAPES = ((2, 4, 0), (3, 4, 0), (4, 4, 0), (2, 16, 0), (3, 16, 0), (2, 4, 1), (4, 4, 1))
MICRO_BATCH, SAMPLES = 32, 1437
STEPS, SKIP, LIMIT_S = 12, 3, 300.0
GRADIENT_BYTES = 4 * 25_217_510


@dataclass(frozen=True)
class Run:
    """One run of one way. `sent` counts gradients; nan where it was not counted."""

    way: str
    workers: int
    slots: int
    gbit: int
    round: int
    load: float  # of the machine (1 minute) before
    step_s: float
    sent: float
    memory_bytes: int


def main() -> int:
    args = parse()
    series: Series[Run] = Series(describe_machine())
    import_all_once()
    for number in range(args.rounds):
        for workers, slots, gbit in args.shapes:
            for way in in_turn([*WAYS], number):
                measured = partial(measure, way, workers, slots, gbit, number + 1)
                series.add(f"round {number + 1}, {way}, {workers} workers", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.workers} workers  {run.slots:2} slots  {limit(run.gbit):<8}"
        f"  {NAMES[run.way]:<10}"
        f"  step {1e3 * run.step_s:6.0f} ms  sent {run.sent:5.2f} gradients"
        f"  memory {run.memory_bytes / 2**20:5.0f} MiB"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, 3 workers, 4 slots")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.shapes = [shape for shape in SHAPES if shape[2] == 0 or os.geteuid() == 0]
    if args.quick:
        args.rounds, args.shapes = 1, [(3, 4, 0)]
    return args


def limit(gbit: int) -> str:
    return f"{gbit} Gbit/s" if gbit else "free"


def measure(way: str, workers: int, slots: int, gbit: int, number: int) -> Run:
    """Trains about STEPS steps.

    Raises:
        RuntimeError: it failed.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="exact-") as name:
        folder = Path(name)
        script = plain(slots, folder) if way == "plain" else fit(slots, folder)
        command = [*torchrun(workers), *script, *WAYS[way]]
        apart = os.geteuid() == 0
        if apart:
            shaped = "ip link set lo up"
            if gbit:
                rate = f"{gbit * workers}gbit"
                shaped += f" && tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 200ms"
            counted = f'"$@" && cat /proc/net/dev > {folder}/net'
            command = ["unshare", "--net", "sh", "-c", f"{shaped} && {counted}", "sh", *command]
        run_to_end(command, LIMIT_S)
        found = stamps(folder) if way == "plain" else log(folder)
        sent = sent_bytes(folder / "net") if apart else float("nan")
        at, memory = found
        return Run(
            way,
            workers,
            slots,
            gbit,
            number,
            load,
            step_s=median(after - before for before, after in pairwise(at[SKIP:])),
            sent=sent / workers / len(at) / GRADIENT_BYTES,
            memory_bytes=memory,
        )


def fit(slots: int, folder: Path) -> list[str]:
    batch_size = slots * MICRO_BATCH
    epochs = max(1, round(STEPS * batch_size / SAMPLES))
    return [
        *("-m", "raytrain_ddp.fit", "--name", "run", "--storage", str(folder)),
        *("--task", f"{HERE / 'network_task.py'}:WideDigits", "--epochs", str(epochs)),
        *("--batch-size", str(batch_size), "--micro-batch", str(MICRO_BATCH)),
        *("--optim.lr", "0.02", "--eval.every-epochs", "0", "--checkpoint.every-epochs", "0"),
        *("--checkpoint.every-s", "0", "--log.every-steps", "1", "--log.no-tensorboard"),
    ]


def plain(slots: int, folder: Path) -> list[str]:
    batch_size = slots * MICRO_BATCH
    steps = -(-SAMPLES // batch_size) * max(1, round(STEPS * batch_size / SAMPLES))
    return [str(HERE / "exact_plain.py"), str(slots), str(MICRO_BATCH), str(steps), str(folder)]


def log(folder: Path) -> tuple[list[float], int]:
    """(when each step was done, the most memory)."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    train = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    memory = max(record["timing"]["peak_memory_bytes"] for record in train)
    return [record["seconds"] for record in train], memory


def stamps(folder: Path) -> tuple[list[float], int]:
    found = json.loads((folder / "plain.json").read_text(encoding="utf-8"))
    return found["at"], found["memory_bytes"]


def sent_bytes(path: Path) -> float:
    """By all, over the loopback interface."""
    (line,) = [line for line in path.read_text().splitlines() if line.strip().startswith("lo:")]
    return float(line.split(":")[1].split()[8])


def as_markdown(series: Series[Run], args: Any) -> list[str]:
    runs = series.runs
    rows = []
    for workers, slots, gbit in args.shapes:
        shape = (workers, slots, gbit)
        own = [run for run in runs if (run.workers, run.slots, run.gbit) == shape]
        base = {run.round: run for run in own if run.way == BASE}
        for way in WAYS:
            of_way = [run for run in own if run.way == way and run.round in base]
            if of_way:
                ratios = [run.step_s / base[run.round].step_s for run in of_way]
                rows.append(
                    [
                        workers,
                        slots,
                        limit(gbit),
                        NAMES[way],
                        spread([1e3 * run.step_s for run in of_way], 0),
                        spread(ratios, 2),
                        f"{median(run.sent for run in of_way):.2f}",
                        f"{median(run.memory_bytes for run in of_way) / 2**20:.0f}",
                    ]
                )
    head = [
        "workers",
        "slots",
        "network",
        "",
        "step ms",
        "ratio to fit",
        "sent, gradients",
        "memory MiB",
    ]
    return [
        "# What exact = true costs",
        f"`python benchmarks/exact.py --rounds {args.rounds}`",
        series.place(),
        f"MLP of 25.2 M parameters, {MICRO_BATCH} samples a slot. Medians over the rounds "
        "(min .. max); ratios in the same round. Sent: by a worker in a step, start-up and the "
        "final checkpoint's votes included.",
        table(head, rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
