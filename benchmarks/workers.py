"""Real workers on one machine, up to 32: their start, steps, memory, a kill, and the same weights.

    python benchmarks/workers.py [--workers 2,4,8,16,32] [--out FILE.md FILE.json]
    python benchmarks/workers.py --quick

`fit digits --exact` on an embedded Ray, with a batch of 64 in 32 slots for any number of workers.
After half of the steps, one worker is killed (SIGKILL). More workers than cores take turns, so the
step time says what is added by each worker, not what a cluster takes. Needs psutil.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from series import HERE, Series, describe_machine, end_tree, environment, import_all_once, table

ALL = (2, 4, 8, 16, 32)
EPOCHS, STEPS = 8, 184  # 23 an epoch
LIMIT_S = 900.0
POLL_S = 0.02
WORKER = "ray::RayTrainWorker"  # the title that Ray gives to a worker's process
FLAGS = "--batch-size 64 --micro-batch 2 --exact --log.every-steps 1 --scaling.cpus-per-worker 0.05"


@dataclass(frozen=True)
class Run:
    """One run with that many workers.

    Args:
        load: of the machine (1 minute) before.
        first_step_s: from the command to the first optimizer step.
        step_s: median before the kill. after_kill_s: to the next step.
        repeated: steps. starts: of all workers, with the first.
        worker_bytes: proportional set size (PSS) of a worker, median. all_bytes: of all processes.
        driver_share: of a core that the driver's process takes while it trains.
        weights: SHA-256 of model.safetensors.
    """

    workers: int
    load: float
    first_step_s: float
    step_s: float
    after_kill_s: float
    repeated: int
    starts: int
    worker_bytes: int
    all_bytes: int
    driver_share: float
    weights: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default=",".join(map(str, ALL)))
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    series: Series[Run] = Series(describe_machine())
    import_all_once()
    for workers in ALL[:1] if args.quick else [int(number) for number in args.workers.split(",")]:
        with tempfile.TemporaryDirectory(prefix="workers-", dir="/tmp") as folder:
            series.add(f"{workers} workers", partial(measure, workers, Path(folder)), line)
    status = series.publish(as_markdown(series), args.out)
    return status or int(len({run.weights for run in series.runs}) != 1)


def measure(workers: int, folder: Path) -> Run:
    """Raises RuntimeError if the run fails, or does not end."""
    load, began = os.getloadavg()[0], time.monotonic()
    fit = [sys.executable, "-m", "raytrain_ddp.fit", "digits", "--name", "run", *FLAGS.split()]
    fit += ["--scaling.num-workers", str(workers), "--epochs", str(EPOCHS)]
    run = folder / "runs" / "run"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            fit,
            cwd=folder,
            env={**environment(), "PYTHONPATH": str(HERE.parent)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(1, run, process, began)
        first_step_s = time.monotonic() - began
        wait_for(STEPS // 4, run, process, began)
        driver = psutil.Process(process.pid)
        used_s, since = sum(driver.cpu_times()[:2]), time.monotonic()
        wait_for(STEPS // 2, run, process, began)
        share = (sum(driver.cpu_times()[:2]) - used_s) / (time.monotonic() - since)
        sizes, victims = memory_of(driver)
        at = steps_of(run)
        before, killed = len(at), time.monotonic()
        victims[-1].kill()
        wait_for_loss(run, process, began)
        wait_for(len(steps_of(run)) + 1, run, process, began)
        after_kill_s = time.monotonic() - killed
        wait_for(None, run, process, began)
    finally:
        end_tree(process.pid)
    if process.returncode:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    records = steps_of(run)
    [*_, newest] = sorted((run / "checkpoints").iterdir())
    return Run(
        workers,
        load,
        first_step_s,
        median(each["timing"]["step_s"] for each in records[3:before]),
        after_kill_s,
        repeated=len(records) - STEPS,
        starts=sum("replaced" not in plan for plan in plans_of(run)),
        worker_bytes=int(median(sizes[each.pid] for each in victims)),
        all_bytes=sum(sizes.values()),
        driver_share=share,
        weights=hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest(),
    )


def wait_for(steps: int | None, run: Path, process: Any, began: float) -> None:
    """Until so many steps are logged; None: until the process has ended."""
    while process.poll() is None and (steps is None or len(steps_of(run)) < steps):
        if time.monotonic() - began > LIMIT_S:
            raise RuntimeError(f"no {steps} steps in {LIMIT_S:.0f} s")
        time.sleep(POLL_S)
    if steps is not None and process.returncode is not None:
        raise RuntimeError(f"it ended with {process.returncode} before step {steps}")


def wait_for_loss(run: Path, process: Any, began: float) -> None:
    """Until the others have left the step in which the worker died, and prepare to go on."""
    while not any("replaced" in each for each in plans_of(run)):
        if process.poll() is not None or time.monotonic() - began > LIMIT_S:
            raise RuntimeError(f"nothing went on; exit status {process.returncode}")
        time.sleep(POLL_S)


def plans_of(run: Path) -> list[dict[str, Any]]:
    return [each for each in lines_of(run / "events.jsonl") if each["kind"] == "plan"]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [each for each in lines_of(run / "metrics.jsonl") if each["kind"] == "train"]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def memory_of(driver: psutil.Process) -> tuple[dict[int, int], list[psutil.Process]]:
    """PSS in bytes by pid, of all processes of the run; and the workers."""
    sizes, workers = {}, []
    for process in [driver, *driver.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sizes[process.pid] = process.memory_full_info().pss
            if " ".join(process.cmdline()).startswith(WORKER):
                workers.append(process)
    if not workers:
        raise RuntimeError("no process has the title of a worker")
    return sizes, workers


def line(run: Run) -> str:
    return f"{run.workers} workers: " + ", ".join(row(run)[1:]) + f", weights {run.weights[:16]}"


def row(run: Run) -> tuple[str, ...]:
    return (
        str(run.workers),
        f"{run.first_step_s:.0f} s",
        f"{1e3 * run.step_s:.0f} ms",
        f"{run.worker_bytes / 2**20:.0f} MiB",
        f"{run.all_bytes / 2**30:.1f} GiB",
        f"{run.driver_share:.1%}",
        f"{run.after_kill_s:.1f} s",
        str(run.repeated),
        str(run.starts),
    )


def as_markdown(series: Series[Run]) -> Sequence[str]:
    head = ("workers", "first step", "a step", "a worker (PSS)", "all processes", "driver, a core")
    head += ("killed: next step after", "repeated steps", "starts")
    weights = {run.weights for run in series.runs}
    same = "All runs have the same weights, byte for byte." if len(weights) == 1 else "THEY DIFFER."
    return [
        "# Real workers on one machine",
        f"`python benchmarks/workers.py`: the digits, `{FLAGS}`, {STEPS} steps. More workers than "
        "cores take turns.",
        series.place(),
        table(head, [row(run) for run in series.runs]),
        same,
    ]


if __name__ == "__main__":
    sys.exit(main())
