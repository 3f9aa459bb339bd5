"""Fault injection for tests and `chaos`: failures at named sites, by rank and step, once per run.

    RAYTRAIN_DDP_FAILPOINTS="train.after_backward:kill@rank=1,step=7;start.loaded:kill@after=1"
    RAYTRAIN_DDP_FAILPOINTS_DIR=/tmp/fired    records which ones have fired

Conditions: `rank` and `step` are those of the caller; `from=7` is the first step from 7 on;
`hit=3` is the third match in a process; `after=2` waits until two others have fired, in any
process.

When none is armed, a failpoint costs one lookup in an empty dictionary.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain_ddp.errors import ConfigError

VARIABLE = "RAYTRAIN_DDP_FAILPOINTS"
FOLDER_VARIABLE = "RAYTRAIN_DDP_FAILPOINTS_DIR"

SITES = frozenset(
    {
        "start.met",  # a generation's members are known, they are not connected yet
        "start.opened",  # the data are open, the model is not made yet
        "start.alone",  # a new worker has opened its data, and has not joined the others yet
        "start.warmed_up",  # the model is wrapped, the checkpoint not loaded yet
        "start.loaded",  # the newest checkpoint is loaded, no step done
        "data.read",  # a loader thread is about to make a step's batches
        "train.before_step",
        "train.loss",  # action nan: the loss of this rank's first slot becomes NaN
        "train.after_backward",  # gradients are there, the update is not made
        "train.weights",  # action flip: one weight of this rank changes its sign
        "train.after_step",
        "train.log",  # a log line is due, the ranks' times are not gathered yet
        "train.compare",  # the weights of the ranks are about to be compared
        "train.report",  # the run has ended, nothing is reported to Ray Train yet
        "evaluate",
        "checkpoint.snapshot",  # the copy on the host is complete, nothing is written
        "checkpoint.begin",  # the folder exists and is empty
        "checkpoint.payload",  # one more file is written
        "checkpoint.manifest",  # all files are written, the manifest is not
        "checkpoint.committed",  # the manifest is written, nothing is pruned
        "prune.manifest",  # a manifest is deleted, its files are not
        "prune.done",
        "driver.event",  # the driver has taken an event of this step
    }
)
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_FACTORS = {"nan": math.nan, "flip": -1.0}
ACTIONS = frozenset({*_SIGNALS, *_ERRORS, *_FACTORS, "exit", "raise", "sleep", "gil"})

_KEYS = "rank|step|from|hit|after"
_ENTRY = re.compile(
    rf"([\w.]+):(\w+)(?:\((\d+\.?\d*|\.\d+)\))?(?:@((?:(?:{_KEYS})=\d+,?)+))?", re.ASCII
)


@dataclass
class Failpoint:
    """One failpoint: its site, action and conditions. `seen` counts matches."""

    site: str
    action: str
    argument: float
    where: Mapping[str, int]
    marker: Path
    seen: int = 0

    def due(self, rank: int, step: int) -> bool:
        """Whether it fires now. A marker file ensures that it fires only once in a run."""
        where, here = self.where, {"rank": rank, "step": step}
        if any(where.get(key, value) != value for key, value in here.items()):
            return False
        if step < where.get("from", 0) or fired(self.marker.parent) < where.get("after", 0):
            return False
        self.seen += 1
        if self.seen != where.get("hit", 1):
            return False
        try:
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            with self.marker.open("x") as note:
                note.write(f"{rank} {step}")
        except FileExistsError:
            return False
        return True

    def act(self) -> float:
        """Performs the action. Returns the factor for the caller's loss or weight."""
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        elif self.action == "exit":
            os._exit(int(self.argument))
        elif self.action == "raise":
            raise RuntimeError(f"failpoint {self.site}")
        elif self.action == "sleep":
            time.sleep(self.argument)
        elif self.action == "gil":  # sleeps while holding the GIL
            ctypes.PyDLL(None).usleep(int(self.argument * 1e6))
        elif number := _ERRORS.get(self.action):
            raise OSError(number, f"{os.strerror(number)} (failpoint {self.site})")
        return _FACTORS.get(self.action, 1.0)


_armed: dict[str, list[Failpoint]] = {}


def failpoint(site: str, rank: int = 0, step: int = 0) -> float:
    """Performs the action of a failpoint armed here. Returns 1; NaN for action nan, -1 for flip."""
    entries = _armed.get(site)
    if entries is None:
        return 1.0
    factors = [entry.act() for entry in entries if entry.due(rank, step)]
    return math.prod(factors)


def fired(folder: Path) -> int:
    """The number of failpoints that have fired so far, in all processes."""
    return len(os.listdir(folder)) if folder.is_dir() else 0


def arm(text: str, folder: str) -> None:
    """Arms the entries of `text`, and only those; `folder` records what has fired.

    Raises:
        ConfigError: the site or action is unknown, or an entry is invalid.
    """
    _armed.clear()
    for number, entry in enumerate(filter(None, map(str.strip, text.split(";")))):
        point = _parse(entry, Path(folder) / f"fired-{number}")
        _armed.setdefault(point.site, []).append(point)


def arm_from_environment() -> None:
    """Arms the failpoints named in the environment, if any."""
    text, folder = os.environ.get(VARIABLE, ""), os.environ.get(FOLDER_VARIABLE, "")
    if text and not folder:
        raise ConfigError(f"{VARIABLE} needs {FOLDER_VARIABLE}: an empty folder outside the run's.")
    arm(text, folder)


def _parse(entry: str, marker: Path) -> Failpoint:
    match = _ENTRY.fullmatch(entry)
    site, action, argument, conditions = match.groups() if match else ("", "", "", "")
    if site not in SITES or action not in ACTIONS:
        known = f"SITE is one of {', '.join(sorted(SITES))}; ACTION of {', '.join(sorted(ACTIONS))}"
        raise ConfigError(f"{VARIABLE}: {entry!r} is not SITE:ACTION(NUMBER)@KEY=N. {known}.")
    pairs = [each.split("=") for each in (conditions or "").split(",") if each]
    return Failpoint(site, action, float(argument or 0), {k: int(n) for k, n in pairs}, marker)


arm_from_environment()
