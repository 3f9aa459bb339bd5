"""Runs a config to its end despite faults, and counts starts and steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_ddp.chaos.observation import FaultMonitor, FiredFault, LogFollower
from raytrain_ddp.chaos.runners import Runner

STUCK_S = 300.0


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
