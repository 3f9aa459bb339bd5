"""The store of a generation, through which its ranks connect to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.membership.roster import Seat

_THERE_S = 20.0  # one that has died since it asked is replaced meanwhile
_LOOK_S = 0.5  # how often the roster is asked meanwhile
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
    opening, began = _Opening(seat, offered, rank), time.monotonic()
    while not opening.is_done.wait(_LOOK_S):
        if time.monotonic() - began > _THERE_S or is_over():
            opening.is_given_up = True
            raise RuntimeError("a rank was lost before the generation was connected")
    if opening.error:
        raise opening.error
    return opening.store


class _Opening:
    """Does it in a thread, which nobody has to wait for.

    Attributes:
        is_done: set once `store` or `error` is there.
        is_given_up: set by the one that no longer waits.
    """

    def __init__(self, seat: Seat, offered: Any, rank: int) -> None:
        self._seat, self._offered, self._rank = seat, offered, rank
        self.is_done, self.is_given_up = threading.Event(), False
        self.store: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="opening store", daemon=True).start()

    def _run(self) -> None:
        try:
            self.store = self._reach_all()
        except Exception as error:
            self.error = error
        self.is_done.set()

    def _reach_all(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        host, _, port = self._seat.address.rpartition(":")
        limit = timedelta(seconds=_THERE_S)
        own = self._offered or TCPStore(host, int(port), is_master=False, timeout=limit)
        store, size = PrefixStore(self._seat.key, own), self._seat.size
        failpoint("start.met", self._rank)
        store.add("there", 1)
        while not self.is_given_up and store.add("there", 0) < size:
            time.sleep(_POLL_S + _POLL_OF_MANY_S * size)
        return store
