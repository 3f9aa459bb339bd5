"""A fake Slurm for tests: one node, this machine, with the commands in fakes/."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAKES = Path(__file__).resolve().parent / "fakes"


_given: set[int] = set()
_random = random.SystemRandom()  # concurrent tests may set the same seed


def port_of(number: int) -> int:
    """The first of a job's 12 ports; see slurm.sbatch."""
    return 20_000 + number % 1000 * 12


def free_number() -> int:
    """A job number whose ports and folder are unused."""
    while True:
        number = _random.randrange(10_000, 1_000_000)
        first = port_of(number)
        free = first not in _given and all(map(_is_free, range(first, first + 12)))
        if free and not Path(f"/tmp/ray-{number}").exists():
            _given.add(first)
            return number


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Job:
    """A batch script, run as Slurm does, in its own folder."""

    def __init__(
        self, folder: Path, number: int, script: Path, words: Sequence[str] = (), **variables: str
    ) -> None:
        self.folder, self.number = folder, number
        path = [str(FAKES), str(Path(sys.executable).parent), os.environ["PATH"]]
        variables.setdefault("PATH", ":".join(path))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))},
            "PYTHONPATH": str(ROOT),
            "FAKE_NOTES": str(folder),
            "HEAD_IP": "127.0.0.1",
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_PER_TASK": "2",
            **variables,
        }
        self._out = (folder / f"slurm-{number}.out").open("ab")
        self._process = subprocess.Popen(
            ["bash", str(script), *words],
            cwd=folder,
            env=environment,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return (self.folder / f"slurm-{self.number}.out").read_text(encoding="utf-8")

    @property
    def requeued(self) -> list[str]:
        """The requests made to scontrol."""
        notes = self.folder / "scontrol"
        return notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []

    def warn(self, number: signal.Signals = signal.SIGUSR1) -> None:
        """Like --signal=B: only the script gets the signal."""
        self._process.send_signal(number)

    def wait_until(self, true: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def status(self, timeout_s: float = 120) -> int:
        """The exit status of the script, once it has ended."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s:\n{self.output}") from None
        finally:
            self.end()

    def end(self) -> None:
        """Ends all of its leftover processes."""
        self._out.close()
        if self._process.poll() is None:
            for process in processes_of(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._process.wait()


def processes_of(folder: Path) -> list[int]:
    """The processes started by the jobs of this folder."""
    mark = f"FAKE_NOTES={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
