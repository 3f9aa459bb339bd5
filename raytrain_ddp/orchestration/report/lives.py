"""The starts of a run, and all of them on one axis of time.

A record of the log says how long its own start had lasted; the events say when that start began.
What a later start did again is no longer in the log: there the axis has a gap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise

from raytrain_ddp.orchestration.report.reading import Record, RunFiles

# Longer pauses, also as a share of the time at work, are cut out: after a failure, and between two
# starts of the command, which may have a night between them.
_CUT_FAILED, _CUT_ENDED = (60.0, 0.15), (10.0, 0.05)
_ENDS = ("failed", "preempted", "end")


@dataclass(frozen=True)
class Life:
    """One start of the workers: from the plan to the last word of it, in seconds since 1970."""

    began: float
    ended: float
    start_step: int
    world_size: int  # 0: not known
    plan: Record
    failed: bool = False  # and the same command went on, without its workers


@dataclass(frozen=True)
class Timeline:
    """The lives of a run, in order, and the pauses that are cut out of its axis."""

    lives: Sequence[Life]
    cuts: Sequence[tuple[float, float]]  # (from, to), seconds since 1970

    def at(self, wall: float) -> float:
        """Seconds since the run began, without the pauses that are cut out."""
        began = self.lives[0].began if self.lives else wall
        out = sum(max(0.0, min(wall, to) - since) for since, to in self.cuts)
        return max(0.0, wall - began - out)

    @property
    def worked_s(self) -> float:
        return sum(life.ended - life.began for life in self.lives)

    def walls(self, records: Sequence[Record]) -> list[float]:
        """When each record was written; nan where that is not known."""
        firsts: list[int] = []
        owners: list[Life] = []
        limit = math.inf
        for life in reversed(self.lives):  # a later start has overwritten what came after its step
            if life.start_step < limit:
                firsts.insert(0, life.start_step)
                owners.insert(0, life)
                limit = life.start_step
        walls = []
        for record in records:
            seconds = record.get("seconds", math.nan)
            place = bisect.bisect_left(firsts, record["step"]) - 1
            walls.append(owners[place].began + seconds if place >= 0 else math.nan)
        return walls


def timeline_of(files: RunFiles, is_running: bool) -> Timeline:
    """From the events; where there are none, from where the log's seconds begin anew."""
    lives = _from_events(files, is_running) or _from_log(files)
    whole = Timeline(_as_long_as_logged(lives, files), [])
    cuts = []
    for one, two in pairwise(whole.lives):
        least_s, share = _CUT_FAILED if one.failed else _CUT_ENDED
        if two.began - one.ended > max(least_s, share * whole.worked_s):
            cuts.append((one.ended, two.began))
    return Timeline(whole.lives, cuts)


def _as_long_as_logged(lives: Sequence[Life], files: RunFiles) -> list[Life]:
    """No life ends before its last line: events are dated to the second, and some are not heard."""
    walls = [wall for wall in Timeline(lives, []).walls(files.train) if math.isfinite(wall)]
    longer = []
    for number, life in enumerate(lives):
        until = lives[number + 1].began if number + 1 < len(lives) else math.inf
        last = max((wall for wall in walls if life.began <= wall <= until), default=life.ended)
        longer.append(replace(life, ended=max(life.ended, last)))
    return longer


def wall_of(event: Record) -> float:
    """Seconds since 1970; nan for a time that cannot be read."""
    try:
        when = datetime.strptime(str(event["time"]), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return math.nan
    return when.replace(tzinfo=timezone.utc).timestamp()


def _from_events(files: RunFiles, is_running: bool) -> list[Life]:
    lives: list[Life] = []
    plan: Record | None = None
    heard = math.nan

    def close(ended: float, failed: bool = False) -> None:
        if plan is not None:
            began, step, size = wall_of(plan), plan["start_step"], plan["world_size"]
            lives.append(Life(began, max(began, ended), step, size, plan, failed))

    for event in files.events:
        wall = wall_of(event)
        if math.isnan(wall):
            continue
        if event["kind"] == "plan":
            close(heard)
            plan = event
        elif event["kind"] in _ENDS:
            ended = event["kind"] == "end"
            planned = ended and (event["status"] == 0 or event["status"] > 128)
            # After its last checkpoint only Ray is put away.
            close(heard if planned else wall, failed=not ended)
            plan = None
        heard = wall
    if plan is not None:  # still at work, or gone without a word
        close(max(heard, files.read_at) if is_running else heard)
    return lives


def _from_log(files: RunFiles) -> list[Life]:
    lives: list[Life] = []
    began = before = 0.0
    start_step = step = 0
    for record in files.train:
        seconds = float(record.get("seconds", math.nan))
        if not math.isfinite(seconds):
            continue
        if seconds < before:
            lives.append(Life(began, began + before, start_step, 0, {}))
            began, start_step = began + before, step
        before, step = seconds, record["step"]
    return [*lives, Life(began, began + before, start_step, 0, {})] if before else lives
