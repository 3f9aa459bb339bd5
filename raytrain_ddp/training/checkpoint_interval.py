"""How long to train between two checkpoints by the clock."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ddp.events import Interval
from raytrain_ddp.messages import Event

SHORTEST_S, LONGEST_S = 5.0, 600.0
_GUESSED_STALL_S = 0.1
_STALLS = 16  # the latest, of which the mean is taken: the first one allocates
_PRIOR_FAILURES, _PRIOR_S = 1, 3600.0


def best_interval_s(stall_s: float, mtbf_s: float, commit_s: float) -> float:
    """The seconds of training between checkpoints that lose the least time.

    To the first order this is sqrt(2 * stall * MTBF): J. W. Young, CACM 17 (1974); J. T. Daly,
    Future Generation Computer Systems 22 (2006). Bounded by SHORTEST_S and LONGEST_S; and
    never below twice the time of a commit, so that the store is idle half the time.

    Args:
        stall_s: for how long a checkpoint stops the training.
        mtbf_s: mean time between failures.
        commit_s: how long it then takes, in the background, until a checkpoint is committed.
    """
    bounded = min(LONGEST_S, max(SHORTEST_S, math.sqrt(2 * stall_s * mtbf_s)))
    return max(bounded, 2 * commit_s)


@dataclass(frozen=True)
class Life:
    """What a run went through before this start; it is carried in its checkpoints.

    Args:
        failures: starts that ended without having been asked to.
        lived_s: seconds of training in all starts, as far as they were committed.
    """

    failures: int = 0
    lived_s: float = 0.0

    def mtbf_s(self, more_s: float) -> float:
        """Mean time between failures after `more_s` of this start: what was seen, and one failure
        an hour as long as little was seen."""
        return (_PRIOR_S + self.lived_s + more_s) / (_PRIOR_FAILURES + self.failures)

    def document(self, attempt: int, more_s: float, ended: bool) -> dict[str, Any]:
        """For a checkpoint of this start. `ended`: the start ends with it, as it should."""
        return {
            "attempt": attempt,
            "failures": self.failures,
            "lived_s": self.lived_s + more_s,
            "ended": ended,
        }

    @staticmethod
    def after(document: Mapping[str, Any], attempt: int) -> Life:
        """That of start number `attempt`, which goes on from a checkpoint with this document.

        Raises:
            KeyError, TypeError, ValueError: it is another one.
        """
        starts = attempt - document["attempt"]
        failed = max(0, starts - (1 if document["ended"] else 0))
        return Life(int(document["failures"]) + failed, float(document["lived_s"]))


class SaveTimer:
    """Says when the clock asks for a checkpoint; rank 0's.

    Args:
        every_s: seconds between two; 0: never; auto: `best_interval_s` of what is measured.
        tell: is given an event when the interval is found, and when it has more than doubled
            or halved.
    """

    def __init__(
        self, every_s: float | Literal["auto"], life: Life, tell: Callable[[Event], None]
    ) -> None:
        self._every_s, self._life, self._tell = every_s, life, tell
        self._began = self._last = time.monotonic()
        self._stalls_s: deque[float] = deque(maxlen=_STALLS)
        self._commit_s = 0.0
        self._told_s = 0.0

    def lived_s(self) -> float:
        """Seconds of this start."""
        return time.monotonic() - self._began

    def interval_s(self) -> float:
        if self._every_s != "auto":
            return self._every_s or math.inf
        return best_interval_s(self._stall_s(), self._life.mtbf_s(self.lived_s()), self._commit_s)

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self.interval_s()

    def saved(self, stall_s: float) -> None:
        """A checkpoint has stopped the training for so long; the next interval begins."""
        self._last = time.monotonic()
        self._stalls_s.append(stall_s)
        self._tell_change()

    def committed(self, seconds: float) -> None:
        """A commit has taken so long."""
        self._commit_s = seconds
        self._tell_change()

    def _tell_change(self) -> None:
        if self._every_s != "auto" or not self._stalls_s or not self._commit_s:
            return
        chosen_s = self.interval_s()
        if not self._told_s / 2 <= chosen_s <= self._told_s * 2:
            self._told_s = chosen_s
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
