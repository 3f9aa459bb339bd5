"""The mailbox between the workers and the driver of a run.

A small actor: rank 0 pushes events, the driver takes them, and a stop request travels in the reply
to a push. It imports almost nothing, so its process starts quickly.

If it is killed, Ray restarts it with empty state: so the driver repeats its requests whenever it
takes events, and rank 0 keeps events until the driver has confirmed them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raytrain_ddp.events import Alive, Died, Event, Joined
from raytrain_ddp.membership.roster import OVER, CallClock, Member, Roster, Seat
from raytrain_ddp.ray_backend.ray_private import draining_nodes


class Answer(NamedTuple):
    """The reply to a push.

    Args:
        stop: the number of the signal that requested a stop, else 0.
        mailbox: identifies the incarnation of the mailbox that replies.
        taken: the number of this sender's events that the driver has taken.
        newcomer: whether a process waits to join; see `Roster.has_newcomer`.
    """

    stop: int
    mailbox: str
    taken: int
    newcomer: bool = False


@dataclass(frozen=True)
class Draining:
    """Nodes of workers that will be taken away."""

    deadline_ms: int | None  # since the epoch; None: unknown
    nodes: list[str]  # ids
    ranks: list[int]


def _draining(node_ids: Mapping[int, str]) -> Draining | None:
    """Which of these nodes, given by rank, will be taken away."""
    ends_ms = draining_nodes()
    lost = {rank: node for rank, node in node_ids.items() if node in ends_ms}
    known = [ends_ms[node] for node in lost.values() if ends_ms[node]]
    return Draining(min(known, default=None), sorted({*lost.values()}), [*lost]) if lost else None


class Mailbox:
    """Events in order, and the signal that stops the run."""

    def __init__(self) -> None:
        self._name = os.urandom(8).hex()
        self._events: list[tuple[str, int, Event]] = []  # sender, number, event
        self._taken: Mapping[str, int] = {}
        self._stop = 0
        self._over = False
        self._statuses: dict[int, Any] = {}  # of workers that make no progress
        self._hanging_start = ""  # their start
        self._roster, self._alive = Roster(CallClock()), 0

    def push(self, events: Sequence[Event], sender: str = "", first: int = 0) -> Answer:
        """Adds events; those of a named `sender` are numbered from `first`."""
        self._events += [(sender, first + n, event) for n, event in enumerate(events)]
        for event in events:
            for rank in event.texts if isinstance(event, Died) else ():
                self._roster.died(rank)
        taken = self._taken.get(sender, 0)
        return Answer(self._stop, self._name, taken, self._roster.has_newcomer())

    def take(self, taken: Mapping[str, int], stop: int = 0) -> list[tuple[str, int, Event]]:
        """The events since the last call, each with its sender and number.

        Args:
            taken: how many of each sender the driver has so far.
            stop: the number of the signal that should stop the run, else 0.
        """
        self._taken, self._stop = taken, stop
        if (alive := self._roster.alive()) != self._alive:
            self._alive = alive
            self.push([Alive(alive)])
        events, self._events = self._events, []
        return events

    def meet(self, member: Member) -> Seat | None:
        """See `Roster.meet`; all members of a complete generation have joined a start."""
        if self._over:
            return Seat(OVER)
        seat, nodes = self._roster.meet(member)
        if seat is not None:
            self.push([Joined(seat.generation, rank, node) for rank, node in nodes.items()])
        return seat

    def has_formed(self) -> bool:
        """See `Roster.has_formed`."""
        return self._roster.has_formed()

    def is_over(self, member: Member) -> bool:
        """See `Roster.is_over`."""
        return self._roster.is_over(member)

    def preemption(self) -> Draining | None:
        """Which nodes of the newest generation will be taken away."""
        return _draining(self._roster.node_ids)

    def exchange_status(self, start: str, rank: int, status: Any) -> dict[int, Any]:
        """Publishes the status of a rank of `start`, or removes it if None; returns the status of
        all ranks."""
        if start != self._hanging_start:
            self._hanging_start, self._statuses = start, {}
        self._statuses.pop(rank, None)
        if status is not None:
            self._statuses[rank] = status
        return self._statuses

    def close(self) -> None:
        """The driver has given up: workers that Ray starts from now on must end at once."""
        self._over = True


class Outbox:
    """Rank 0's events, kept until the driver has them. Any thread adds, one does the rest."""

    def __init__(self) -> None:
        self._new: deque[Event] = deque()
        self._sender = os.urandom(8).hex()
        self._kept: deque[Event] = deque()
        self._first = 0  # the number of the first event kept
        self._sent = 0  # the number of the first event not in the mailbox
        self._mailbox = ""

    def add(self, event: Event) -> None:
        self._new.append(event)

    def letter(self) -> tuple[list[Event], str, int]:
        """The events not in the mailbox yet, as arguments of `Mailbox.push`."""
        for _ in range(len(self._new)):
            self._kept.append(self._new.popleft())
        first = self._sent
        events = list(self._kept)[first - self._first :]
        self._sent += len(events)
        return events, self._sender, first

    def answered(self, answer: Answer) -> None:
        """Drops events that the driver has. Events lost with an earlier incarnation of the mailbox
        are sent again."""
        while self._first < min(answer.taken, self._sent):
            self._kept.popleft()
            self._first += 1
        if answer.mailbox != self._mailbox and self._mailbox:
            self._sent = self._first
        self._mailbox = answer.mailbox

    def is_empty(self) -> bool:
        """Whether the driver has everything."""
        return not self._kept and not self._new


class Inbox:
    """Collects the events that the driver takes from the mailbox, each exactly once."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def sort(self, letters: Sequence[tuple[str, int, Event]]) -> list[Event]:
        """The new events among these. An out-of-order event is skipped: the events before it were
        lost with the mailbox, and all of them are sent again."""
        new = []
        for sender, number, event in letters:
            if not sender or number == self.taken.get(sender, 0):
                new.append(event)
                if sender:
                    self.taken[sender] = number + 1
        return new
