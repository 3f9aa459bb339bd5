"""Drives a run to its end although it is killed: starts its command again, and again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_ddp import failpoints
from raytrain_ddp.checkpoint.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    read_history,
    run_storage,
)
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Plan
from raytrain_ddp.records import stored_events
from raytrain_ddp.tools.chaos.fault_plan import DRIVER, Fault, armed
from raytrain_ddp.tools.chaos.launchers import Launch, Process
from raytrain_ddp.tools.chaos.screen import Screen

STUCK_S = 300.0
_POLL_S = 0.02


@dataclass
class KilledRun:
    """A run, its faults, and what it has logged.

    Args:
        config: with a name and a storage of its own.
        environment: of its processes.
        next_sizes: the number of workers of each start.
        sizes: those of the starts so far.
        logged: the lines of its steps; those of a repeated step differ in time.
        fired: the number of faults so far.
        wall_s: seconds that all starts took together.
        in_memory: how often survivors went on from the state that they had, and repeated no step.
        restored: how often all went on from a checkpoint.
    """

    config: TrainConfig
    launch: Launch
    environment: Mapping[str, str]
    plan: Sequence[Fault]
    next_sizes: Iterator[int]
    screen: Screen
    sizes: list[int] = field(default_factory=list)
    logged: set[bytes] = field(default_factory=set)
    fired: int = 0
    wall_s: float = 0.0
    in_memory: int = 0
    restored: int = 0

    def __post_init__(self) -> None:
        folder = Path(self.config.storage) / str(self.config.name)
        self._recipe, self._log = folder.with_suffix(".toml"), folder / METRICS_FILE
        self._recipe.write_text(dumps(self.config), encoding="utf-8")
        self._log_state, self._step = (0, 0), 0
        self._marks = folder.with_name(f"{folder.name}-fired")
        self._marks.mkdir()
        own = [fault for fault in self.plan if fault.site != DRIVER]
        self._open = {f"fired-{number}": fault for number, fault in enumerate(own)}
        self._drivers = [fault.step or 0 for fault in self.plan if fault.site == DRIVER]

    def drive(self) -> str:
        """Restarts the run as long as it fails because of a fault.

        Returns:
            Why it was given up: it failed without a fault, or did nothing for `STUCK_S`; or "".
        """
        began = time.monotonic()
        problem = None
        while problem is None:
            problem = self._start()
        self.wall_s = time.monotonic() - began
        events = stored_events(read_history(run_storage(self.config), EVENTS_FILE))
        plans = [timed.event for timed in events if isinstance(timed.event, Plan)][1:]
        self.in_memory = sum(plan.replaced is not None for plan in plans)
        self.restored = len(plans) - self.in_memory
        return problem

    def _start(self) -> str | None:
        """Starts the run once; None: a fault has ended it."""
        self.sizes.append(next(self.next_sizes))
        before, armed_by = self.fired, {failpoints.VARIABLE: armed(self.plan)}
        armed_by[failpoints.FOLDER_VARIABLE] = str(self._marks)
        processes = self.launch(self._recipe, {**self.environment, **armed_by}, self.sizes[-1])
        try:
            statuses = self._watch(processes)
        finally:
            _end(processes)
        if not statuses:
            return f"no step and no fault in {STUCK_S:.0f} s"
        if any(statuses) and self.fired == before:
            failed = ", ".join(str(status) for status in statuses if status)
            said = _last_error(self._recipe.with_suffix(".log"))
            return f"it failed ({failed}) without a fault: {said}"
        return None if any(statuses) else ""

    def _watch(self, processes: Sequence[Process]) -> list[int | None]:
        """The exit statuses, once all have ended; none if nothing happened."""
        last, since, is_killed = (0, 0), time.monotonic(), False
        while True:
            statuses = [process.poll() for process in processes]
            self._look()
            if None not in statuses:
                return statuses
            # Workers that survive it briefly may reach the step of the next fault.
            if not is_killed and self._drivers and self._step >= self._drivers[0]:
                (self._marks / f"driver-{self._drivers.pop(0)}").touch()
                self._report("driver", "log", None, self._step)
                is_killed = True
            if is_killed or any(statuses):  # one that has failed ends the others, as by torchrun
                _end(processes)
            if (now := (len(self.logged), self.fired)) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                return []
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Reads what is new: steps in the log, which each start rewrites, and faults."""
        with suppress(FileNotFoundError):
            state = self._log.stat()
            if self._log_state != (now := (state.st_ino, state.st_size)):
                self._log_state = now
                lines = self._log.read_bytes().splitlines(keepends=True)
                steps = [x for x in lines if b'"kind": "train"' in x and x.endswith(b"\n")]
                self.logged.update(steps)
                self._step = int(json.loads(steps[-1])["step"]) if steps else 0
                self.screen.at(self._step)
        for name in sorted(self._open.keys() & {*os.listdir(self._marks)}):
            fault = self._open.pop(name)
            rank, _, step = (self._marks / name).read_text().partition(" ")
            known = step.isdigit()  # a process may have been killed while writing this
            at = (int(rank), int(step) or None) if known else (fault.rank, fault.step)
            self._report("kill", fault.site, *at)

    def _report(self, what: str, where: str, rank: int | None, step: int | None) -> None:
        self.fired += 1
        self.screen.fired(self.fired, what, where, rank, step)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL_S / 10)


def _last_error(log: Path) -> str:
    """Its last line with an error; that of a rank before those about its peers."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "rror" in line]
    own = [line for line in errors if "gloo" not in line and "closed by peer" not in line]
    return (own or errors or lines or ["nothing"])[-1]
