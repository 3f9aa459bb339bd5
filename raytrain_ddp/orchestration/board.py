"""What the workers and the driver tell each other while a run lasts.

A small actor: rank 0 pushes events, the driver takes them, and a wish to stop goes the other way as
the answer to a push. Imports nothing, so that its process starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Board:
    """Events in order, and the signal by which the run shall stop."""

    def __init__(self) -> None:
        self._events: list[Mapping[str, Any]] = []
        self._stop = 0
        self._over = False
        self._signs: dict[int, Any] = {}  # of workers that get on no more
        self._signing = ""  # their start

    def push(self, events: list[Mapping[str, Any]]) -> int:
        """Adds events; returns the number of the signal that asks for an end, else 0."""
        self._events += events
        return self._stop

    def take(self) -> list[Mapping[str, Any]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def join(self, start: str, rank: int, node: str) -> bool:
        """A worker begins, as one of those of `start`; returns whether it shall."""
        self._events.append({"kind": "joined", "start": start, "rank": rank, "node": node})
        return not self._over

    def meet(self, start: str, rank: int, sign: Any) -> dict[int, Any]:
        """Puts what a rank of `start` says of itself, or takes it away if it is None; returns what
        all of them say."""
        if start != self._signing:
            self._signing, self._signs = start, {}
        self._signs.pop(rank, None)
        if sign is not None:
            self._signs[rank] = sign
        return self._signs

    def close(self) -> None:
        """The driver has given up: workers that Ray starts from now on shall end at once."""
        self._over = True

    def ask_stop(self, signal_number: int) -> None:
        self._stop = signal_number
