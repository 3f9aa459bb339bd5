"""One attempt: listens to all scripts until they have ended, and ends them when it must."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain_ddp.orchestration.run.crew import Crew
from raytrain_ddp.orchestration.run.output import Output
from raytrain_ddp.orchestration.run.verdict import End, signal_name

_TAKE_S = 5.0
_TAKE_BEHIND_S = 0.5  # how often it is looked whether the console has caught up
_MOST_LINES = 500  # at once
_POLL_S = 0.1
_SETTLE_S = 0.3  # failures of the same moment shall all be told, and not be cut short by our signal
_UNANSWERED_S = 10.0  # after SIGKILL, or for a node that is off


class Attempt:
    """Ends when every rank has: by itself, by our signal, or with its node.

    Args:
        stops: the numbers of the signals that the driver has got, in order; it grows meanwhile.
        check: called all the time; may raise, and all that is left ends with its agent.
    """

    def __init__(
        self,
        crew: Crew,
        output: Output,
        grace_s: float,
        stops: list[int],
        check: Callable[[], object],
    ) -> None:
        self._crew, self._output, self._grace_s, self._stops = crew, output, grace_s, stops
        self._check = check
        self._asked = ""
        self._stops_seen = 0
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self.ends: dict[int, End] = {}
        self._waiting = {self._ask(w.rank): w.rank for w in crew.workers}

    def run(self) -> dict[int, End]:
        """How each rank has ended."""
        while self._waiting:
            self._check()
            self._listen()
            self._decide(time.monotonic())
        return self.ends

    def _listen(self) -> None:
        import ray

        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=_POLL_S)
        if ready:
            many = len(self._waiting)
            ready, _ = ray.wait(list(self._waiting), num_returns=many, timeout=0)
        for asked in ready:
            rank = self._waiting.pop(asked)
            try:
                news = ray.get(asked)
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()
                if rank not in self.ends:
                    self._end(rank, End(None, time.monotonic(), lost=_why(said)))
                continue
            closed = False
            for each in news:
                if "line" in each:
                    self._output.line(rank, each["stream"], each["line"], each["at"])
                elif "status" in each:
                    asked_for = signal_name(each["asked"]) if each["asked"] else ""
                    self._end(rank, End(each["status"], each["at"], each["error"], asked_for))
                else:
                    closed = True
            if not closed:
                self._waiting[self._ask(rank)] = rank

    def _end(self, rank: int, end: End) -> None:
        self.ends[rank] = end
        if end.failed and self._failed_at is None:
            self._failed_at = time.monotonic()

    def _decide(self, now: float) -> None:
        """What signals are due."""
        if len(self._stops) > self._stops_seen:
            again = len(self._stops) > 1
            self._stops_seen = len(self._stops)
            self._stop(signal.SIGKILL if again else self._stops[0], now)
        elif self._failed_at is not None and not self._asked:
            if now - self._failed_at > _SETTLE_S:
                self._stop(signal.SIGTERM, now)
        elif self._kill_at is not None and now > self._kill_at:
            self._stop(signal.SIGKILL, now)
        elif self._give_up_at is not None and now > self._give_up_at:
            self._give_up(now)

    def _stop(self, number: int, now: float) -> None:
        self._asked = signal_name(number)
        killed = number == signal.SIGKILL
        for rank in self._waiting.values():
            if killed or rank not in self.ends:  # what a script has left has its own time to end
                with suppress(Exception):
                    word = "kill" if killed else str(int(number))
                    self._crew.agent(rank).signal.remote(word)
        self._kill_at = None if killed else now + self._grace_s
        self._give_up_at = now + _UNANSWERED_S if killed else None

    def _give_up(self, now: float) -> None:
        """Waits no longer for ranks that have not ended; for the last lines only if not stopped."""
        for asked, rank in list(self._waiting.items()):
            if rank not in self.ends:
                self.ends[rank] = End(None, now, lost="its node does not answer")
                del self._waiting[asked]
        if self._stops:
            self._waiting.clear()

    def _ask(self, rank: int) -> Any:
        behind = self._output.behind
        wait_s, most = (_TAKE_BEHIND_S, 0) if behind else (_TAKE_S, _MOST_LINES)
        return self._crew.agent(rank).take.remote(wait_s, most)


def _why(said: list[str]) -> str:
    """Ray's explanation in a line, from the error of an actor that has died."""
    told = [line.strip() for line in said if "node" in line.lower() or "memory" in line.lower()]
    return (told or said or ["its actor died"])[-1][:300]
