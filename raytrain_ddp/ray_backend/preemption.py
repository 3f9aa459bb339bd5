"""Handles preemption notices: a checkpoint at the notice, and another before the node ends.

In between, training continues. After the second one the worker waits until Ray ends it: Ray
would treat a return as the end of the run, and an exception as a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raytrain_ddp.events import Note
from raytrain_ddp.ray_backend.mailbox import Draining
from raytrain_ddp.training.membership import Requests

STOP = 128  # used as a signal number that no signal has
_UNKNOWN_S = 120.0  # Ray's own limit for a notice without an end
_LEAST_MARGIN_S = 5.0


class Notice:
    """Polls Ray for notices, and decides what to do about them and when.

    Args:
        look_every_s: 0: never. Each poll costs all ranks a round trip to an actor.
        tell: receives a note.
        least: how many ranks a notice must concern to stop the training.
    """

    def __init__(self, look_every_s: float, tell: Callable[[Note], None], least: int = 1) -> None:
        self._every_s, self._tell, self._least = look_every_s, tell, least
        self._looked_at = self._asked_at = time.monotonic()
        self._step_s = self._commit_s = 0.0
        self._nodes: list[str] = []
        self._ends_at: float | None = None  # by this host's monotonic clock
        self._save = False

    def requests(self) -> Requests:
        """Rank 0's requests, called once per step."""
        save, self._save = self._save, False
        return self.requests_in_evaluation()._replace(save=save)

    def requests_in_evaluation(self) -> Requests:
        """Called by rank 0 once per step or evaluation chunk; a requested checkpoint waits."""
        now = time.monotonic()
        # The longest of the recent steps or chunks, as an estimate for the next one.
        self._step_s = max(now - self._asked_at, 0.9 * self._step_s)
        self._asked_at = now
        stop = self._ends_at is not None and now >= self._ends_at - self.margin_s()
        look = 0 < self._every_s <= now - self._looked_at
        return Requests(STOP if stop else 0, look=look)

    def look(self, found: Draining | None) -> None:
        """Takes the notice that all ranks have found, if there is one, or what Ray Train found."""
        self._looked_at = time.monotonic()
        if found is None:
            return
        left_s = _UNKNOWN_S if found.deadline_ms is None else found.deadline_ms / 1e3 - time.time()
        stops = len(found.preempted_ranks) >= self._least
        if stops and (self._ends_at is None or found.deadline_ms is not None):
            self._ends_at = self._looked_at + left_s
        if found.preempted_node_ids != self._nodes:
            self._nodes, self._save = found.preempted_node_ids, True
            ranks = ", ".join(map(str, found.preempted_ranks))
            then = "and again before then" if stops else "and the others keep their state"
            text = f"the node of rank {ranks} will be preempted in {max(0.0, left_s):.0f} s"
            self._tell(Note(f"{text}: saving now, {then}"))

    def left_s(self) -> float:
        """How long the nodes will remain."""
        return max(0.0, (self._ends_at or 0.0) - time.monotonic())

    def committed(self, seconds: float) -> None:
        """Records the time of a commit: the last one may take as long."""
        self._commit_s = max(seconds, self._commit_s)

    def margin_s(self) -> float:
        """The time for the last checkpoint: the current step, the commit, and a reserve as long."""
        return max(_LEAST_MARGIN_S, 2 * (self._step_s + self._commit_s))
