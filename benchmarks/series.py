"""What the benchmarks share: interleaved rounds, the machine, the tables."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import psutil


class Measured(Protocol):
    """A run, as a dataclass."""

    @property
    def load(self) -> float:
        """Of the machine (1 minute) before."""


R = TypeVar("R", bound=Measured)

HERE = Path(__file__).resolve().parent
# Ray's own default for an embedded Ray. A standing one has it, too, once ~/.ray/auth_token exists,
# but attaching by HOST:PORT must then be given the mode, too.
RAY_AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
BYTECODE = ("torch", "ray", "numpy")  # what takes longest to compile


class Series(Generic[R]):
    """The runs of one benchmark, dataclasses with `load`; what fails is reported and left out.

    Args:
        machine: what it is measured on, by name; printed at once.
    """

    def __init__(self, machine: Mapping[str, str]) -> None:
        self.machine = machine
        self.runs: list[R] = []
        self.failed: list[str] = []
        print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)

    def add(self, what: str, measure: Callable[[], R], line: Callable[[R], str]) -> bool:
        """Measures once, and prints its line; False if it failed. `what` names it then."""
        try:
            run = measure()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.failed.append(f"{what}: {in_short(str(error))}")
            print(f"{what}: {error}", file=sys.stderr, flush=True)
            return False
        self.runs.append(run)
        print(line(run), flush=True)
        return True

    def place(self) -> str:
        """Machine and load, as a Markdown list."""
        loads = [run.load for run in self.runs] or [0.0]
        lines = [f"- {name}: {value}" for name, value in self.machine.items()]
        return "\n".join(
            [*lines, f"- load before a run (1 minute): {min(loads):.1f} .. {max(loads):.1f}"]
        )

    def publish(self, parts: Sequence[str], paths: Sequence[Path]) -> int:
        """Prints a report of these parts and writes it to each path; to ``*.json`` every run
        instead. Returns the exit status."""
        failed = "Failed:\n\n" + "\n".join(f"    {line}" for line in self.failed)
        report = "\n\n".join([*parts, *([failed] if self.failed else [])]) + "\n"
        print("\n" + report)
        records = [asdict(run) for run in self.runs]  # type: ignore[call-overload]
        content = {"machine": self.machine, "failed": self.failed, "runs": records}
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(content, indent=1) + "\n" if path.suffix == ".json" else report
            )
        return 1 if self.failed else 0


def in_turn(contenders: Sequence[str], number: int) -> list[str]:
    """Their order in a round: each comes first once, so that none always profits from a cache."""
    turn = number % len(contenders)
    return [*contenders[turn:], *contenders[:turn]]


def environment() -> dict[str, str]:
    """Alike for all: one thread a worker, compiled bytecode, no Ray that happens to be around."""
    left_out = {"PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "RAY_TMPDIR"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**env, **RAY_AUTH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def import_all_once() -> None:
    """Fills the page cache, and writes bytecode where that lacks and can be written."""
    imports = "import torch, torch._dynamo, ray.train.torch, raytrain_ddp.training.loop"
    subprocess.run([sys.executable, "-c", imports], env=environment(), check=True)


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


def torchrun(workers: int) -> list[str]:
    """The words of a command before a script and its arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}"]
    return [*command, "--master-port", str(free_port())]


def run_to_end(command: Sequence[str], limit_s: float, **variables: str) -> None:
    """Run a command whose output matters only where it fails.

    Raises:
        RuntimeError: it failed.
        TimeoutExpired: it took longer than `limit_s`.
    """
    process = subprocess.Popen(
        command,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    finally:
        end_tree(process.pid)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}\n{said[-2000:]}")


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


def in_short(text: str) -> str:
    """The first line, and the first error that a traceback ends with: no paths of this machine."""
    first, *rest = text.splitlines()
    errors = [line for line in rest if re.match(r"(\[rank\d+\]: )?[\w.]*Error: ", line)]
    return f"{first}: {errors[0].partition(' [/')[0]}" if errors else first


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    low, mid, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{mid} ({low} .. {high})" if len(values) > 1 else mid


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
