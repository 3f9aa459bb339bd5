"""Rows of the table of errors: `run`, and a Ray that is not there."""

from __future__ import annotations

from refused import Row

SCRIPT = {"train.py": ""}
ROWS = [
    Row("run --num-workers 2 trian.py", 2, "'trian.py' 'train.py'", SCRIPT, light=True),
    Row("run torchrun --nproc-per-node 2 train.py", 2, "torchrun", SCRIPT, light=True),
    Row("run --num-workers 0 train.py", 2, "--num-workers", SCRIPT, light=True),
    Row("run --num-workers 999 train.py", 3, "1 CPU: want 999", SCRIPT, light=True),
    Row("--address ray://127.0.0.1:9", 3, "ray://127.0.0.1:9 --address"),
    Row("--scaling.cpus-per-worker many", 2, "scaling.cpus-per-worker", light=True),
]
