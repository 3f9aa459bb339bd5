"""What a checkpoint costs the training loop, in five ways to save.

    python benchmarks/checkpoint.py [--rounds N] [--only ours,torch-save] [--out FILE.md]

A multi-layer perceptron with AdamW (fused) trains on a few samples; its state, with AdamW's, is
three times its parameters in float32. Checkpoints are made one after another, each when the one
before is durable and some steps are done. Each way runs in a process of its own.

- blocked: how long the call to save holds the loop up, with the wait for the commit before. For
  ours also the look for NaN. Median without the first one, which allocates.
- lost: how much longer the steps until durable took, the call included, than they do undisturbed.
- durable: from the call until all is on disk, after fsync. Ours has hashed each byte by then.
- restart: to load the newest checkpoint, whose files are in the page cache.
- extra memory: highest resident memory while training with checkpoints, less that before, in
  units of the state.

The loop has one thread, so that on two cores the background work has the other, as the CPU work
of a trainer that computes on a GPU has. With --threads 2 they compete.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from series import HERE, Column, Series, parse, parser, run_to_end

WAYS = {
    "ours": "raytrain_ddp",
    "torch-save": "torch.save + fsync",
    "dcp-save": "DCP save",
    "dcp-async": "DCP async_save",
    "dcp-cached": "DCP async_save, memory kept",
}
COLUMNS = (
    Column("blocked ms", "blocked_s", 0, 1e3, has_ratio=True),
    Column("first blocked ms", "first_blocked_s", 0, 1e3),
    Column("lost ms", "lost_s", 0, 1e3, has_ratio=True),
    Column("durable s", "durable_s", 2, has_ratio=True),
    Column("restart s", "load_s", 2, has_ratio=True),
    Column("extra memory, states", "extra_states", 2),
)
LIMIT_S = 300


def main() -> int:
    flags = parser(__doc__, rounds=3)
    flags.add_argument("--millions", default="25,100", help="of parameters")
    flags.add_argument(
        "--checkpoints",
        type=int,
        default=5,
        help="checkpoints of a run; the first is listed by itself",
    )
    flags.add_argument("--threads", type=int, default=1, help="torch threads of the training loop")
    args = parse(flags, WAYS)
    if args.quick:
        args.millions, args.checkpoints = "5", 3
    if args.checkpoints < 2:
        flags.error("--checkpoints must be 2 or more: the first one is listed by itself")
    series = Series(WAYS, base="torch-save")
    sizes = args.millions.split(",")
    series.measure(args, partial(measure, args), sizes)
    parts = [
        "12 bytes of state a parameter. Only ours has a hash of each byte, checked at restart."
    ]
    for millions in sizes:
        parts += [f"## {millions} M parameters, {12 * int(millions)} MB of state"]
        parts += [series.table(COLUMNS, millions)]
    return series.publish("What a checkpoint costs the training loop", parts, args.out)


def measure(args: argparse.Namespace, way: str, millions: str) -> Mapping[str, float]:
    """One way in a process of its own.

    Raises:
        RuntimeError: it failed.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir="/tmp") as name:
        folder = Path(name)
        given = {
            "way": way,
            "parameters": int(millions) * 10**6,
            "checkpoints": args.checkpoints,
            "idle_s": 0.3 if args.quick else 1.0,
            "threads": args.threads,
            "folder": str(folder / "checkpoints"),
        }
        (folder / "checkpoints").mkdir()
        command = [sys.executable, str(HERE / "checkpoint_ways.py"), json.dumps(given)]
        run_to_end(command, folder / "log", LIMIT_S)
        found = json.loads((folder / "log").read_text().splitlines()[-1])
        return {column.key: found[column.key] for column in COLUMNS}


if __name__ == "__main__":
    sys.exit(main())
