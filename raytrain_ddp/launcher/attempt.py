"""Supervises one attempt: handles the output of all scripts, and ends them when necessary."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raytrain_ddp.errors import signal_name
from raytrain_ddp.launcher.exit_report import RankExit, format_ranks
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.worker_group import WorkerGroup, reason

_TAKE_S = 5.0
_POLL_S = 0.1
_SETTLE_S = 0.3  # simultaneous failures are all reported before we send a signal
_SAY_AFTER_S = 2.0  # when to report which ranks have not ended
_NEVER = float("inf")


class Attempt:
    """One attempt; it ends when every rank has ended: on its own, by our signal, or with its node.

    Args:
        grace_s: from the first signal to SIGKILL.
        stops: the numbers of the signals that the driver has received, in order; grows during the
            attempt.
        tell: shows a line.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        grace_s: float,
        stops: Sequence[int],
        tell: Callable[[str], None],
    ) -> None:
        self._group, self._output, self._grace_s, self._stops = group, output, grace_s, stops
        self._tell = tell
        self._sent = self._stops_seen = 0  # the last signal
        self._failed_at = self._say_at = _NEVER
        # How far the driver's clock is ahead of each node's: the least seen, as news takes a while.
        self._ahead_s: dict[int, float] = {}
        self._ends: dict[int, RankExit] = {}
        self._waiting = {self._ask(w.rank): w.rank for w in group.workers}

    def run(self, check: Callable[[], object]) -> dict[int, RankExit]:
        """How each rank has ended.

        Args:
            check: called continuously; if it raises, the remaining ranks end with their agents.
        """
        while self._waiting:
            check()
            self._listen()
            self._decide(time.monotonic())
        return {rank: self._by_our_clock(rank, end) for rank, end in self._ends.items()}

    def _listen(self) -> None:
        import ray

        for answer in ray.wait([*self._waiting], num_returns=1, timeout=_POLL_S)[0]:
            rank = self._waiting.pop(answer)
            try:
                theirs, news = ray.get(answer)
            except ray.exceptions.RayError as error:
                if rank not in self._ends:
                    self._note(rank, RankExit(None, time.monotonic(), lost=reason(error)))
                continue
            node, ahead_s = self._group.workers[rank].node_rank, time.monotonic() - theirs
            self._ahead_s[node] = min(self._ahead_s.get(node, _NEVER), ahead_s)
            for kind, value in news:
                if kind == "end":
                    self._note(rank, RankExit(**value))
                elif kind != "closed":
                    self._output.take(rank, kind, value)
            if ("closed", None) not in news[-1:]:
                self._waiting[self._ask(rank)] = rank

    def _note(self, rank: int, end: RankExit) -> None:
        self._ends[rank] = end
        if end.failed_at is not None:
            self._failed_at = min(self._failed_at, time.monotonic())

    def _decide(self, now: float) -> None:
        """Sends the signals that are due; a second one of the user's is SIGKILL."""
        if len(self._stops) > self._stops_seen:
            self._stops_seen = len(self._stops)
            is_first = self._stops_seen == 1
            self._send(self._stops[0] if is_first else signal.SIGKILL, now)
        elif now - self._failed_at > _SETTLE_S and not self._sent:
            self._send(signal.SIGTERM, now)
        left = [rank for rank in self._waiting.values() if rank not in self._ends]
        if now > self._say_at and left:
            self._say_at = _NEVER
            sent, ranks = signal_name(self._sent), format_ranks(left)
            then = f"SIGKILL {self._grace_s:g} s after it, or at the next Ctrl-C"
            self._tell(f"{sent} sent; waiting for {ranks} to end ({then})")

    def _send(self, number: int, now: float) -> None:
        grace_s = 0 if number == signal.SIGKILL else self._grace_s
        for rank in self._waiting.values():
            if not grace_s or rank not in self._ends:  # its leftovers have a limit of their own
                self._group.agent(rank).signal.remote(int(number), grace_s)
        self._sent, self._say_at = number, now + _SAY_AFTER_S

    def _by_our_clock(self, rank: int, end: RankExit) -> RankExit:
        if end.status is None:
            return end
        ahead_s = self._ahead_s[self._group.workers[rank].node_rank]
        times = {name: getattr(end, name) + ahead_s for name in ("at", "asked_at", "raised_at")}
        return replace(end, **times)

    def _ask(self, rank: int) -> Any:
        return self._group.agent(rank).take.remote(_TAKE_S)
