"""Whether there will be workers at all: Ray Train itself waits for room for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.orchestration.resources import Layout, room

_LOOK_EVERY_S = 2.0
# With room enough, but no worker in it: it is taken by others, or their start fails over and over.
_STARTED_WITHIN_S = 480.0


class Waiting:
    """Watches the cluster's nodes all the time, and the time that workers take to come.

    Args:
        wait_s: how long room for the fewest workers may be lacking.
        nodes: the resources of each node that lives.
        changed: called when there are other nodes than before.
    """

    def __init__(
        self,
        layout: Layout,
        wait_s: float,
        nodes: Callable[[], Sequence[Mapping[str, float]]],
        changed: Callable[[], None],
        show: Callable[[Mapping[str, Any]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout, self._wait_s, self._nodes, self._changed = layout, wait_s, nodes, changed
        self._show, self._now = show, now
        self._before = len(nodes())
        self._since: float | None = now()
        self._lacking_since: float | None = None
        self._looked_at = now()

    def lost(self) -> None:
        """The workers are gone, and Ray begins to look for room for others."""
        self._since = self._now()

    def joined(self) -> None:
        self._since = None

    def look(self) -> None:
        """Raises PreflightError when no workers can be expected any more; cheap to call often."""
        now = self._now()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        said, nodes = self._layout.said, self._nodes()
        if len(nodes) != self._before:
            self._before = len(nodes)
            self._changed()
        has = room(self._layout, nodes)
        if has >= self._layout.least:
            self._lacking_since = None
            if self._since is not None and now - self._since > _STARTED_WITHIN_S:
                raise PreflightError(
                    f"Ray has not started {said} in {_STARTED_WITHIN_S:g} s, although the cluster "
                    "has that room: is it busy (`ray status`), or does their start fail (logs/)?"
                )
            return
        lack = f"for {said}, each with {dict(self._layout.per_worker)}, there is room for {has}"
        if self._lacking_since is None:
            self._lacking_since = now
            text = f"waiting up to {self._wait_s:g} s: {lack} on {len(nodes)} node(s)"
            self._show({"kind": "note", "text": text})
        if now - self._lacking_since > self._wait_s:
            raise PreflightError(
                f"{lack} on the cluster's {len(nodes)} node(s), and {self._wait_s:g} s "
                "(scaling.wait_s) brought no more. What is committed is kept. Take fewer with "
                "--scaling.num-workers, or MIN:MAX of them."
            )
