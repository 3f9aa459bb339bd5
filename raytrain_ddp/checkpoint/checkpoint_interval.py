"""The interval between checkpoints by time, from their measured cost and the failure rate."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ddp.events import Event, Interval

SHORTEST_S, LONGEST_S = 5.0, 600.0
_GUESSED_STALL_S = 0.1
_STALLS = 16  # averaged over the latest; the first one allocates memory
_PRIOR_FAILURES, _PRIOR_S = 1, 3600.0


def best_interval_s(stall_s: float, mtbf_s: float, commit_s: float) -> float:
    """The interval between checkpoints, in seconds of training, that loses the least time.

    To the first order this is sqrt(2 * stall * MTBF): J. W. Young, CACM 17 (1974); J. T. Daly,
    Future Generation Computer Systems 22 (2006). Bounded by SHORTEST_S and LONGEST_S, and
    at least twice the time of a commit, so that the store is idle half the time.

    Args:
        stall_s: how long a checkpoint blocks the training.
        mtbf_s: mean time between failures.
        commit_s: how long the commit then takes in the background.
    """
    bounded = min(LONGEST_S, max(SHORTEST_S, math.sqrt(2 * stall_s * mtbf_s)))
    return max(bounded, 2 * commit_s)


@dataclass(frozen=True)
class Life:
    """The history of a run before this start; it is stored in its checkpoints.

    Args:
        failures: starts that ended unexpectedly.
        lived_s: seconds of training in all starts, as far as they were committed.
    """

    failures: int = 0
    lived_s: float = 0.0

    def mtbf_s(self, more_s: float) -> float:
        """Mean time between failures after `more_s` of this start: the observed one, combined with
        a prior of one failure per hour while there is little data."""
        return (_PRIOR_S + self.lived_s + more_s) / (_PRIOR_FAILURES + self.failures)

    def document(self, attempt: int, more_s: float, ended: bool) -> dict[str, Any]:
        """The document for a checkpoint of this start. `ended`: the start ends normally with it."""
        return {
            "attempt": attempt,
            "failures": self.failures,
            "lived_s": self.lived_s + more_s,
            "ended": ended,
        }

    @staticmethod
    def after(document: Mapping[str, Any], attempt: int) -> Life:
        """The history of start number `attempt`, which resumes from a checkpoint with this
        document.

        Raises:
            KeyError, TypeError, ValueError: the document is invalid.
        """
        starts = attempt - document["attempt"]
        failed = max(0, starts - (1 if document["ended"] else 0))
        return Life(int(document["failures"]) + failed, float(document["lived_s"]))


class SaveTimer:
    """Decides on rank 0 when a checkpoint is due by time.

    Args:
        every_s: seconds between checkpoints; 0: never; auto: `best_interval_s` of measured values.
        tell: receives an event when the interval is first known, and when it has more than
            doubled or halved.
    """

    def __init__(
        self, every_s: float | Literal["auto"], life: Life, tell: Callable[[Event], None]
    ) -> None:
        self._every_s, self._life, self._tell = every_s, life, tell
        self._began = self._last = time.monotonic()
        self._stalls_s: deque[float] = deque(maxlen=_STALLS)
        self._commit_s = 0.0
        self._reported_s = 0.0

    def lived_s(self) -> float:
        """Seconds since this start began."""
        return time.monotonic() - self._began

    def interval_s(self) -> float:
        if self._every_s != "auto":
            return self._every_s or math.inf
        return best_interval_s(self._stall_s(), self._life.mtbf_s(self.lived_s()), self._commit_s)

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self.interval_s()

    def saved(self, stall_s: float) -> None:
        """Records how long a checkpoint blocked the training; the next interval begins."""
        self._last = time.monotonic()
        self._stalls_s.append(stall_s)
        self._tell_change()

    def committed(self, seconds: float) -> None:
        """Records how long a commit took."""
        self._commit_s = seconds
        self._tell_change()

    def _tell_change(self) -> None:
        if self._every_s != "auto" or not self._stalls_s or not self._commit_s:
            return
        chosen_s = self.interval_s()
        if not self._reported_s / 2 <= chosen_s <= self._reported_s * 2:
            self._reported_s = chosen_s
            self._tell(
                Interval(
                    seconds=chosen_s,
                    stall_s=self._stall_s(),
                    commit_s=self._commit_s,
                    mtbf_s=self._life.mtbf_s(self.lived_s()),
                )
            )

    def _stall_s(self) -> float:
        stalls = self._stalls_s
        return sum(stalls) / len(stalls) if stalls else _GUESSED_STALL_S
