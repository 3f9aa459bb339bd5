"""Which processes form which generation of a run's workers.

Kept by a small actor, so nothing here needs torch or Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_ASKED_S = 3.0  # a member that has not asked for so long no longer waits
_POLL_S, _POLL_OF_MANY_S = 0.05, 0.001  # and per rank
_BEAT_S, _BEAT_OF_MANY_S = 1.0, 0.004
# How long a process is silent before it counts as dead: if others have lost their connection to
# somebody, and if nothing else indicates it. Ray usually reports a death within a second, and the
# watchdog finds one that is stopped.
_SILENT_S, _SILENT_ALONE_S = 6.0, 120.0
_CHECK_S = 0.25
_LONGEST_S = 1.0  # between two calls; the driver alone calls ten times a second
_TOGETHER_S, _QUIET_S = 10.0, 2.0  # how long a newcomer waits for others; after the last of them
_WITHOUT_S = 60.0  # how long those that begin wait for further ones of the first ranks
OVER = -1
"""The number of the generation that is returned when the run is over."""


@dataclass(frozen=True)
class Member:
    """A process of a rank that is in a generation, or wants to join the next one.

    Args:
        rank: its rank in the run.
        size: the number of ranks that the run begins with; further ranks join later.
        least: how many may train without the others; `size`: the roster waits for all.
        token: identifies the process.
        last: the number of its newest generation; 0: none.
        node: its host name.
        node_id: Ray's id of its node.
        address: HOST:PORT of the store that it offers, as the first member has to; else "".
        most: the most ranks that the run may have; 0: `size`.
    """

    rank: int
    size: int
    least: int
    token: str
    last: int
    node: str
    node_id: str = ""
    address: str = ""
    most: int = 0

    @property
    def may_miss_others(self) -> bool:
        """Whether the run may continue without some of its ranks."""
        return self.least < max(self.size, self.most)


class Seat(NamedTuple):
    """A process's place in a generation: a process group with a store of its own.

    Args:
        number: the number of the generation, from 1; 0: none yet.
        address: the address of its store.
        key: unique to this generation, even across rosters.
        rank: the rank in the generation; `size`, `local_rank` and so on also refer to it.
        ranks: the ranks of the members in the run; empty: the same as in the generation.
    """

    number: int
    address: str = ""
    key: str = ""
    rank: int = 0
    size: int = 0
    local_rank: int = 0
    local_size: int = 0
    node_rank: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def generation(self) -> str:
        """An id for messages; "" before the first."""
        return f"{self.number} {self.key}" if self.number else ""


class Registry(Protocol):
    """A roster, as its members access it."""

    def meet(self, member: Member) -> Seat | None:
        """See Roster."""

    def is_over(self, member: Member) -> bool:
        """See Roster."""


class CallClock:
    """A clock, in seconds, that stops while nobody reads it: no member was silent if the roster's
    own process or machine stalled."""

    def __init__(self) -> None:
        self._seconds, self._read_at = 0.0, time.monotonic()

    def __call__(self) -> float:
        before, self._read_at = self._read_at, time.monotonic()
        self._seconds += min(self._read_at - before, _LONGEST_S)
        return self._seconds


class Roster:
    """Forms generations of members.

    A member asks repeatedly until its generation is complete, so a roster that is lost, or a
    member that dies while it waits, does no harm. Whatever a member does, it sends heartbeats.
    The first generation has the first `size` ranks, as does one after all have died, unless some do
    not appear for a long time. The others continue without the dead if their `least` allows.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._newest = 0
        self._running: dict[int, str] = {}  # rank -> token, of the newest generation
        self._seats: dict[str, Seat] = {}  # by token, of the newest generation
        self._waiting: dict[int, tuple[Member, float]] = {}  # by rank; with when it last asked
        self._since: dict[str, float] = {}  # token -> when a process that waits asked first
        self._processes: dict[int, list[str]] = {}  # rank -> its tokens, oldest first
        self._heard: dict[str, float] = {}  # token -> when
        self._died: set[str] = set()
        self._shrinks = False
        self._settled_at = -1.0
        self._checked: tuple[float, bool] = (-1.0, False)
        self._counts_at = -1.0
        self.node_ids: dict[int, str] = {}  # rank -> node, of the newest generation

    def meet(self, member: Member) -> tuple[Seat | None, Mapping[int, str]]:
        """The seat of this member once its generation is complete, and the host names of all its
        ranks if this call completes it.

        A process that has been replaced by another one of its rank gets a seat in generation
        `OVER`.
        """
        if not self._hear(member):
            return Seat(OVER), {}
        if member.token in self._seats and member.last < self._newest:
            return self._seats[member.token], {}
        now = self._now()
        self._waiting[member.rank] = member, now
        self._since.setdefault(member.token, now)
        if len(self._waiting) < member.least or now < self._counts_at:
            return None, {}
        self._counts_at = now + _CHECK_S * (member.size // 100) / 10  # counting takes long, too
        there = {
            rank: each
            for rank, (each, at) in self._waiting.items()
            if self._asks(each, at) and rank < max(member.size, member.most)  # once, more trained
        }
        left = set(self._running) - self._gone()
        goes_on = self._shrinks and any(there[r].last for r in left & there.keys())
        expected = left if goes_on else set(range(member.size))
        if self._shrinks and not left:
            waits_s = now - min(self._since[each.token] for each in there.values())
            expected = expected if waits_s < _WITHOUT_S else set()
        if not expected <= there.keys() or len(there) < member.least:
            return None, {}
        if goes_on and now < self._settled_at:
            return None, {}
        self._form(sorted(there.values(), key=lambda each: each.rank))
        return self._seats[member.token], {r: each.node for r, each in sorted(there.items())}

    def is_over(self, member: Member) -> bool:
        """Whether a member of this generation must leave it: a newer one exists, one of its members
        is dead, or another process has its rank. Each call is a heartbeat."""
        if not self._hear(member) or member.last < self._newest:
            return True
        at, broken = self._checked
        if not 0 <= self._now() - at < _CHECK_S:
            broken = bool(self._gone())
            self._checked = self._now(), broken
        return broken

    def has_formed(self) -> bool:
        """Whether any generation has formed."""
        return self._newest > 0

    def died(self, rank: int) -> None:
        """Called when Ray reports that the process of this rank is dead. If it asks again, it is
        not."""
        if rank in self._running:
            self._died.add(self._running[rank])
            self._checked = -1.0, True

    def has_newcomer(self) -> bool:
        """Whether a process is waiting that could join those that train, and need not wait for
        others that may arrive soon."""
        new = {
            rank: member
            for rank, (member, at) in self._waiting.items()
            if self._running.get(rank) != member.token and self._asks(member, at)
        }
        if not self._shrinks or not new:
            return False
        size, most = max((member.size, member.most) for member in new.values())
        waits_s = [self._now() - self._since[member.token] for member in new.values()]
        if max(waits_s) > _TOGETHER_S:
            return True
        ranks = new.keys() | self._running.keys()
        has_all = len(ranks) >= max(size, most) or max(new) < size
        return ranks.issuperset(range(size)) and (has_all or min(waits_s) > _QUIET_S)

    def alive(self) -> int:
        """The number of processes that send heartbeats."""
        size = max((member.size for member, _ in self._waiting.values()), default=0)
        limit_s = 2 * _silent_s(max(size, len(self._running)))
        newest = [tokens[-1] for tokens in self._processes.values()]
        return sum(
            token not in self._died and self._now() - self._heard.get(token, -1e9) < limit_s
            for token in newest
        )

    def _hear(self, member: Member) -> bool:
        """Notes a heartbeat; returns whether the process is the newest of its rank."""
        tokens = self._processes.setdefault(member.rank, [])
        if member.token not in tokens:
            tokens.append(member.token)
        self._heard[member.token] = self._now()
        self._died.discard(member.token)
        self._shrinks = member.may_miss_others
        if member.last > self._newest:  # this roster has replaced the one that formed it
            self._newest = member.last
            self._running, self._seats = {}, {}
            self._settled_at = self._now() + _silent_s(member.size)
        if member.last == self._newest > 0 and not self._seats:
            self._running.setdefault(member.rank, member.token)
            self.node_ids[member.rank] = member.node_id
        return member.token == tokens[-1]

    def _asks(self, member: Member, at: float) -> bool:
        return self._now() - at < max(_ASKED_S, 5 * poll_s(member.size))

    def _gone(self) -> set[int]:
        """The ranks of the newest generation whose process is dead, or is not the newest."""
        # Whether a member has left, since it has lost a peer.
        is_left = any(member.last == self._newest for member, _ in self._waiting.values())
        limit_s = _silent_s(len(self._running)) if is_left else _SILENT_ALONE_S
        now = self._now()
        return {
            rank
            for rank, token in self._running.items()
            if token in self._died
            or self._processes[rank][-1] != token
            # Only where others can do without it: all wait for it in any case.
            or (self._shrinks and now - self._heard[token] > limit_s)
        }

    def _form(self, members: list[Member]) -> None:
        self._newest = 1 + max(self._newest, *(each.last for each in members))
        key = os.urandom(8).hex()
        nodes = list(dict.fromkeys(each.node_id for each in members))
        on_node: dict[str, list[int]] = {node: [] for node in nodes}
        for each in members:
            on_node[each.node_id].append(each.rank)
        ranks = tuple(each.rank for each in members)
        ranks = () if ranks == tuple(range(len(members))) else ranks
        self._seats = {
            each.token: Seat(
                self._newest,
                members[0].address,
                key,
                rank,
                len(members),
                on_node[each.node_id].index(each.rank),
                len(on_node[each.node_id]),
                nodes.index(each.node_id),
                ranks,
            )
            for rank, each in enumerate(members)
        }
        self._running = {each.rank: each.token for each in members}
        self.node_ids = {each.rank: each.node_id for each in members}
        self._heard = {each.token: self._now() for each in members}
        self._died.clear()
        self._waiting.clear()
        self._since.clear()
        self._checked = -1.0, False


def _silent_s(size: int) -> float:
    return max(_SILENT_S, 3 * beat_s(size))


def poll_s(size: int) -> float:
    """How long a member waits before it asks again."""
    return _POLL_S + _POLL_OF_MANY_S * size


def beat_s(size: int) -> float:
    """The time between two heartbeats."""
    return _BEAT_S + _BEAT_OF_MANY_S * size
