"""Loading the same images with the same transform in many ways: speed, CPU time, start, memory.

    python benchmarks/data.py [--quick] [--rounds N] [--only a,b] [--out FILE.md FILE.json]

Each job (a loader, a start, a cost) runs in a fresh process of its own, one after another. Each
round runs every job once, each time beginning with another one; a ratio compares with the tight
decode loop, or with ImageFolder, of the same round, so a machine that is busy for a while disturbs
both sides. Two threads or two worker processes, one torch thread in each.

Needs the extra `bench`, which has the peers, and psutil (extra `test`). What is not installed or
does not run is named with its reason. JPEGs and their other forms are made once (--cache, about
2 GB); nothing is downloaded.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import data_report
import psutil
from data_measure import Size
from data_probe import JOBS
from series import describe_machine, end_tree, environment, warn_of_bytecode

HERE = Path(__file__).resolve().parent
LIMIT_S = 420
PEERS = ("webdataset", "mosaicml-streaming", "litdata", "datasets", "spdl")
CODECS = ("torchvision", "pillow", "simplejpeg", "pyarrow", "numpy")


@dataclass(frozen=True)
class Run:
    """One run of one job."""

    job: str
    round: int
    load: float  # of the machine (1 minute) before
    wall_s: float
    found: Mapping[str, Any]


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    machine = describe()
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    warn_of_bytecode(machine)
    folder = (args.cache / str(args.distinct)).resolve()
    made = [sys.executable, str(HERE / "data_images.py"), str(folder), str(args.distinct)]
    subprocess.run(made, check=True, env=job_environment(folder))
    jpegs = [file.stat().st_size for file in (folder / "images").glob("*/*.jpg")]
    machine["images"] = f"{len(jpegs)} JPEGs of {sum(jpegs) / len(jpegs) / 1000:.0f} KB on average"
    size = Size(str(folder), warm=4 if args.quick else 16, images=args.images)
    runs: list[Run] = []
    failed: list[tuple[str, str]] = []
    for number in range(args.rounds):
        turn = number * len(args.only) // args.rounds
        for job in args.only[turn:] + args.only[:turn]:
            if 0 < JOBS[job].rounds <= number:
                continue
            try:
                run = measure(job, number, size)
            except RuntimeError as error:
                failed.append((job, f"round {number + 1}: {error}"))
                print(f"round {number + 1}  {job}: {error}", file=sys.stderr, flush=True)
                continue
            runs.append(run)
            print(f"round {number + 1}  {job:<18}  {brief(run)}", flush=True)
    quick = " --quick" if args.quick else ""
    command = f"python benchmarks/data.py{quick} --rounds {args.rounds} --images {args.images}"
    report = data_report.as_markdown(command, machine, runs, failed)
    print("\n" + report)
    for path in args.out:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine, "failed": failed, "runs": [asdict(run) for run in runs]}
        path.write_text(json.dumps(content, indent=1) + "\n" if path.suffix == ".json" else report)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="300 images, one round: does it run?")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--images", type=int, help="loaded while it is measured; default 9000")
    parser.add_argument("--only", default=",".join(JOBS), help="some of the jobs")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build/bench-data")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.distinct = 300 if args.quick else 3000
    args.images = args.images or (640 if args.quick else 9000)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in JOBS]
    if unknown:
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    return args


def measure(job: str, number: int, size: Size) -> Run:
    """Runs a job in a process and session of its own, to their end.

    Raises:
        RuntimeError: it failed, with the last line that it said, or took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="data-", dir="/tmp") as place:
        asked, found, said = (Path(place) / name for name in ("asked.json", "found.json", "said"))
        asked.write_text(json.dumps(asdict(size)))
        began = time.monotonic()
        with said.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "data_probe.py"), job, str(asked), str(found)],
                cwd=place,
                env=job_environment(Path(size.folder)),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(LIMIT_S)
            except BaseException as error:
                end_tree(process.pid)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeError(f"it took longer than {LIMIT_S} s") from None
                raise
            finally:
                end_session(process.pid)
        wall_s = time.monotonic() - began
        if not found.exists():
            lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"exit status {process.returncode}: {lines[-1].strip()}")
        return Run(job, number + 1, load, wall_s, json.loads(found.read_text()))


def end_session(leader: int) -> None:
    """Ends what a job left behind: processes of its session, each by its own id."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if process.pid != os.getpid() and os.getsid(process.pid) == leader:
                end_tree(process.pid)


def job_environment(folder: Path) -> dict[str, str]:
    """As for launch.py; nothing is asked of the network, nothing written into the home folder."""
    return {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "HF_HOME": str(folder / "hf-home"),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache-home"),  # of tar files' indices
        "LITDATA_DISABLE_VERSION_CHECK": "1",
    }


def describe() -> dict[str, str]:
    found = []
    for name in (*CODECS, *PEERS):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return {**describe_machine(), "packages": ", ".join(found)}


def brief(run: Run) -> str:
    numbers = "  ".join(
        f"{name} {value:.4g}" for name, value in run.found.items() if isinstance(value, int | float)
    )
    return f"load {run.load:.1f}  {run.wall_s:.0f} s:  {numbers}"


if __name__ == "__main__":
    sys.exit(main())
