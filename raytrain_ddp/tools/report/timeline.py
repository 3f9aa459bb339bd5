"""The starts of a run, on one time axis.

A log record contains the time since its own start; the events say when that start began.
Steps that a later start repeated are no longer in the log, which leaves a gap on the axis.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from raytrain_ddp.events import End, Eval, Failed, Plan, Preempted, Train
from raytrain_ddp.tools.report.run_files import RunFiles

# Longer pauses, relative to the time at work, are cut out: after a failure, and between two
# starts of the command, which may be a night apart.
_CUT_FAILED, _CUT_ENDED = (60.0, 0.15), (10.0, 0.05)


@dataclass(frozen=True)
class RunAttempt:
    """One start of the workers, from its plan to its last event, in seconds since 1970."""

    began: float
    ended: float
    start_step: int
    world_size: int  # 0: unknown
    plan: Plan | None
    failed: bool = False  # its workers failed, and the same command continued


@dataclass(frozen=True)
class Timeline:
    """The starts of a run, in order, and the pauses that are cut out of its axis."""

    attempts: Sequence[RunAttempt]
    cuts: Sequence[tuple[float, float]]  # (from, to), seconds since 1970

    def at(self, wall: float) -> float:
        """Seconds since the run began, without the pauses that are cut out."""
        began = self.attempts[0].began if self.attempts else wall
        place = bisect.bisect_right(self.cuts, (wall, math.inf))
        out = self._cut_s[place]
        if place:  # `wall` may be within that pause
            out -= max(0.0, self.cuts[place - 1][1] - wall)
        return max(0.0, wall - began - out)

    @cached_property
    def _cut_s(self) -> list[float]:
        """Cumulative seconds of the pauses."""
        return [0.0, *accumulate(to - since for since, to in self.cuts)]

    def lasts(self, records: Sequence[Train | Eval]) -> list[float | None]:
        """When the last record of each start was written; None if there is none."""
        walls = sorted(wall for wall in self.walls(records) if math.isfinite(wall))
        begins = [attempt.began for attempt in self.attempts]
        found = []
        for began, until in zip(begins, [*begins[1:], math.inf], strict=False):
            place = bisect.bisect_right(walls, until)
            found.append(walls[place - 1] if place and walls[place - 1] >= began else None)
        return found

    @property
    def worked_s(self) -> float:
        return sum(attempt.ended - attempt.began for attempt in self.attempts)

    def walls(self, records: Sequence[Train | Eval]) -> list[float]:
        """When each record was written; nan if unknown."""
        firsts: list[int] = []
        owners: list[RunAttempt] = []
        limit = math.inf
        # A later start overwrites the records after its first step.
        for attempt in reversed(self.attempts):
            if attempt.start_step < limit:
                firsts.insert(0, attempt.start_step)
                owners.insert(0, attempt)
                limit = attempt.start_step
        walls = []
        for record in records:
            place = bisect.bisect_left(firsts, record.step) - 1
            walls.append(owners[place].began + record.seconds if place >= 0 else math.nan)
        return walls


def timeline_of(files: RunFiles, is_running: bool) -> Timeline:
    """From the events; without events, from where the log's seconds start over."""
    attempts = _from_events(files, is_running) or _from_log(files)
    whole = Timeline(_as_long_as_logged(attempts, files), [])
    cuts = []
    for one, two in pairwise(whole.attempts):
        least_s, share = _CUT_FAILED if one.failed else _CUT_ENDED
        if two.began - one.ended > max(least_s, share * whole.worked_s):
            cuts.append((one.ended, two.began))
    return Timeline(whole.attempts, cuts)


def _as_long_as_logged(attempts: Sequence[RunAttempt], files: RunFiles) -> list[RunAttempt]:
    """No start ends before its last record: events are dated to the second, and some are
    missing."""
    lasts = zip(attempts, Timeline(attempts, []).lasts(files.train), strict=True)
    return [replace(each, ended=max(each.ended, last or each.ended)) for each, last in lasts]


def _from_events(files: RunFiles, is_running: bool) -> list[RunAttempt]:
    attempts: list[RunAttempt] = []
    plan: tuple[Plan, float] | None = None
    heard = math.nan

    def close(ended: float, failed: bool = False) -> None:
        if plan is not None:
            what, began = plan
            step, size = what.start_step, what.world_size
            attempts.append(RunAttempt(began, max(began, ended), step, size, what, failed))

    for event, _, wall in files.events:
        if math.isnan(wall):
            continue
        if isinstance(event, Plan):
            close(heard)
            plan = event, wall
        elif isinstance(event, End | Failed | Preempted):
            planned = isinstance(event, End) and (event.status == 0 or event.status > 128)
            # After the last checkpoint only Ray is shut down.
            close(heard if planned else wall, failed=not isinstance(event, End))
            plan = None
        heard = wall
    if plan is not None:  # still running, or ended without an event
        close(max(heard, files.read_at) if is_running else heard)
    return attempts


def _from_log(files: RunFiles) -> list[RunAttempt]:
    attempts: list[RunAttempt] = []
    began = before = 0.0
    start_step = step = 0
    for record in files.train:
        seconds = record.seconds
        if not math.isfinite(seconds):
            continue
        if seconds < before:
            attempts.append(RunAttempt(began, began + before, start_step, 0, None))
            began, start_step = began + before, step
        before, step = seconds, record.step
    return (
        [*attempts, RunAttempt(began, began + before, start_step, 0, None)] if before else attempts
    )
