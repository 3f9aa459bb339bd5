"""Process groups one after another, so that a worker can be replaced while the others stay.

Each *generation* has a store of its own. A rank that loses a peer leaves its group, which makes the
others notice, and joins the next generation: see roster.py. Nothing here needs Ray.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain_ddp.training.roster import OVER, Member, Registry, Seat, beat_s, poll_s

if TYPE_CHECKING:
    from raytrain_ddp.training.live_state import LiveState
    from raytrain_ddp.training.recording_session import RecordingSession

S = TypeVar("S", bound="RecordingSession")

_CONNECT_S = 60.0
_THERE_S = 20.0  # one that has died since it asked is replaced meanwhile
_TRIES = 5
_COLLECTIVE_S = 1800.0  # as long as in Ray Train
_LEAVING_S = 0.3  # for gloo to see the ends of connections


class NewcomerWaits(Exception):
    """Raised on all ranks between two steps: a process waits to join, so the next generation begins
    here."""


class Place:
    """This process's place in all generations that it joins.

    Args:
        member: what the roster gets to know about this process; the rest is added.
        host: an address of this machine that the others reach.
        registry: keeps the roster; called from two threads.

    Attributes:
        rank: of the run.
        seat: in the present generation.
    """

    def __init__(self, member: Member, host: str, registry: Registry) -> None:
        self._member, self._host, self._registry = member, host, registry
        self.rank = member.rank
        self._sockets, self._closed = _Sockets(), threading.Event()
        self.seat = Seat(0)
        self._connected, self._leaving = Seat(0), threading.Lock()
        threading.Thread(target=self._watch, name="signs of life", daemon=True).start()

    def join(self) -> bool:
        """Waits for the next generation and makes its process group; False: the run is over.

        Raises:
            RuntimeError: the members repeatedly cannot connect to each other.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        for attempt in range(_TRIES):
            offered = None
            if self._member.rank == 0 or self._member.may_miss_others:
                # Each may be the first of those that are left. Port 0: a free one.
                offered = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self.seat = self._met(f"{self._host}:{offered.port}" if offered else "")
            if self.seat.number == OVER:
                return False
            try:
                self._connect(offered if self.seat.rank == 0 else None)
                return True
            except RuntimeError:  # DistError is one
                self.leave()
                if attempt == _TRIES - 1:
                    raise
        return True

    def _met(self, address: str) -> Seat:
        member = replace(self._member, last=max(0, self.seat.number), address=address)
        found = self._registry.meet(member)
        # While others still come. Models and their process groups are in cycles of references.
        gc.collect()
        while found is None:
            time.sleep(poll_s(member.size))
            found = self._registry.meet(member)
        return found

    def _connect(self, offered: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from raytrain_ddp.training.torch_compat import set_timeout

        limit = timedelta(seconds=_CONNECT_S)
        host, _, port = self.seat.address.rpartition(":")
        there = timedelta(seconds=_THERE_S)
        own = offered or TCPStore(host, int(port), is_master=False, timeout=there)
        self._store = store = PrefixStore(self.seat.key, own)
        # One that has died in the meantime is missed here, not while the others connect to it.
        self._all("there", _THERE_S)
        self._sockets = _Sockets()
        dist.init_process_group(
            "gloo", store=store, rank=self.seat.rank, world_size=self.seat.size, timeout=limit
        )
        self._sockets.started()
        self._all("connected", _CONNECT_S)  # no rank leaves while another still connects
        set_timeout(timedelta(seconds=_COLLECTIVE_S))
        self._connected = self.seat

    def _watch(self) -> None:
        """Gives signs of life, and ends collectives when the generation is over: those with a
        machine that is cut off would not notice, nor those that gloo no longer reads for."""
        import torch.distributed as dist

        while not self._closed.wait(beat_s(self._member.size)):
            connected, sockets = self._connected, self._sockets
            member = replace(self._member, last=max(0, self.seat.number))
            with suppress(Exception):  # the roster may be starting again
                over = self._registry.is_over(member)
                if over and 0 < connected.number == member.last == self._connected.number:
                    was_shut_down = sockets.is_shut_down
                    sockets.shut_down()
                    with self._leaving:
                        if was_shut_down and connected is self._connected:
                            sockets.replace()
                            _write_to_all(dist.group.WORLD, connected)

    def close(self) -> None:
        """No more signs of life."""
        self._closed.set()

    def part(self) -> None:
        """Waits until all ranks have called this, then leaves: nobody ends before all that may need
        it are done. Raises what a collective raises if a rank is lost before."""
        import torch.distributed as dist

        dist.barrier()
        with suppress(RuntimeError):  # all are done
            self._all("passed")  # who leaves earlier could make the barrier of another one fail
        self.leave()

    def break_off(self) -> None:
        """Makes the collectives of this and all other ranks fail; from any thread."""
        self._sockets.shut_down()

    def leave(self) -> None:
        """Ends this process's part in its process group: the other ranks' collectives fail."""
        import torch.distributed as dist

        from raytrain_ddp.training.torch_compat import end_group

        with self._leaving:
            seat, self._connected = self._connected, Seat(0)
            self._sockets.shut_down()
        if seat.number:
            ending = dist.group.WORLD, self._sockets, seat
            threading.Thread(target=_let_go, args=ending, name="leaving").start()
        end_group()  # does not wait for what that thread still has

    def _all(self, what: str, limit_s: float = 10.0) -> None:
        """Waits until all ranks have called this."""
        self._store.set(f"{what}-{self.seat.rank}", "")
        keys = [f"{what}-{rank}" for rank in range(self.seat.size)]
        self._store.wait(keys, timedelta(seconds=limit_s))


class _Sockets:
    """The connections of a process group of gloo's, found as those that its start has opened.

    gloo keeps them open as long as anything refers to the group, as a wrapped model does, and
    cannot abort a collective. A connection that is shut down fails all collectives on both sides at
    once. (Others that a thread of Ray's may open in the same moment are renewed by Ray.)
    """

    def __init__(self) -> None:
        self._before = _open_files("socket:")
        self._own: dict[int, str] = {}
        self.is_shut_down = False

    def started(self) -> None:
        now, before = _open_files("socket:"), {*self._before.values()}
        self._own = {number: name for number, name in now.items() if name not in before}

    def shut_down(self) -> None:
        for _, connection in self._connections():
            with suppress(OSError):  # it already is
                connection.shutdown(socket.SHUT_RDWR)
        self.is_shut_down = True

    def replace(self) -> None:
        """Makes gloo's next write to any of them fail.

        gloo receives no more over a connection once a collective has failed for which it was
        receiving. It then neither sees the end of that connection, nor takes a failing write for an
        error if the connection is only shut down; other collectives would wait for their time
        limit. So each is replaced by a socket without an address, to which a write is an error. It
        joins the same epoll, from which gloo will remove it, without any event. A read returns at
        once: gloo may be about to.
        """
        epolls = _open_files("anon_inode:[eventpoll]")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as without_address:
            without_address.setblocking(False)
            for number, _ in self._connections():
                for epoll in epolls:
                    if number in _watched_by(epoll):
                        os.dup2(without_address.fileno(), number)
                        with select.epoll.fromfd(os.dup(epoll)) as watching:
                            watching.register(number, 0)

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Each that is open; not the listening one, whose end would be an error of gloo."""
        for number, name in self._own.items():
            if _open_files("socket:", number).get(number) == name:  # it may be another file's now
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield number, connection


def _open_files(kind: str, only: int | None = None) -> dict[int, str]:
    """File descriptor -> name, of this process's open files whose names begin with `kind`."""
    found = {}
    for number in os.listdir("/proc/self/fd") if only is None else [str(only)]:
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith(kind):
                found[int(number)] = name
    return found


def _watched_by(epoll: int) -> set[int]:
    """The file descriptors in an epoll of this process."""
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _write_to_all(group: Any, seat: Seat) -> None:
    """Sends something to each other rank of a process group; nobody receives it."""
    import torch

    for rank in range(seat.size):
        if rank != seat.rank:
            with suppress(Exception):  # the failure that is wanted
                group.send([torch.zeros(1)], rank, 0)


def _let_go(group: Any, sockets: _Sockets, seat: Seat) -> None:
    """Ends the last reference to a process group that is left.

    gloo then waits for its collectives. One that nobody waits for here, such as a vote, may not
    have noticed: see `_Sockets.replace`.
    """
    time.sleep(_LEAVING_S)
    sockets.replace()
    _write_to_all(group, seat)


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
    gc.freeze()  # what is imported is there to stay: collecting takes a tenth of the time
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
            newcomer = isinstance(error, NewcomerWaits)
            if not newcomer and not is_loss(error):
                raise
            traceback.clear_frames(error.__traceback__)  # of the loop and its batches
            live = session.live_state()
            step = live.manifest.step if live else -1
            losses = 0 if step > reached else losses
            reached, losses = max(reached, step), losses + (not newcomer)
            if losses > most:
                raise
        del session
