"""Supervises one attempt: handles the output of all scripts, and ends them when necessary."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain_ddp.errors import signal_name
from raytrain_ddp.launcher.exit_report import RankExit, format_ranks
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.worker_group import WorkerGroup

_TAKE_S = 5.0
_TAKE_BEHIND_S = 0.5  # how often to check whether the console has caught up
_MOST_CHUNKS = 100  # per request
_POLL_S = 0.1
_SETTLE_S = 0.3  # simultaneous failures are all reported before we send a signal
_ENDING_S = 5.0  # likewise for a process exiting after an error: its exit status is informative
_UNANSWERED_S = 10.0  # after SIGKILL, or for a node that is off
_WAITING_AFTER_S, _WAITING_EVERY_S = 2.0, 5.0  # when to report which ranks have not ended


class Attempt:
    """One attempt; it ends when every rank has ended: on its own, by our signal, or with its node.

    Args:
        stops: the numbers of the signals that the driver has received, in order; grows during the
            attempt.
        check: called continuously; if it raises, the remaining ranks end with their agents.
        tell: shows a line.
        stdin: returns data for rank 0's standard input, b"" at the end, and None while there is
            nothing new; or None for no input.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        grace_s: float,
        stops: list[int],
        check: Callable[[], object],
        tell: Callable[[str], None],
        stdin: Callable[[], bytes | None] | None = None,
    ) -> None:
        self._group, self._output, self._grace_s, self._stops = group, output, grace_s, stops
        self._check, self._tell, self._stdin = check, tell, stdin
        self._fed: Any = None
        self._asked = ""
        self._stops_seen = 0
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._say_at: float | None = None
        self.ends: dict[int, RankExit] = {}
        self._waiting = {self._ask(w.rank): w.rank for w in group.workers}

    def run(self) -> dict[int, RankExit]:
        """How each rank has ended."""
        while self._waiting:
            self._check()
            self._listen()
            self._feed()
            self._decide(time.monotonic())
        return self.ends

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
                news = ray.get(answer)
            except ray.exceptions.RayError as error:
                explanation = str(error).strip().splitlines()
                if rank not in self.ends:
                    self._end(rank, RankExit(None, time.monotonic(), lost=_why(explanation)))
                continue
            closed = False
            for each in news:
                if "data" in each:
                    self._output.take(rank, each["stream"], each["data"], each["at"])
                elif "status" in each:
                    sent = signal_name(each["asked"]) if each["asked"] else ""
                    ended = (each["status"], each["at"], each["error"], sent)
                    self._end(rank, RankExit(*ended, asked_at=each["asked_at"]))
                else:
                    closed = True
            if not closed:
                self._waiting[self._ask(rank)] = rank

    def _end(self, rank: int, end: RankExit) -> None:
        self.ends[rank] = end
        if end.failed and self._failed_at is None:
            self._failed_at = time.monotonic()

    def _feed(self) -> None:
        """Forwards standard input piece by piece, each after rank 0 has taken the previous one."""
        import ray

        if self._stdin is None:
            return
        try:
            if self._fed is not None:
                if not ray.wait([self._fed], timeout=0)[0]:
                    return
                if not ray.get(self._fed):
                    self._stdin = self._fed = None
                    return
            data = self._stdin()
            self._fed = None if data is None else self._group.agent(0).feed.remote(data)
        except ray.exceptions.RayError:  # reported by `_listen`
            self._stdin = self._fed = None

    def _decide(self, now: float) -> None:
        """Sends the signals that are due."""
        if len(self._stops) > self._stops_seen:
            self._stops_seen = len(self._stops)
            if self._stops_seen > 2:
                self._give_up(now)
            else:
                self._stop(signal.SIGKILL if self._stops_seen == 2 else self._stops[0], now)
        elif self._failed_at is not None and not self._asked:
            settle_s = _ENDING_S if self._is_ending() else _SETTLE_S
            if now - self._failed_at > settle_s:
                self._stop(signal.SIGTERM, now)
        elif self._kill_at is not None and now > self._kill_at:
            self._stop(signal.SIGKILL, now)
        elif self._give_up_at is not None and now > self._give_up_at:
            self._give_up(now)
        elif self._say_at is not None and now > self._say_at:
            self._say_at = now + _WAITING_EVERY_S
            self._tell_waiting(now)

    def _is_ending(self) -> bool:
        """Whether a rank that is still running has printed the error that is ending it."""
        left = (rank for rank in self._waiting.values() if rank not in self.ends)
        return any(found.ending for found in map(self._output.raised, left) if found is not None)

    def _tell_waiting(self, now: float) -> None:
        left = [rank for rank in self._waiting.values() if rank not in self.ends]
        if not left:
            return
        then = "press Ctrl-C again to stop waiting"
        if self._kill_at is not None:
            again = ", or press Ctrl-C again" if self._stops else ""
            then = f"SIGKILL in {max(0.0, self._kill_at - now):.0f} s{again}"
        self._tell(f"{self._asked} sent; waiting for {format_ranks(left)} to end ({then})")

    def _stop(self, number: int, now: float) -> None:
        self._asked = signal_name(number)
        killed = number == signal.SIGKILL
        for rank in self._waiting.values():
            if killed or rank not in self.ends:  # leftover processes have their own time limit
                with suppress(Exception):
                    instruction = "kill" if killed else str(int(number))
                    self._group.agent(rank).signal.remote(instruction)
        self._say_at = now + _WAITING_AFTER_S
        self._kill_at = None if killed else now + self._grace_s
        self._give_up_at = now + _UNANSWERED_S if killed else None

    def _give_up(self, now: float) -> None:
        """Stops waiting for ranks that have not ended; if not stopped, first waits for last
        lines."""
        end = RankExit(None, now, lost="its node does not respond")
        if len(self._stops) > 2:  # the user no longer wants to wait
            end = RankExit(-signal.SIGKILL, now, asked="SIGKILL")
        for asked, rank in list(self._waiting.items()):
            if rank not in self.ends:
                self.ends[rank] = end
                del self._waiting[asked]
        if self._stops:
            self._waiting.clear()

    def _ask(self, rank: int) -> Any:
        behind = self._output.behind
        wait_s, most = (_TAKE_BEHIND_S, 0) if behind else (_TAKE_S, _MOST_CHUNKS)
        return self._group.agent(rank).take.remote(wait_s, most)


def _why(lines: list[str]) -> str:
    """Ray's explanation of an actor's death, in one line."""
    relevant = [
        line.strip() for line in lines if "node" in line.lower() or "memory" in line.lower()
    ]
    return (relevant or lines or ["its actor died"])[-1][:300]
