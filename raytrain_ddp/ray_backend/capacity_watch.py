"""Checks that workers can be placed at all: Ray Train itself would wait forever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.events import Alive, Event, Joined, Note, Plan
from raytrain_ddp.membership.roster import CallClock
from raytrain_ddp.ray_backend.cluster import live_node_resources
from raytrain_ddp.ray_backend.failure_policy import KEPT
from raytrain_ddp.ray_backend.placement import Layout, lack_of_room, workers_that_fit

_ASK_EVERY_S = 2.0
_HEAD_DEAD_AFTER_S = 30.0  # after 60 s Ray ends all processes that were connected to it
_SAY_EVERY_S = 30.0
# With room but no workers after this time, others occupy it, or their start keeps failing.
_STARTED_WITHIN_S = 480.0


class LiveNodes:
    """The resources of each live node, queried in a thread because the head may be slow or dead.

    Args:
        kept: the end of the error message: what is not lost with the head.

    Attributes:
        awake: the clock used to decide whether the head is lost; the caller reads it often. It
            stops while this process does (SIGSTOP, a sleeping laptop): what seemed silent then may
            have been active.
        is_lost: whether the head is known to be lost.
    """

    def __init__(self, kept: str = KEPT) -> None:
        self._kept = kept
        self.awake = CallClock()
        self.is_lost = False
        self._living = live_node_resources()
        self._at = self.awake()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_asking, name="nodes", daemon=True).start()

    def __call__(self) -> list[Mapping[str, float]]:
        """The latest answer.

        Raises:
            RetriesExhausted: there has been none for so long that the head must be lost.
        """
        if self.awake() - self._at > _HEAD_DEAD_AFTER_S:
            self.is_lost = True
            silent = f"its head has not answered for {_HEAD_DEAD_AFTER_S:g} s"
            raise RetriesExhausted(f"the connection to Ray is lost: {silent}. {self._kept}")
        return self._living

    def close(self) -> None:
        self._closed.set()

    def _keep_asking(self) -> None:
        while not self._closed.wait(_ASK_EVERY_S):
            with suppress(Exception):  # any exception means no answer
                self._living = live_node_resources()
                self._at = self.awake()


class CapacityWatch:
    """Watches the cluster's nodes, and how long workers take to start; reports what a start is
    waiting for, as nothing else watches the workers until they train.

    Args:
        wait_s: how long room for the minimum number of workers may be missing.
        nodes: the resources of each live node.
        least_left: workers that continue without those that there is no room for; 0: none.
    """

    def __init__(
        self,
        layout: Layout,
        wait_s: float,
        nodes: Callable[[], Sequence[Mapping[str, float]]],
        show: Callable[[Event], None],
        now: Callable[[], float],
        least_left: int = 0,
    ) -> None:
        self._layout, self._wait_s, self._nodes = layout, wait_s, nodes
        self._show, self._now, self._least_left = show, now, least_left
        self._lacking_since: float | None = None
        self._alive = 0
        self.lost()

    def lost(self) -> None:
        """The workers are gone, and Ray starts looking for room for new ones."""
        self._since = self._reported_at = self._now()
        self._is_training = False
        self._start, self._ranks = "", set[int]()  # those that have started

    def take(self, event: Event) -> None:
        match event:
            case Plan():
                self._is_training = True
            case Joined():
                if event.start != self._start:
                    self._start, self._ranks = event.start, set()
                self._ranks.add(event.rank)
            case Alive():
                self._alive = event.count

    def look(self) -> None:
        """Raises PreflightError when no workers can be expected anymore; cheap to call often."""
        now, nodes = self._now(), self._nodes()
        if 0 < self._least_left <= self._alive:  # the others go on
            self._lacking_since = None
        else:
            self._require_room(now, lack_of_room(self._layout, nodes))
        if not self._is_training and now - self._reported_at >= _SAY_EVERY_S:
            self._reported_at = now
            text = f"Ray has not started {self._layout.said} yet"
            if self._ranks:
                ranks = ", ".join(map(str, sorted(self._ranks)))
                text = f"the workers are not training yet; started so far: rank {ranks}"
            has = f"room for {workers_that_fit(self._layout, nodes)} on {len(nodes)} node(s)"
            self._show(Note(f"{text}, after {now - self._since:.0f} s; {has}"))

    def _require_room(self, now: float, lack: str) -> None:
        wanted = self._layout.said
        if not lack:
            self._lacking_since = None
            has_none = not self._ranks and not self._is_training  # a report may be lost
            if has_none and now - self._since > _STARTED_WITHIN_S:
                raise PreflightError(
                    f"Ray has not started {wanted} in {_STARTED_WITHIN_S:g} s, although the "
                    "cluster has room: is it busy (`ray status`), or do its workers fail (logs/)?"
                )
        elif self._lacking_since is None:
            self._lacking_since = now
            self._show(Note(f"waiting up to {self._wait_s:g} s for {wanted}: {lack}"))
        elif now - self._lacking_since > self._wait_s:
            raise PreflightError(
                f"the cluster has no room for {wanted}, and no more in {self._wait_s:g} s "
                f"(scaling.wait_s): {lack}. Committed checkpoints are kept. Use fewer workers with "
                "--scaling.num-workers, or MIN:MAX."
            )
