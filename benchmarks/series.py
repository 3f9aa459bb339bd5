"""The common parts of the benchmarks: contenders that take turns, and the page of results."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
# Ray's own default for an embedded Ray. A running one has it, too, once ~/.ray/auth_token exists,
# but attaching by HOST:PORT must then be given the mode, too.
RAY_AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@dataclass(frozen=True)
class Run:
    """One run of one contender in one round.

    Args:
        load: the load average of the machine (1 minute) before the run.
        found: the numbers that it measured, by name.
    """

    contender: str
    case: str
    round: int
    load: float
    found: Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: the name of the number in `Run.found`.
        scale: what it is multiplied by.
        has_ratio: adds a column of ratios to the base in the same round.
    """

    title: str
    key: str
    digits: int = 0
    scale: float = 1
    has_ratio: bool = False


class Series:
    """The runs of one benchmark; what fails is reported and left out.

    Args:
        contenders: title by name.
        base: the contender that the ratios refer to.
        packages: packages whose versions are listed, besides torch and Ray.
    """

    def __init__(
        self, contenders: Mapping[str, str], base: str, packages: Sequence[str] = ()
    ) -> None:
        self._contenders, self._base = contenders, base
        self._machine = describe_machine(("torch", "ray", "raytrain_ddp", *packages))
        self._runs: list[Run] = []
        self._failed: list[str] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
        print("\n".join(f"{name}: {value}" for name, value in self._machine.items()), flush=True)

    def measure(
        self,
        args: argparse.Namespace,
        work: Callable[[str, str], Mapping[str, float]],
        cases: Sequence[str] = ("",),
        tries: int = 1,
    ) -> None:
        """Runs each contender once in each round. Each round begins with another one, so that a
        machine that is busy for a while disturbs all of them.

        Args:
            work: (contender, case) -> what was measured.
            tries: how often a contender that fails is run again in a round.
        """
        for number in range(args.rounds):
            turn = number % len(args.only)
            for case in cases:
                for contender in [*args.only[turn:], *args.only[:turn]]:
                    for _ in range(tries):
                        if self._add(contender, case, number + 1, work):
                            break

    def _add(
        self,
        contender: str,
        case: str,
        number: int,
        work: Callable[[str, str], Mapping[str, float]],
    ) -> bool:
        load, name = os.getloadavg()[0], f"round {number}  {contender}  {case}"
        try:
            run = Run(contender, case, number, load, work(contender, case))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self._failed.append(f"{name}: {str(error).splitlines()[0]}")
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return False
        self._runs.append(run)
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in run.found.items())
        print(f"{name}  {numbers}  load {load:.1f}", flush=True)
        return True

    def table(self, columns: Sequence[Column], case: str = "") -> str:
        """A table of the contenders of that case: medians over the rounds (min .. max)."""
        head = [""]
        for column in columns:
            head += [column.title, *(["ratio"] if column.has_ratio else [])]
        rows = []
        runs = [run for run in self._runs if run.case == case]
        base = {run.round: run.found for run in runs if run.contender == self._base}
        for contender, title in self._contenders.items():
            own = [run for run in runs if run.contender == contender]
            row = [title]
            for column in columns:
                key = column.key
                there = [run for run in own if key in run.found]
                row.append(spread([column.scale * run.found[key] for run in there], column.digits))
                if column.has_ratio:
                    both = [run for run in there if key in base.get(run.round, {})]
                    row.append(spread([run.found[key] / base[run.round][key] for run in both], 2))
            if own:
                rows.append(row)
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [head, ["-" * width for width in widths], *rows]
        cells = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def publish(self, title: str, parts: Sequence[str], out: Path | None) -> int:
        """Prints the page, and writes it to `out`. Returns the exit status."""
        loads = [run.load for run in self._runs] or [0.0]
        argv = " ".join(sys.argv[1:]).partition(" --out")[0]
        place = [f"- {name}: {value}" for name, value in self._machine.items()]
        place.append(f"- load before a run (1 minute): {min(loads):.1f} .. {max(loads):.1f}")
        whole = [
            f"# {title}",
            f"`{f'python benchmarks/{Path(sys.argv[0]).name} {argv}'.strip()}`",
            "\n".join(place),
            "Medians over the rounds (min .. max); ratios in the same round.",
            *parts,
        ]
        if self._failed:
            whole += ["Failed:", "\n".join(f"- {line}" for line in self._failed)]
        page = "\n\n".join(whole) + "\n"
        print(f"\n{page}")
        if out:
            out.write_text(page, encoding="utf-8")
        return int(bool(self._failed))


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, help=f"[{rounds}, --quick: 1]")
    made.add_argument("--only", help="some of the contenders, separated by commas")
    made.add_argument("--quick", action="store_true", help="one small round: does it run?")
    made.add_argument("--out", type=Path, help="the page of results, Markdown")
    made.set_defaults(usual_rounds=rounds)
    return made


def parse(made: argparse.ArgumentParser, contenders: Mapping[str, str]) -> argparse.Namespace:
    args = made.parse_args()
    args.only = args.only.split(",") if args.only else [*contenders]
    args.rounds = args.rounds or (1 if args.quick else args.usual_rounds)
    if unknown := [name for name in args.only if name not in contenders]:
        made.error(f"no contender {', '.join(unknown)}; there are {', '.join(contenders)}")
    return args


# ------------------------------------------------------------------ processes


def environment() -> dict[str, str]:
    """The environment of all contenders: one thread per worker, compiled bytecode, and no Ray that
    happens to be running."""
    left_out = {"PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "RAY_TMPDIR"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**env, **RAY_AUTH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def import_all_once() -> None:
    """Fills the page cache, and writes missing bytecode where it can be written."""
    imports = "import torch, torch._dynamo, ray.train.torch, raytrain_ddp.training.loop"
    subprocess.run([sys.executable, "-c", imports], env=environment(), check=True)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own; its output goes to `log`."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            cwd=HERE.parent,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_to_end(command: Sequence[str], log: Path, limit_s: float) -> None:
    """Runs a command, and ends all that it leaves behind.

    Raises:
        RuntimeError: it failed; with its last lines.
        TimeoutExpired: it took longer than `limit_s`.
    """
    process = start(command, log)
    try:
        process.wait(limit_s)
    finally:
        end_session(process.pid)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def end_session(leader: int) -> None:
    """Ends a process, all below it, and what else is left of its session, each by its own id."""
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            line = {process.pid, *(parent.pid for parent in process.parents())}
            if leader in line or os.getsid(process.pid) == leader:
                ended.append(process)
    for send in ("terminate", "kill"):
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                getattr(process, send)()
        _, ended = psutil.wait_procs(ended, timeout=10)


def torchrun(workers: int, *flags: str) -> list[str]:
    """The words of a command before a script and its arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}"]
    return [*command, *(flags or ("--master-port", str(free_port())))]


def fit_flags(steps: int, stamps: Path, storage: Path) -> list[str]:
    """The arguments of `fit` that train what programs/by_hand.py trains."""
    return [
        *("-m", "raytrain_ddp.fit", "--name", "run", "--storage", str(storage)),
        *("--task", f"{PROGRAMS / 'task.py'}:Made"),
        *("--task-options", "stamps", str(stamps), "steps", str(steps)),
        *("--epochs", "1", "--batch-size", "64", "--micro-batch", "32"),
        *("--optim.lr", "0.01", "--optim.no-nesterov", "--optim.weight-decay", "0"),
        *("--schedule.name", "constant", "--schedule.warmup-epochs", "0"),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ------------------------------------------------------------------ the machine, the page


def describe_machine(packages: Sequence[str]) -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores ({cpu_name()}), "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version_of(name)}" for name in packages),
    }


def version_of(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "is not installed"


def cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.machine()


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    low, mid, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{mid} ({low} .. {high})" if len(values) > 1 else mid
