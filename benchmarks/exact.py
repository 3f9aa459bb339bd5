"""What `exact = true` costs, compared with the default and with plain DistributedDataParallel.

    python benchmarks/exact.py [--rounds N] [--out FILE.md]

The MLP of 25 M parameters of programs/wide_digits.py, 32 samples a slot, on gloo workers of this
machine with one thread each: `fit` under torchrun with and without ``--exact``, and plain
DistributedDataParallel with as many backward passes.

- step: median over the steps of a run, from one to the next
- network: without a limit, and with so many Gbit/s for each worker (the loopback interface of a
  network namespace of the run's own, shaped by tc; needs root)
- sent: bytes that a worker sends in a step, in units of the gradient; counted on that
  interface (left out without root)
- memory: the highest resident memory of a worker
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

from series import PROGRAMS, Column, Series, import_all_once, parse, parser, run_to_end, torchrun

WAYS = {"default": "fit", "exact": "fit, exact", "plain": "plain DDP"}
# workers, slots, Gbit/s for each worker (0: no limit)
SHAPES = ((2, 4, 0), (3, 4, 0), (4, 4, 0), (2, 16, 0), (3, 16, 0), (2, 4, 1), (4, 4, 1))
MICRO_BATCH, SAMPLES = 32, 1437
STEPS, SKIP, LIMIT_S = 12, 3, 300.0
GRADIENT_BYTES = 4 * 25_217_510
COLUMNS = (
    Column("step ms", "step_s", 0, 1e3, has_ratio=True),
    Column("sent, gradients", "sent", 2),
    Column("memory MiB", "memory_bytes", 0, 2**-20),
)


def main() -> int:
    args = parse(parser(__doc__, rounds=3), WAYS)
    shapes = [shape for shape in SHAPES if shape[2] == 0 or os.geteuid() == 0]
    cases = {title(*shape): shape for shape in ([(3, 4, 0)] if args.quick else shapes)}
    series = Series(WAYS, base="default")
    import_all_once()
    series.measure(args, lambda way, case: measure(way, *cases[case]), [*cases])
    parts = [
        f"MLP of 25.2 M parameters, {MICRO_BATCH} samples a slot. Sent: by a worker in a step,"
        " start-up and the final checkpoint's votes included."
    ]
    for case in cases:
        parts += [f"## {case}", series.table(COLUMNS, case)]
    return series.publish("What exact = true costs", parts, args.out)


def title(workers: int, slots: int, gbit: int) -> str:
    return f"{workers} workers, {slots} slots" + (f", {gbit} Gbit/s for each worker" * bool(gbit))


def measure(way: str, workers: int, slots: int, gbit: int) -> Mapping[str, float]:
    """Trains about STEPS steps.

    Raises:
        RuntimeError: it failed.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    with tempfile.TemporaryDirectory(prefix="exact-") as name:
        folder = Path(name)
        script = plain(slots, folder) if way == "plain" else fit(slots, folder)
        command = [*torchrun(workers), *script, *(["--exact"] if way == "exact" else [])]
        apart = os.geteuid() == 0
        if apart:
            shaped = "ip link set lo up"
            if gbit:
                rate = f"{gbit * workers}gbit"
                shaped += f" && tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 200ms"
            counted = f'"$@" && cat /proc/net/dev > {folder}/net'
            command = ["unshare", "--net", "sh", "-c", f"{shaped} && {counted}", "sh", *command]
        run_to_end(command, folder / "log", LIMIT_S)
        at, memory_bytes = log(folder)
        found = {"memory_bytes": memory_bytes}
        found["step_s"] = median(after - before for before, after in pairwise(at[SKIP:]))
        if apart:
            found["sent"] = sent_bytes(folder / "net") / workers / len(at) / GRADIENT_BYTES
        return found


def fit(slots: int, folder: Path) -> list[str]:
    batch_size = slots * MICRO_BATCH
    return [
        *("-m", "raytrain_ddp.fit", "--name", "run", "--storage", str(folder)),
        *("--task", f"{PROGRAMS / 'wide_digits.py'}:WideDigits"),
        *("--epochs", str(epochs_of(batch_size))),
        *("--batch-size", str(batch_size), "--micro-batch", str(MICRO_BATCH)),
        *("--optim.lr", "0.02", "--eval.every-epochs", "0", "--checkpoint.every-epochs", "0"),
        *("--checkpoint.every-s", "0", "--log.every-steps", "1", "--log.no-tensorboard"),
    ]


def plain(slots: int, folder: Path) -> list[str]:
    batch_size = slots * MICRO_BATCH
    steps = -(-SAMPLES // batch_size) * epochs_of(batch_size)
    script = str(PROGRAMS / "plain_ddp.py")
    return [script, str(slots), str(MICRO_BATCH), str(steps), str(folder)]


def epochs_of(batch_size: int) -> int:
    return max(1, round(STEPS * batch_size / SAMPLES))


def log(folder: Path) -> tuple[list[float], float]:
    """(when each step was done, the most memory)."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    train = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    memory = max(record["timing"]["peak_memory_bytes"] for record in train)
    return [record["seconds"] for record in train], memory


def sent_bytes(path: Path) -> float:
    """By all, over the loopback interface."""
    (line,) = [line for line in path.read_text().splitlines() if line.strip().startswith("lo:")]
    return float(line.split(":")[1].split()[8])


if __name__ == "__main__":
    sys.exit(main())
