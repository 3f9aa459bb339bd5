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
from typing import Any, NamedTuple

from raytrain_ddp.messages import Event, Joined
from raytrain_ddp.training.generations import OVER, Generation, Member, Roster


class Answer(NamedTuple):
    """The reply to a push.

    Args:
        stop: the number of the signal that requested a stop, else 0.
        mailbox: identifies the incarnation of the mailbox that replies.
        taken: the number of this sender's events that the driver has taken.
    """

    stop: int
    mailbox: str
    taken: int


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
        self._roster = Roster()

    def push(self, events: Sequence[Event], sender: str = "", first: int = 0) -> Answer:
        """Adds events; those of a named `sender` are numbered from `first`."""
        self._events += [(sender, first + n, event) for n, event in enumerate(events)]
        return Answer(self._stop, self._name, self._taken.get(sender, 0))

    def take(self, taken: Mapping[str, int], stop: int = 0) -> list[tuple[str, int, Event]]:
        """The events since the last call, each with its sender and number.

        Args:
            taken: how many of each sender the driver has so far.
            stop: the number of the signal that should stop the run, else 0.
        """
        self._taken, self._stop = taken, stop
        events, self._events = self._events, []
        return events

    def join(self, start: str, rank: int, node: str) -> bool:
        """A worker of `start` begins; returns whether it may."""
        self.push([Joined(start, rank, node)])
        return not self._over

    def meet(self, member: Member) -> Generation | None:
        """See `Roster.meet`; all members of a complete generation have joined a start."""
        if self._over:
            return Generation(OVER, "")
        found, members = self._roster.meet(member)
        if found is not None:
            self.push([Joined(found.name, each.rank, each.node) for each in members])
        return found

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
    """Rank 0's events, kept until the driver has them.

    Args:
        sender: a name that is unique to this start of the workers.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._kept: deque[Event] = deque()
        self._first = 0  # the number of the first event kept
        self._sent = 0  # the number of the first event not in the mailbox
        self._mailbox = ""

    def add(self, event: Event) -> None:
        self._kept.append(event)

    def letter(self) -> tuple[list[Event], str, int]:
        """The events not in the mailbox yet, as arguments of `Mailbox.push`."""
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
        return not self._kept


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
