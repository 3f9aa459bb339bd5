"""Tries again what has failed and may pass: on a storage, and at the start of Ray."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from raytrain_ddp.errors import is_passing

T = TypeVar("T")
Pause = Callable[[float, OSError], bool]

TRIES = 5
OUTAGE_S = 600.0
"""How long training waits for a failed storage when it would otherwise lose steps."""

_LATER_S = 15.0
_LONGEST_S = 60.0  # for all attempts together, as far as we control it


def retry_pauses() -> Iterator[float]:
    """Seconds to wait before each retry: doubled each time, with jitter to avoid synchronized
    retries against an overloaded store."""
    jitter = random.Random()  # the global one may have the same seed on all machines
    for n in range(TRIES - 1):
        yield 2**n * jitter.uniform(0.5, 1)  # at most 15 s in total


def with_backoff(act: Callable[[int], T], pause: Pause, outage_s: float = 0.0) -> T:
    """Calls act(0), act(1), ... until one raises no transient OSError, at most `TRIES` times.

    Args:
        pause: waits the given seconds; returns whether to continue.
        outage_s: keep trying for this long, regardless of the number of tries, even if a disk is
            full.
    """
    failed: float | None = None  # time of the first failure
    pauses, number = retry_pauses(), 0
    while True:
        try:
            return act(number)
        except OSError as error:
            failed, number = failed or time.monotonic(), number + 1
            wait_s = next(pauses, _LATER_S if outage_s else math.inf)
            late = time.monotonic() - failed + wait_s > max(_LONGEST_S, outage_s)
            passes = is_passing(error, if_full=outage_s > 0)
            if not passes or late or not pause(wait_s, error):
                raise
