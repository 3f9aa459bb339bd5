"""Drives a run to its end despite faults, and observes it: its log, the faults, its processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raytrain_ddp.tools.chaos.fault_plan import DRIVER, Fault
from raytrain_ddp.tools.chaos.runners import Runner

TAG = "RAYTRAIN_DDP_CHAOS"
STUCK_S = 300.0


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


@dataclass(frozen=True)
class DriveResult:
    """How a run ended.

    Args:
        statuses: of the last start's processes.
        starts: how often the command was run.
        executed: logged steps, including repeated ones.
        problem: why it was given up; empty if it finished.
        sizes: the number of workers of each start, if known.
        in_memory: how often survivors went on from the state that they had, and repeated no step.
        restored: how often all went on from a checkpoint.
    """

    statuses: Sequence[int]
    starts: int
    wall_s: float
    executed: int
    problem: str = ""
    sizes: Sequence[int] = ()
    in_memory: int = 0
    restored: int = 0


class Watcher:
    """Receives what happens; this one ignores it."""

    def phase(self, name: str, planned: int = 0, total_steps: int = 0) -> None: ...

    def at(self, step: int) -> None: ...

    def fired(self, fired: FiredFault) -> None: ...


def drive(runner: Runner, log: LogFollower, faults: FaultMonitor, watcher: Watcher) -> DriveResult:
    """Restarts the run as long as it fails because of a fault.

    Gives up if it fails without a fault, or makes no progress for `STUCK_S`.
    """
    started, starts, problem = time.monotonic(), 0, ""
    while True:
        starts += 1
        before = faults.count
        runner.start()
        statuses, stuck = _until_ended(runner, log, faults, watcher)
        if stuck:
            problem = f"no step and no fault in {STUCK_S:.0f} s"
        elif any(statuses) and faults.count == before:
            problem = f"it failed ({_failed_statuses(statuses)}) without a fault: {runner.words()}"
        if problem or not any(statuses):
            wall_s = time.monotonic() - started
            return DriveResult(statuses, starts, wall_s, log.executed, problem, runner.sizes)


def _until_ended(
    runner: Runner, log: LogFollower, faults: FaultMonitor, watcher: Watcher
) -> tuple[Sequence[int], bool]:
    """(exit statuses, whether it had to be killed because nothing happened)."""
    last, since, killed = (0, 0), time.monotonic(), False
    while True:
        statuses = runner.ended()
        log.look()
        watcher.at(log.step)
        for news in faults.news():
            watcher.fired(news)
        if statuses is not None:
            return statuses, False
        due = faults.driver_due(log.step) if not killed else None
        if due is not None:
            watcher.fired(due)
            runner.kill()
            killed = True  # workers that survive it briefly may reach the step of the next fault
        now = (log.executed, faults.count)
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > STUCK_S:
            runner.kill()
            return _end_of(runner), True


def _end_of(runner: Runner) -> Sequence[int]:
    while (statuses := runner.ended()) is None:
        pass
    return statuses


def _failed_statuses(statuses: Sequence[int]) -> str:
    return ", ".join(str(status) for status in statuses if status)


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
