"""Connects the processes that torchrun or another launcher starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from raytrain_ddp.errors import PreflightError, first_line
from raytrain_ddp.uri import answer_within

LIMIT_S = 600.0  # as torchrun waits for its nodes
_FIRST_NOTE_S = 5.0
_POLL_S = 0.05
UNSET = (
    "Start all WORLD_SIZE processes with the same command line, as torchrun does; for a single "
    "process, unset RANK and WORLD_SIZE."
)


class Waiting:
    """Reports at growing intervals what this process waits for, and for how long.

    Args:
        what: what is missing now.
        tell: shows a line; None: on standard error.
    """

    def __init__(self, what: Callable[[], str], tell: Callable[[str], None] | None) -> None:
        self._what, self._tell = what, tell or (lambda text: print(text, file=sys.stderr))
        self._began, self._next_s = time.monotonic(), _FIRST_NOTE_S

    def look(self) -> bool:
        """Reports it if it is time; returns whether the time limit has passed."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._next_s *= 2
            self._tell(f"{self._what()}: {waited_s:.0f} s so far, at most {LIMIT_S:.0f} s")
        return waited_s >= LIMIT_S


def join_launched(
    rank: int, size: int, connect: Callable[[Any], None], tell: Callable[[str], None] | None
) -> None:
    """Waits until all processes have reached their store, and connects them through it.

    The thread that calls it can be interrupted by signals at any time.

    Args:
        connect: receives the store; called in another thread.
        tell: see Waiting.

    Raises:
        PreflightError: some did not connect, or this one cannot reach the others.
    """
    import torch.distributed as dist

    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    there, given_up = 0, threading.Event()

    def join() -> None:
        nonlocal there
        limit = timedelta(seconds=LIMIT_S)
        # With a size of 1, the store does not silently wait for the others.
        store, _, _ = next(dist.rendezvous("env://", rank, 1, timeout=limit))  # type: ignore[attr-defined]
        # torchrun's store survives a restart, with the addresses of the previous processes.
        start = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
        if store.add(f"rank-{rank}", 1) > 1:
            raise PreflightError(f"another process at {at} has RANK = {rank}, too. {UNSET}")
        store.add("there", 1)
        while (there := store.add("there", 0)) < size and not given_up.is_set():
            time.sleep(_POLL_S)
        connect(store)

    def what() -> str:
        if 0 < there < size:
            return f"rank {rank} waits for {size - there} of {size} processes at {at}"
        return f"rank {rank} waits for " + (f"its {size - 1} peers" if there else f"rank 0 at {at}")

    answer = answer_within(LIMIT_S, join, Waiting(what, tell).look)
    given_up.set()
    if isinstance(answer, PreflightError):
        raise answer
    if isinstance(answer, TimeoutError):
        raise PreflightError(f"{what()}, which did not connect within {LIMIT_S:g} s. {UNSET}")
    if isinstance(answer, Exception):
        raise PreflightError(f"rank {rank} cannot connect at {at}: {first_line(answer)} {UNSET}")
