"""Supervises one attempt: handles the output of all scripts, and ends them when necessary."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raytrain_ddp.errors import signal_name
from raytrain_ddp.launcher.exit_report import RankExit, format_ranks
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.worker_group import WorkerGroup, reason

_TAKE_S = 5.0
_POLL_S = 0.1
_SETTLE_S = 0.3  # simultaneous failures are all reported before we send a signal
_UNANSWERED_S = 10.0  # after SIGKILL, or for a node that is off
_WAITING_AFTER_S = 2.0  # when to report which ranks have not ended
_NEVER = float("inf")


class Attempt:
    """One attempt; it ends when every rank has ended: on its own, by our signal, or with its node.

    Args:
        stops: the numbers of the signals that the driver has received, in order; grows during the
            attempt.
        check: called continuously; if it raises, the remaining ranks end with their agents.
        tell: shows a line.
        feeds: whether rank 0 gets this process's standard input.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        grace_s: float,
        stops: Sequence[int],
        check: Callable[[], object],
        tell: Callable[[str], None],
        feeds: bool,
    ) -> None:
        self._group, self._output, self._grace_s, self._stops = group, output, grace_s, stops
        self._check, self._tell, self._feeds = check, tell, feeds
        self._fed: Any = None
        self._asked = 0  # the last signal that was sent
        self._stops_seen = 0
        self._failed_at = self._give_up_at = self._say_at = _NEVER
        # How far the driver's clock is ahead of each node's: the least seen, as news takes a while.
        self._ahead_s: dict[int, float] = {}
        self._ends: dict[int, RankExit] = {}
        self._waiting = {self._ask(w.rank): w.rank for w in group.workers}

    def run(self) -> dict[int, RankExit]:
        """How each rank has ended."""
        while self._waiting:
            self._check()
            self._listen()
            self._feed()
            self._decide(time.monotonic())
        return {rank: self._by_our_clock(rank, end) for rank, end in self._ends.items()}

    def _by_our_clock(self, rank: int, end: RankExit) -> RankExit:
        if end.status is None:
            return end
        ahead_s = self._ahead_s[self._group.workers[rank].node_rank]
        times = {name: getattr(end, name) + ahead_s for name in ("at", "asked_at", "raised_at")}
        return replace(end, **times)

    def _listen(self) -> None:
        import ray

        asked = [*self._waiting, *([] if self._fed is None else [self._fed])]
        ready, _ = ray.wait(asked, num_returns=1, timeout=_POLL_S)
        if ready:
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
        for answer in ready:
            if answer not in self._waiting:
                continue
            rank = self._waiting.pop(answer)
            try:
                theirs, news = ray.get(answer)
            except ray.exceptions.RayError as error:
                lost = RankExit(None, time.monotonic(), lost=reason(error))
                self._note(rank, self._ends.get(rank, lost))
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

    def _feed(self) -> None:
        """Forwards standard input piece by piece, each after rank 0 has taken the previous one."""
        import ray

        try:
            if self._fed is not None:
                if not ray.wait([self._fed], timeout=0)[0]:
                    return
                self._feeds, self._fed = ray.get(self._fed), None
            if self._feeds and select.select([0], [], [], 0)[0]:
                self._fed = self._group.agent(0).feed.remote(os.read(0, 1 << 18))
        except (ray.exceptions.RayError, OSError):  # the former is reported by `_listen`
            self._feeds, self._fed = False, None

    def _decide(self, now: float) -> None:
        """Sends the signals that are due."""
        if len(self._stops) > self._stops_seen:
            self._stops_seen = len(self._stops)
            self._send(signal.SIGKILL if self._stops_seen > 1 else self._stops[0], now)
        elif now - self._failed_at > _SETTLE_S and not self._asked:
            self._send(signal.SIGTERM, now)
        elif now > self._give_up_at and self._asked != signal.SIGKILL:
            self._send(signal.SIGKILL, now)
        elif now > self._give_up_at:
            self._give_up(now)
        elif now > self._say_at:
            self._say_at = _NEVER
            self._tell_waiting(now)

    def _running(self) -> list[int]:
        return [rank for rank in self._waiting.values() if rank not in self._ends]

    def _tell_waiting(self, now: float) -> None:
        if left := self._running():
            again = ", or press Ctrl-C again" if self._stops_seen == 1 else ""
            then = "SIGKILL" if self._asked != signal.SIGKILL else "giving up"
            then = f"{then} in {max(0.0, self._give_up_at - now):.0f} s{again}"
            sent = signal_name(self._asked)
            self._tell(f"{sent} sent; waiting for {format_ranks(left)} to end ({then})")

    def _send(self, number: int, now: float) -> None:
        self._asked = number
        is_kill = number == signal.SIGKILL
        # Processes that a script left behind have a time limit of their own.
        for rank in [*self._waiting.values()] if is_kill else self._running():
            with suppress(Exception):
                self._group.agent(rank).signal.remote("kill" if is_kill else str(int(number)))
        self._say_at = now + _WAITING_AFTER_S
        self._give_up_at = now + (_UNANSWERED_S if is_kill else self._grace_s)

    def _give_up(self, now: float) -> None:
        """Stops waiting for ranks that have not ended, and if stopped, for the last lines."""
        for answer, rank in [*self._waiting.items()]:
            if rank not in self._ends:
                self._ends[rank] = RankExit(None, now, lost="its node does not respond")
            elif not self._stops:
                continue
            del self._waiting[answer]
        self._give_up_at = _NEVER

    def _ask(self, rank: int) -> Any:
        return self._group.agent(rank).take.remote(_TAKE_S)
