"""The store of a generation, through which its ranks connect to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.membership.roster import Seat
from raytrain_ddp.uri import answer_within

_THERE_S = 20.0  # one that has died since it asked is replaced meanwhile
_POLL_S, _POLL_OF_MANY_S = 0.01, 0.0001  # and per rank


def open_store(seat: Seat, offered: Any, rank: int, is_over: Callable[[], bool]) -> Any:
    """Waits until all ranks of a generation have reached its store, and returns it.

    A rank that has died in the meantime is missed here, not while the others connect to it. That
    may be the one that serves the store: torch's client waits for it much longer than the roster
    needs to notice, and without a limit if its machine does not answer.

    Args:
        seat: in the generation.
        offered: the store, if this process serves it.
        rank: of the run.
        is_over: whether the generation is.

    Raises:
        RuntimeError: a rank was lost, or does not come.
    """
    given_up = threading.Event()

    def reach_all() -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, _, port = seat.address.rpartition(":")
        limit = timedelta(seconds=_THERE_S)
        own = offered or TCPStore(host, int(port), is_master=False, timeout=limit)
        store = PrefixStore(seat.key, own)
        failpoint("start.met", rank)
        store.add("there", 1)
        while not given_up.is_set() and store.add("there", 0) < seat.size:
            time.sleep(_POLL_S + _POLL_OF_MANY_S * seat.size)
        return store

    answer = answer_within(_THERE_S, reach_all, is_over)
    given_up.set()
    if isinstance(answer, TimeoutError):
        raise RuntimeError("a rank was lost before the generation was connected")
    if isinstance(answer, Exception):
        raise answer
    return answer
