"""Process groups one after another, so that a worker can be replaced while the others stay.

Each *generation* has all ranks, and a store of its own. A rank that loses a peer leaves its group,
which makes the others notice, and joins the next generation. Nothing here needs Ray, and nothing
imports torch at the top: the roster is kept by a small actor.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from raytrain_ddp.training.live_state import LiveState
    from raytrain_ddp.training.recording_session import RecordingSession

S = TypeVar("S", bound="RecordingSession")

_SILENT_S = 3.0  # a member that has not asked for so long is gone
_POLL_S, _POLL_OF_MANY_S = 0.05, 0.001  # and per member
_CONNECT_S = 60.0
_THERE_S = 20.0  # one that has died since it asked is replaced meanwhile
_TRIES = 5
_COLLECTIVE_S = 1800.0  # as long as in Ray Train
OVER = -1
"""The number of the generation that is returned when the run is over."""


@dataclass(frozen=True)
class Member:
    """A rank that wants to join the next generation.

    Args:
        token: identifies its process.
        last: the number of its last generation; 0: none.
        address: HOST:PORT of the store that it offers; "" unless it is rank 0.
        node: its host name.
    """

    rank: int
    size: int
    token: str
    last: int
    address: str
    node: str


class Generation(NamedTuple):
    """A process group: its number from 1, and the address of its store."""

    number: int
    address: str

    @property
    def name(self) -> str:
        """An id that no other generation of the run has; "" before the first."""
        return f"{self.number} {self.address}" if self.number else ""


class Roster:
    """Forms generations of members. A member asks again and again until its generation is complete;
    so a roster that is lost, or a member that dies while it waits, does no harm."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gathering: dict[int, tuple[Member, float]] = {}  # rank -> member, when it asked last
        self._seen: dict[int, list[str]] = {}  # rank -> tokens of its processes, oldest first
        self._tokens: frozenset[str] = frozenset()  # of the newest generation
        self.newest = Generation(0, "")

    def meet(self, member: Member) -> tuple[Generation | None, list[Member]]:
        """The generation of this member once it is complete; and all its members, when this call
        completes it.

        A process that another one of its rank has replaced gets a generation that is `OVER`.
        """
        seen = self._seen.setdefault(member.rank, [])
        if member.token not in seen:
            seen.append(member.token)
        if member.token != seen[-1]:
            return Generation(OVER, ""), []
        if member.token in self._tokens and member.last < self.newest.number:
            return self.newest, []
        now = self._now()
        self._gathering[member.rank] = member, now
        there = {r: m for r, (m, at) in self._gathering.items() if now - at < self._silent_s(m)}
        if len(there) < member.size:
            return None, []
        number = max(self.newest.number, *(each.last for each in there.values())) + 1
        self.newest = Generation(number, there[0].address)
        self._tokens = frozenset(each.token for each in there.values())
        self._gathering.clear()
        return self.newest, [there[rank] for rank in sorted(there)]

    @staticmethod
    def _silent_s(member: Member) -> float:
        return max(_SILENT_S, 5 * poll_s(member.size))


def poll_s(size: int) -> float:
    """How long a member waits before it asks again."""
    return _POLL_S + _POLL_OF_MANY_S * size


class Place:
    """This process's rank in all generations that it joins.

    Args:
        meet: asks the roster; see `Roster.meet`.
        host: an address of this machine that the others reach.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        node: str,
        meet: Callable[[Member], Generation | None],
    ) -> None:
        self._rank, self._size, self._host, self._node = rank, size, host, node
        self._meet = meet
        self._token = os.urandom(8).hex()
        self._sockets = _Sockets()
        self.generation = Generation(0, "")

    def join(self) -> bool:
        """Waits for the next generation and makes its process group; False: the run is over.

        Raises:
            RuntimeError: the members repeatedly cannot connect to each other.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        for attempt in range(_TRIES):
            offered = None
            if self._rank == 0:  # port 0: a free one
                offered = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self.generation = found = self._met(offered.port if offered else 0)
            if found.number == OVER:
                return False
            try:
                self._connect(offered)
                return True
            except RuntimeError:  # DistError is one
                self.leave()
                if attempt == _TRIES - 1:
                    raise
        return True

    def _met(self, port: int) -> Generation:
        address = f"{self._host}:{port}" if port else ""
        last = self.generation.number
        mine = Member(self._rank, self._size, self._token, last, address, self._node)
        while (found := self._meet(mine)) is None:
            time.sleep(poll_s(self._size))
        return found

    def _connect(self, offered: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from raytrain_ddp.training.torch_compat import set_timeout

        limit = timedelta(seconds=_CONNECT_S)
        host, _, port = self.generation.address.rpartition(":")
        there = timedelta(seconds=_THERE_S)
        store = offered or TCPStore(host, int(port), is_master=False, timeout=there)
        self._store = store
        # One that has died in the meantime is missed here, not while the others connect to it.
        self._all("there", _THERE_S)
        self._sockets = _Sockets()
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._size, timeout=limit
        )
        self._sockets.started()
        self._all("connected", _CONNECT_S)  # no rank leaves while another still connects
        set_timeout(timedelta(seconds=_COLLECTIVE_S))

    def part(self) -> None:
        """Waits until all ranks have called this, then leaves: nobody ends before all that may need
        it are done. Raises what a collective raises if a rank is lost before."""
        import torch.distributed as dist

        dist.barrier()
        with suppress(RuntimeError):  # all are done
            self._all("passed")  # who leaves earlier could make the barrier of another one fail
        self.leave()

    def leave(self) -> None:
        """Ends this process's part in its process group: the other ranks' collectives fail."""
        from raytrain_ddp.training.torch_compat import end_group

        self._sockets.shut_down()
        end_group()

    def _all(self, what: str, limit_s: float = 10.0) -> None:
        """Waits until all ranks have called this."""
        self._store.set(f"{what}-{self._rank}", "")
        keys = [f"{what}-{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(seconds=limit_s))


class _Sockets:
    """The connections of a process group of gloo's, found as those that its start has opened.

    gloo keeps them open as long as anything refers to the group, as a wrapped model does, and
    cannot abort a collective. A connection that is shut down fails all collectives on both sides at
    once. (Others that a thread of Ray's may open in the same moment are renewed by Ray.)
    """

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._own: dict[str, int] = {}

    def started(self) -> None:
        now = _open_sockets()
        self._own = {name: number for name, number in now.items() if name not in self._before}

    def shut_down(self) -> None:
        for name, number in self._own.items():
            if _open_sockets(number).get(name) == number:  # the number may be another file's now
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()  # not a listening one, which would be an error of gloo
                    connection.shutdown(socket.SHUT_RDWR)
        self._own = {}


def _open_sockets(only: int | None = None) -> dict[str, int]:
    """name -> file descriptor, of this process's sockets."""
    found = {}
    for number in os.listdir("/proc/self/fd") if only is None else [str(only)]:
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def through_generations(
    place: Place,
    start: Callable[[LiveState | None], S],
    run: Callable[[S], None],
    is_loss: Callable[[BaseException], bool],
    most: int,
) -> None:
    """Trains, and goes on in the next generation whenever another rank is lost.

    Args:
        most: losses in a row without a further step; one more is an error.
        start: the session of a generation, given the state that this process has.
        run: trains in it.
        is_loss: whether an error only says that another rank is gone.
    """
    live: LiveState | None = None
    reached, losses = -1, 0
    while place.join():
        session, live = start(live), None
        try:
            with session:
                try:
                    run(session)
                except BaseException:
                    place.leave()  # first of all: the others shall notice
                    raise
            place.part()
            return
        except Exception as error:
            place.leave()
            if not is_loss(error):
                raise
            traceback.clear_frames(error.__traceback__)  # of the loop and its batches
            live = session.live_state()
            step = live.manifest.step if live else -1
            reached, losses = max(reached, step), 1 if step > reached else losses + 1
            if losses > most:
                raise
        del session
        gc.collect()  # models and their process groups are in cycles of references
