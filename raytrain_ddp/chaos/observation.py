"""Observes a run from outside: its growing log, the faults that fired, its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raytrain_ddp.chaos.fault_plan import DRIVER, Fault

TAG = "RAYTRAIN_DDP_CHAOS"


class LogFollower:
    """Follows metrics.jsonl through all starts of a run, each of which rewrites it.

    Attributes:
        step: the last one logged.
        executed: the number of logged steps, including repeated ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._seen: set[int] = set()  # hashes of lines: those of a repeated step differ in time
        self.step = 0

    @property
    def executed(self) -> int:
        return len(self._seen)

    def look(self) -> None:
        """Reads new lines, including those of the old file before it was replaced."""
        self._read()
        try:
            now = self._path.stat().st_ino
        except FileNotFoundError:
            return
        if self._file is None or os.fstat(self._file.fileno()).st_ino != now:
            self.close()
            self._file = self._path.open("rb")
            self._read()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> None:
        if self._file is None:
            return
        while line := self._file.readline():
            if not line.endswith(b"\n"):
                self._file.seek(-len(line), os.SEEK_CUR)  # the rest is not written yet
                return
            if b'"kind": "train"' in line:
                self._seen.add(hash(line))
                self.step = int(json.loads(line)["step"])


@dataclass(frozen=True)
class FiredFault:
    """A fault that fired, and where."""

    number: int
    fault: Fault
    rank: int | None
    step: int | None


class FaultMonitor:
    """The plan, and which of its faults have fired; each has a file in `folder`."""

    def __init__(self, plan: Sequence[Fault], folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        own = [fault for fault in plan if fault.site != DRIVER]
        self._open = {f"fired-{number}": fault for number, fault in enumerate(own)}
        self._drivers = sorted(fault.step or 0 for fault in plan if fault.site == DRIVER)
        self.count = 0

    def news(self) -> list[FiredFault]:
        """The faults that have fired since the last call."""
        names = sorted(self._open.keys() & {*os.listdir(self.folder)})
        return [self._fired(self._open.pop(n), (self.folder / n).read_text()) for n in names]

    def driver_due(self, step: int) -> FiredFault | None:
        """The driver fault that is due now that the log has reached `step`, if any."""
        if not self._drivers or step < self._drivers[0]:
            return None
        fault = Fault(DRIVER, step=self._drivers.pop(0))
        (self.folder / f"driver-{len(self._drivers)}").touch()
        self.count += 1
        return FiredFault(self.count, fault, None, step)

    def _fired(self, fault: Fault, note: str) -> FiredFault:
        self.count += 1
        rank, _, step = note.partition(" ")
        known = step.isdigit()  # a process may have been killed while writing this
        return FiredFault(
            self.count,
            fault,
            int(rank) if known else fault.rank,
            (int(step) or None) if known else fault.step,
        )


def tagged(token: str) -> dict[int, str]:
    """Processes with this token in their environment: pid -> command line.

    Finds none on a system without /proc.
    """
    found = {}
    wanted = f"{TAG}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                if any(arguments):  # otherwise it is a zombie process
                    found[int(folder.name)] = b" ".join(arguments).decode(errors="replace").strip()
        except OSError:
            continue
    return found


def tag(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that `tagged` must find."""
    return {**environment, TAG: token}
