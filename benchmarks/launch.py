"""Launches the same training in seven ways: seconds to the first step, per step, and in total.

    python benchmarks/launch.py [--rounds N] [--only by-hand,fit-standing] [--out FILE.md]

What is trained is in programs/workload.py: an MLP of 24 M parameters on made-up samples, two gloo
workers with one thread each, SGD with momentum, one epoch, a checkpoint at its end.

Ray runs its workers at niceness 15, torchrun at 0: other load on the machine slows the former more.
Compare on a quiet machine; "fit under torchrun" shows best what the loop itself costs.

A standing Ray is started before each contender that needs one, with a port and folder of its own,
and ended process by process after it: no other Ray on this machine is touched. Needs psutil.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from series import (
    PROGRAMS,
    Column,
    Series,
    end_session,
    fit_flags,
    free_port,
    import_all_once,
    parse,
    parser,
    run_to_end,
    start,
    torchrun,
)

WORKERS = 2
LIMIT_S = 300
SKIPPED_STEPS = 5  # of the steady step time: the first ones allocate and lay buckets anew
CONTENDERS = {
    "by-hand": "hand-written DDP, torchrun",
    "fit-torchrun": "fit under torchrun",
    "fit-fresh": "fit, embedded Ray",
    "fit-standing": "fit, standing Ray, its first job",
    "fit-again-standing": "fit, standing Ray, its second job",
    "naive-fresh": "naive TorchTrainer, fresh Ray",
    "naive-standing": "naive TorchTrainer, standing Ray",
}
COLUMNS = (
    Column("first step after s", "first_step_s", 1, has_ratio=True),
    Column("step ms", "step_s", 0, 1e3, has_ratio=True),
    Column("total s", "total_s", 1, has_ratio=True),
)


def main() -> int:
    flags = parser(__doc__, rounds=5)
    flags.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    args = parse(flags, CONTENDERS)
    if args.quick:
        args.steps = SKIPPED_STEPS + 2
    series = Series(CONTENDERS, base="by-hand")
    import_all_once()
    series.measure(args, partial(measure, args))
    title = "Launching the same training in several ways"
    return series.publish(title, [series.table(COLUMNS)], args.out)


def measure(args: argparse.Namespace, contender: str, _: str) -> Mapping[str, float]:
    """Runs a contender in a folder of its own, with the Ray that it needs."""
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp") as name:
        folder = Path(name)
        with standing_ray(folder, contender) as address:
            if contender == "fit-again-standing":
                (folder / "first").mkdir()
                run("fit-standing", SKIPPED_STEPS + 2, address, folder / "first")
            return run(contender, args.steps, address, folder)


def run(contender: str, steps: int, address: str, folder: Path) -> Mapping[str, float]:
    """Runs a contender to its end.

    Raises:
        RuntimeError: it failed, or did not do its steps.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    stamps, began = folder / "stamps", time.monotonic()
    run_to_end(command(contender, steps, address, folder), folder / "log", LIMIT_S)
    total_s = time.monotonic() - began
    marks = [line.split() for line in stamps.read_text(encoding="ascii").splitlines()]
    done = [float(at) for at, _, name, *rank in marks if name == "step" and rank == ["0"]][-steps:]
    if len(done) < steps:
        raise RuntimeError(f"{len(done)} of {steps} steps")
    step_s = median(after - before for before, after in pairwise(done[SKIPPED_STEPS:]))
    return {"first_step_s": done[0] - began, "step_s": step_s, "total_s": total_s}


def command(contender: str, steps: int, address: str, folder: Path) -> list[str]:
    python, stamps = sys.executable, folder / "stamps"
    common = ["--steps", str(steps), "--every", str(steps), "--storage", str(folder)]
    common += ["--stamps", str(stamps)]
    fit = fit_flags(steps, stamps, folder / "runs")
    naive = [python, str(PROGRAMS / "naive_ray.py"), *common]
    return {
        "by-hand": [*torchrun(WORKERS), str(PROGRAMS / "by_hand.py"), *common],
        "fit-torchrun": [*torchrun(WORKERS), *fit],
        "fit-fresh": [python, *fit],
        "fit-standing": [python, *fit, "--address", address],
        "fit-again-standing": [python, *fit, "--address", address],
        "naive-fresh": naive,
        "naive-standing": [*naive, "--address", address],
    }[contender]


@contextmanager
def standing_ray(folder: Path, contender: str) -> Iterator[str]:
    """The address of a Ray that idles, for this contender only; "" if it wants none.

    Even an idle Ray on the machine makes the start of another one seconds slower.
    """
    if not contender.endswith("standing"):
        yield ""
        return
    address, log = f"127.0.0.1:{free_port()}", folder / "ray.log"
    flags = ["--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2]]
    flags += ["--ray-client-server-port", str(free_port()), "--num-cpus", str(WORKERS)]
    flags += ["--include-dashboard", "false", "--temp-dir", str(folder / "ray")]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    process = start([*ray, *flags, "--disable-usage-stats"], log)
    try:
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if process.poll() is not None:
                raise RuntimeError(f"the standing Ray at {address} ended")
            time.sleep(0.2)
        time.sleep(10)  # its own workers come up behind it
        yield address
    finally:
        end_session(process.pid)


if __name__ == "__main__":
    sys.exit(main())
