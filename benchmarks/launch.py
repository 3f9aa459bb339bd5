"""Launching the same training in six ways: seconds to the first step, of a step, in all.

    python benchmarks/launch.py [--rounds N] [--only by-hand,fit-standing] [--out FILE.md FILE.json]

Each round runs every contender once, each time beginning with another one; a ratio compares with
the hand-written loop of the same round, so a machine that is busy for a while disturbs both sides.
The workload is in launch_programs/workload.py: a 24 M-parameter MLP on made-up samples, two gloo
workers with one thread each, SGD with momentum, one epoch, a checkpoint at its end.

Ray runs its workers at niceness 15, torchrun at 0: other load on the machine slows the former more.
Compare on a quiet one; whether the loop itself costs anything, "fit under torchrun" tells best.

A standing Ray is started before each contender that wants one, with a port and folder of its own,
left to settle, and ended process by process after it: no other Ray on this machine is touched, and
none idles beside the other contenders. Needs psutil (extra `test`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "launch_programs"
WORKERS = 2
LIMIT_S = 300
# Ray's own default for an embedded Ray. A standing one has it, too, once ~/.ray/auth_token exists,
# but attaching by HOST:PORT then needs to be told so.
RAY_AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
SKIPPED_STEPS = 5  # of the steady step time: the first ones allocate and lay buckets anew
BYTECODE = ("torch", "ray", "numpy")  # what takes longest to compile
FITS_LINE = re.compile(r"^ *(?:[\d.]+ s|\d+m\d\ds)  (?P<name>\S.*)$")
CONTENDERS = {
    "by-hand": "hand-written DDP, torchrun",
    "fit-torchrun": "fit under torchrun",
    "fit-fresh": "fit, embedded Ray",
    "fit-standing": "fit, standing Ray",
    "naive-fresh": "naive TorchTrainer, fresh Ray",
    "naive-standing": "naive TorchTrainer, standing Ray",
}


@dataclass(frozen=True)
class Run:
    """One run of one contender."""

    contender: str
    round: int
    first_step_s: float  # from the command to the end of the first optimizer step
    step_s: float  # median of the steps behind the first few
    total_s: float  # from the command to its exit
    load: float  # of the machine (1 minute) before
    phases_s: dict[str, float] = field(default_factory=dict)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    machine = describe_machine()
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    warn_of_bytecode(machine)
    runs: list[Run] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp") as folder:
        import_all_once()
        for number in range(args.rounds):
            turn = number % len(args.only)
            for contender in args.only[turn:] + args.only[:turn]:
                place = Path(folder) / f"{number}-{contender}"
                place.mkdir()
                try:
                    with standing_ray(place, contender) as address:
                        run = measure(contender, number, args.steps, address, place)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed.append(f"round {number + 1}, {contender}: {error}")
                    print(failed[-1], file=sys.stderr, flush=True)
                    continue
                finally:
                    shutil.rmtree(place, ignore_errors=True)
                runs.append(run)
                print(
                    f"round {number + 1}  {contender:<14}  first step {run.first_step_s:6.1f} s"
                    f"  step {1e3 * run.step_s:6.1f} ms  total {run.total_s:6.1f} s"
                    f"  load {run.load:.1f}",
                    flush=True,
                )
    report = as_markdown(machine, runs, failed, args)
    publish(report, machine, runs, failed, args.out)
    return 1 if failed else 0


def publish(
    report: str,
    machine: Mapping[str, str],
    runs: Sequence[Any],
    failed: Sequence[str],
    paths: Sequence[Path],
) -> None:
    """Prints a report and writes it to each path; to ``*.json`` every run instead (dataclasses)."""
    print("\n" + report)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        records = {"machine": machine, "failed": failed, "runs": [asdict(run) for run in runs]}
        path.write_text(json.dumps(records, indent=1) + "\n" if path.suffix == ".json" else report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in CONTENDERS]
    if unknown:
        parser.error(f"no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    if args.steps < SKIPPED_STEPS + 2:
        parser.error(f"--steps must be {SKIPPED_STEPS + 2} or more")
    return args


def command(contender: str, steps: int, address: str, folder: Path) -> list[str]:
    """The command line of a contender; it stamps its steps into `folder`/stamps."""
    python, stamps = sys.executable, str(folder / "stamps")
    common = ["--steps", str(steps), "--stamps", stamps]
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}"]
    torchrun += ["--master-port", str(free_port())]
    task = f"{HERE / 'launch_task.py'}:LaunchTask"
    fit = ["-m", "raytrain_ddp.fit", "--name", "launch", "--storage", str(folder / "runs")]
    fit += ["--task", task, "--task-options", "stamps", stamps, "steps", str(steps)]
    fit += ["--epochs", "1", "--batch-size", "64", "--micro-batch", "32"]
    fit += ["--optim.lr", "0.01", "--optim.no-nesterov", "--optim.weight-decay", "0"]
    fit += ["--schedule.name", "constant", "--schedule.warmup-epochs", "0"]
    naive = [python, str(PROGRAMS / "naive_ray.py"), *common, "--storage", str(folder)]
    return {
        "by-hand": [
            *torchrun,
            str(PROGRAMS / "by_hand.py"),
            *common,
            "--checkpoint",
            str(folder / "checkpoint.pt"),
        ],
        "fit-torchrun": [*torchrun, *fit],
        "fit-fresh": [python, *fit],
        "fit-standing": [python, *fit, "--address", address],
        "naive-fresh": naive,
        "naive-standing": [*naive, "--address", address],
    }[contender]


def measure(contender: str, number: int, steps: int, address: str, folder: Path) -> Run:
    """Runs a contender to its end.

    Raises:
        RuntimeError: it failed, or did not do its steps.
        TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    began = time.monotonic()
    process = subprocess.Popen(
        command(contender, steps, address, folder),
        cwd=HERE.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=read_lines, args=(process, lines), daemon=True)
    reader.start()
    try:
        process.wait(LIMIT_S)
    except BaseException:
        end_tree(process.pid)
        raise
    total_s = time.monotonic() - began
    reader.join(5)
    path = folder / "stamps"
    stamps = [float(line) for line in path.read_text().split()] if path.exists() else []
    if process.returncode or len(stamps) != steps:
        said = "".join(line for _, line in lines[-30:])
        raise RuntimeError(f"exit status {process.returncode}, {len(stamps)} steps\n{said}")
    later = stamps[SKIPPED_STEPS:]
    return Run(
        contender,
        number + 1,
        first_step_s=stamps[0] - began,
        step_s=median(b - a for a, b in pairwise(later)),
        total_s=total_s,
        load=load,
        phases_s=phases(began, stamps[0], lines) if contender.startswith("fit") else {},
    )


def read_lines(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic(), line))


def phases(began: float, first_step: float, lines: list[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each phase up to the first step: the names that fit prints, when they came."""
    starts = [(began, "until the first line (Python, config)")]
    for at, line in lines:
        match = FITS_LINE.match(line.rstrip())
        if match and " slots x " in line:
            starts.append((at, "from the plan to the end of step 1"))
            break
        if match:  # the address is another one in each benchmark
            starts.append((at, re.sub(r" at [\d.]+:\d+$", "", match["name"])))
    ends = [at for at, _ in starts[1:]] + [first_step]
    spent: dict[str, float] = {}
    for (at, name), end in zip(starts, ends, strict=True):
        spent[name] = spent.get(name, 0.0) + max(0.0, end - at)
    return spent


def environment() -> dict[str, str]:
    """Alike for all: one thread a worker, compiled bytecode, no Ray that happens to be around."""
    left_out = {"PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "RAY_TMPDIR"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**env, **RAY_AUTH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def import_all_once() -> None:
    """Fills the page cache, and writes bytecode where that lacks and can be written."""
    imports = "import torch, torch._dynamo, ray.train.torch, raytrain_ddp.training.loop"
    subprocess.run([sys.executable, "-c", imports], env=environment(), check=True)


@contextmanager
def standing_ray(folder: Path, contender: str) -> Iterator[str]:
    """The address of a Ray that idles, for this contender only; "" if it wants none.

    Even an idle Ray on the machine makes the start of another one seconds slower.
    """
    if not contender.endswith("standing"):
        yield ""
        return
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2]),
            *("--ray-client-server-port", str(free_port())),
            *("--num-cpus", str(WORKERS), "--include-dashboard", "false"),
            *("--temp-dir", str(folder / "ray"), "--disable-usage-stats"),
        ],
        env=environment(),
        stdout=(folder / "ray-start.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_for_ray(process, address, folder / "ray-start.log")
        time.sleep(10)  # its own workers come up behind it
        yield address
    finally:
        end_tree(process.pid)


def wait_for_ray(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None:
            raise SystemExit(f"the standing Ray at {address} ended:\n{log.read_text()}")
        time.sleep(0.2)


def end_tree(pid: int) -> None:
    """Ends a process and all below it, each by its own id."""
    try:
        parent = psutil.Process(pid)
        tree = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for send in ("terminate", "kill"):
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                getattr(process, send)()
        _, tree = psutil.wait_procs(tree, timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def describe_machine() -> dict[str, str]:
    packages = ("torch", "ray", "raytrain_ddp")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores ({cpu_name()}), "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
        "bytecode": ", ".join(f"{name} {compiled(name):.0%}" for name in BYTECODE),
    }


def cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.machine()


def compiled(package: str) -> float:
    """The share of a package's modules that have compiled bytecode (.pyc)."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = list(Path(spec.origin).parent.rglob("*.py"))
    there = sum(Path(importlib.util.cache_from_source(str(file))).exists() for file in files)
    return there / max(1, len(files))


def warn_of_bytecode(machine: Mapping[str, str]) -> None:
    lacking = [name for name in BYTECODE if compiled(name) < 0.5]
    if lacking:
        print(
            f"WARNING: {', '.join(lacking)} without compiled bytecode ({machine['bytecode']}): "
            "each process may compile anew, and start-up be twice as long. Compile it with\n"
            f"  {sys.executable} -m compileall -q -j 0 "
            + " ".join(str(Path(str(importlib.util.find_spec(n).origin)).parent) for n in lacking),
            file=sys.stderr,
            flush=True,
        )


def as_markdown(
    machine: Mapping[str, str], runs: Sequence[Run], failed: Sequence[str], args: argparse.Namespace
) -> str:
    order = [name for name in CONTENDERS if any(run.contender == name for run in runs)]
    loads = [run.load for run in runs] or [0.0]
    parts = [
        "# Launching the same training in several ways",
        f"`python benchmarks/launch.py --rounds {args.rounds} --steps {args.steps}`",
        "\n".join(f"- {name}: {value}" for name, value in machine.items())
        + f"\n- load before a run (1 minute): {min(loads):.1f} .. {max(loads):.1f}",
        "Medians over the rounds (min .. max); ratios to the hand-written loop of the same round.",
        table(
            ["", "first step after s", "ratio", "step ms", "ratio", "total s", "ratio"],
            [contender_row(name, runs) for name in order],
        ),
    ]
    fits = [name for name in order if name.startswith("fit")]
    if fits:
        parts += ["Where fit's start-up goes (median seconds):", phase_table(fits, runs)]
    if failed:
        parts.append(
            "Failed:\n\n" + "\n".join(f"    {line}" for line in "\n".join(failed).split("\n"))
        )
    return "\n\n".join(parts) + "\n"


def contender_row(contender: str, runs: Sequence[Run]) -> list[str]:
    base = {run.round: run for run in runs if run.contender == "by-hand"}
    own = [run for run in runs if run.contender == contender]
    row = [CONTENDERS[contender]]
    for name, scale, digits in (("first_step_s", 1, 1), ("step_s", 1e3, 0), ("total_s", 1, 1)):
        values = [scale * getattr(run, name) for run in own]
        ratios = [getattr(r, name) / getattr(base[r.round], name) for r in own if r.round in base]
        row += [spread(values, digits), spread(ratios, 2)]
    return row


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    low, mid, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{mid} ({low} .. {high})" if len(values) > 1 else mid


def phase_table(contenders: Sequence[str], runs: Sequence[Run]) -> str:
    own = {name: [run.phases_s for run in runs if run.contender == name] for name in contenders}
    names: list[str] = []
    for spent in (phases_s for several in own.values() for phases_s in several):
        for before, name in zip(
            [None, *spent], spent, strict=False
        ):  # a new name goes behind the one before it
            if name not in names:
                names.insert(names.index(before) + 1 if before else 0, name)
    rows = [
        [name, *(middle([spent.get(name) for spent in own[c]]) for c in contenders)]
        for name in names
    ]
    sums = [middle([sum(spent.values()) for spent in own[c]]) for c in contenders]
    return table(
        ["phase", *(CONTENDERS[c] for c in contenders)], [*rows, ["to the first step", *sums]]
    )


def middle(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{median(there):.1f}" if there else ""


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
