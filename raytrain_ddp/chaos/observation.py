"""What can be seen of a run from outside: its log as it grows, the faults that fired, processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raytrain_ddp.chaos.fault_plan import DRIVER, Fault

TAG = "RAYTRAIN_DDP_CHAOS"


class Log:
    """Follows metrics.jsonl through all starts of a run, each of which makes it anew.

    Attributes:
        step: the last one that is logged.
        executed: how many steps were logged in all, those included that were done again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._seen: set[int] = set()  # hashes of lines: those of a step done again differ in time
        self.step = 0

    @property
    def executed(self) -> int:
        return len(self._seen)

    def look(self) -> None:
        """Reads what is new; also what was the old file's before it was replaced."""
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
                self._file.seek(-len(line), os.SEEK_CUR)  # the rest is still to come
                return
            if b'"kind": "train"' in line:
                self._seen.add(hash(line))
                self.step = int(json.loads(line)["step"])


@dataclass(frozen=True)
class Fired:
    """A fault that came, where it came."""

    number: int
    fault: Fault
    rank: int | None
    step: int | None


class Faults:
    """The plan, and what of it has fired; each in a file of `folder` (see failpoints.py)."""

    def __init__(self, plan: Sequence[Fault], folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        own = [fault for fault in plan if fault.site != DRIVER]
        self._open = {f"fired-{number}": fault for number, fault in enumerate(own)}
        self._drivers = sorted(fault.step or 0 for fault in plan if fault.site == DRIVER)
        self.count = 0

    def news(self) -> list[Fired]:
        """Those that have fired since the last call."""
        names = sorted(self._open.keys() & {*os.listdir(self.folder)})
        return [self._fired(self._open.pop(n), (self.folder / n).read_text()) for n in names]

    def driver_due(self, step: int) -> Fired | None:
        """Whether the driver is to be killed now that the log has reached `step`."""
        if not self._drivers or step < self._drivers[0]:
            return None
        fault = Fault(DRIVER, step=self._drivers.pop(0))
        (self.folder / f"driver-{len(self._drivers)}").touch()
        self.count += 1
        return Fired(self.count, fault, None, step)

    def _fired(self, fault: Fault, note: str) -> Fired:
        self.count += 1
        rank, _, step = note.partition(" ")
        known = step.isdigit()  # a process may have been killed while it wrote this
        return Fired(
            self.count,
            fault,
            int(rank) if known else fault.rank,
            (int(step) or None) if known else fault.step,
        )


def tagged(token: str) -> dict[int, str]:
    """Processes that have this token in their environment: pid -> command line.

    Where the system has no /proc, none are found.
    """
    found = {}
    wanted = f"{TAG}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if any(words):  # else it has ended, and waits for its parent to ask
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:
            continue
    return found


def tag(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of processes that `tagged` shall find."""
    return {**environment, TAG: token}
