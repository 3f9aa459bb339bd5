"""The starts of a run, and all of them on one axis of time.

A record of the log says how long its own start had lasted; the events say when that start began.
What a later start did again is no longer in the log: there the axis has a gap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from raytrain_ddp.orchestration.report.reading import Record, RunFiles

_CUT_LEAST_S, _CUT_SHARE = 60.0, 0.15  # longer pauses, also of the time at work, are left out
_ENDS = ("failed", "preempted", "end")


@dataclass(frozen=True)
class Life:
    """One start of the workers: from the plan to the last word of it, in seconds since 1970."""

    began: float
    ended: float
    start_step: int
    world_size: int  # 0: not known
    plan: Record


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
        firsts, owners = [], []
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
    worked_s = sum(life.ended - life.began for life in lives)
    least_s = max(_CUT_LEAST_S, _CUT_SHARE * worked_s)
    pauses = [(one.ended, two.began) for one, two in zip(lives, lives[1:], strict=False)]
    return Timeline(lives, [pause for pause in pauses if pause[1] - pause[0] > least_s])


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

    def close(ended: float) -> None:
        if plan is not None:
            began = wall_of(plan)
            lives.append(
                Life(began, max(began, ended), plan["start_step"], plan["world_size"], plan)
            )

    for event in files.events:
        wall = wall_of(event)
        if math.isnan(wall):
            continue
        if event["kind"] == "plan":
            close(heard)
            plan = event
        elif event["kind"] in _ENDS:
            planned = event["kind"] == "end" and (event["status"] == 0 or event["status"] > 128)
            close(heard if planned else wall)  # after its last checkpoint only Ray is put away
            plan = None
        heard = wall
    if plan is not None:  # still at work, or gone without a word
        last = [r["seconds"] for r in files.train[-1:] if r["step"] > plan["start_step"]]
        known = [wall_of(plan) + seconds for seconds in last if math.isfinite(seconds)]
        close(max([heard, *known, *([files.read_at] if is_running else [])]))
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
