"""Successive process groups, so that a worker can be replaced while the others stay.

Each *generation* has a store of its own. A rank that loses a peer leaves its group, which makes the
others notice, and joins the next generation: see roster.py. Nothing here needs Ray.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from raytrain_ddp.errors import RaytrainError, RetriesExhausted, first_line
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.connections import (
    Connections,
    end_group,
    let_go,
    set_timeout,
    write_to_all,
)
from raytrain_ddp.membership.roster import OVER, Member, Registry, Seat, beat_s, poll_s
from raytrain_ddp.uri import answer_within

_CONNECT_S = 60.0
_THERE_S = 20.0  # within this time, a rank that has died since it asked to join is replaced
_POLL_S, _POLL_OF_MANY_S = 0.01, 0.0001  # fixed; per rank
_TRIES = 5
_STUCK_S = 600.0  # longer than what a rank does in a step without looking at the others


class RankLost(ConnectionError):
    """Raised instead of going on with the results of collectives that were aborted."""


class NoStateLeft(Exception):
    """Raised on ranks that have trained: no rank can continue from its state, and there is no
    checkpoint."""


class NewcomerWaits(Exception):
    """Raised on all ranks between two steps: a process waits to join, so the next generation begins
    here."""


class Place:
    """This process's place in all generations that it joins.

    Args:
        member: what the roster learns about this process; the rest is added.
        host: an address of this machine that the other ranks can reach.
        registry: keeps the roster; called from two threads.
        backend: the backend of the process groups: gloo, or cpu:gloo,cuda:nccl.
        limit_s: the time limit of a collective.
        stays: whether this process goes on when another one is lost: NCCL's collectives, which do
            not notice that, are aborted then.

    Attributes:
        rank: the rank in the run.
        seat: the seat in the current generation.
    """

    def __init__(
        self,
        member: Member,
        host: str,
        registry: Registry,
        backend: str = "gloo",
        limit_s: float = 1800.0,
        stays: bool = True,
    ) -> None:
        self._member, self._host, self._registry = member, host, registry
        self._backend, self._limit_s, self.rank = backend, limit_s, member.rank
        self._aborts = stays and "nccl" in backend
        self._connections, self._closed = Connections(), threading.Event()
        self.seat = Seat(0)
        self._connected, self._leaving = Seat(0), threading.Lock()
        threading.Thread(target=self._watch, name="heartbeats", daemon=True).start()

    def join(self) -> bool:
        """Waits for the next generation and makes its process group; False: the run is over.

        Raises:
            ConnectionError: the members repeatedly cannot connect to each other.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        for attempt in range(_TRIES):
            offered = None
            if self._member.rank == 0 or self._member.may_miss_others:
                # Each rank may be the first of those that are left. Port 0: any free port.
                offered = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self.seat = self._met(f"{self._host}:{offered.port}" if offered else "")
            if self.seat.number == OVER:
                return False
            try:
                self._connect(offered if self.seat.rank == 0 else None)
                return True
            except RuntimeError as error:  # DistError is one
                self.leave()
                if attempt == _TRIES - 1:
                    raise ConnectionError(
                        f"{_TRIES} times in a row, not all of {self.seat.size} ranks connected to "
                        f"each other, last through {self.seat.address}: {first_line(error)}"
                    ) from error
        return True

    def _met(self, address: str) -> Seat:
        member = replace(self._member, last=max(0, self.seat.number), address=address)
        found = self._registry.meet(member)
        # While others still arrive. Models and their process groups are in reference cycles.
        gc.collect()
        while found is None:
            time.sleep(poll_s(member.size))
            found = self._registry.meet(member)
        return found

    def _connect(self, offered: Any) -> None:
        import torch.distributed as dist

        limit = timedelta(seconds=_CONNECT_S)
        member = replace(self._member, last=self.seat.number)
        self._store = store = open_store(
            self.seat, offered, self.rank, lambda: self._registry.is_over(member)
        )
        self._connections = Connections()
        dist.init_process_group(
            self._backend,
            store=store,
            rank=self.seat.rank,
            world_size=self.seat.size,
            timeout=limit,
        )
        self._connections.opened(dist.group.WORLD, self._aborts)
        self._all("connected", _CONNECT_S)  # no rank leaves while another still connects
        set_timeout(timedelta(seconds=self._limit_s))
        self._connected = self.seat

    def require_ranks(self) -> None:
        """Detects at once what the next collective would detect.

        Raises:
            RankLost: another rank has left the generation.
        """
        if self._connections.is_cut or self._connections.ends_within(0):
            raise RankLost("another rank was lost during this step")

    def confirm(self) -> None:
        """Waits until the collectives so far are done; their results may then be used. Those of
        gloo already are, and have raised any errors.

        Raises:
            RankLost: one was lost before; some of them were aborted.
        """
        if self._connections.aborts:
            self._connections.wait_for_device()
            if self._connections.is_cut:
                raise RankLost("another rank was lost in the collectives of this step")

    def _watch(self) -> None:
        """Sends heartbeats, and ends collectives when the generation is over: neither those with
        an unreachable machine nor those that gloo no longer reads for would end by themselves."""
        import torch.distributed as dist

        while not self._wait_for_beat():
            connected, connections = self._connected, self._connections
            member = replace(self._member, last=max(0, self.seat.number))
            with suppress(Exception):  # the roster may be starting again
                over = self._registry.is_over(member)
                if over and 0 < connected.number == member.last == self._connected.number:
                    was_cut = connections.is_cut
                    connections.cut(is_broken=True)
                    if connections.aborts and connections.cut_s() > _STUCK_S:
                        _end("the training thread has not left an aborted process group")
                    with self._leaving:
                        if was_cut and connected is self._connected:
                            connections.replace()
                            write_to_all(dist.group.WORLD, connected.rank, connected.size)

    def _wait_for_beat(self) -> bool:
        """Waits until the next heartbeat is due; returns whether heartbeats are to stop. NCCL does
        not notice that a rank has left, so this thread checks for that."""
        limit_s, connections = beat_s(self._member.size), self._connections
        if not connections.aborts or connections.is_cut:
            return self._closed.wait(limit_s)
        if connections.ends_within(limit_s):
            connections.cut(is_broken=True)
        return self._closed.is_set()

    @property
    def is_broken(self) -> bool:
        """Whether another thread has ended the collectives of the current generation: any error may
        come from that."""
        return self._connections.is_broken

    def has_lost_ranks(self, error: Exception) -> bool:
        """Whether `error` only means that another generation follows this one."""
        known = isinstance(error, (NewcomerWaits, NoStateLeft, RankLost))
        return known or (self.is_broken and not isinstance(error, RaytrainError))

    @property
    def has_ended(self) -> bool:
        """Whether the current generation has ended, or this process is in none."""
        return self.is_broken or not self._connected.number

    def close(self) -> None:
        """Stops the heartbeats."""
        self._closed.set()

    def part(self) -> None:
        """Waits until all ranks have called this, then leaves: no rank ends while another may still
        need it. Raises what a collective raises if a rank is lost before that."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))  # over gloo, unlike a barrier of NCCL's
        with suppress(RuntimeError):  # all are done
            self._all("passed")  # a rank that left earlier could make another's barrier fail
        self.leave()

    def break_off(self) -> None:
        """Makes the collectives of this and all other ranks fail; from any thread."""
        self._connections.cut(is_broken=True)

    def leave(self) -> None:
        """Ends this process's part in its process group: the other ranks' collectives fail."""
        import torch.distributed as dist

        with self._leaving:
            seat, self._connected = self._connected, Seat(0)
            self._connections.cut()
        if seat.number:
            ending = dist.group.WORLD, self._connections, seat.rank, seat.size
            threading.Thread(target=let_go, args=ending, name="leaving").start()
        # Does not wait for what that thread still holds.
        end_group(is_aborted=self._connections.aborts)

    def _all(self, what: str, limit_s: float = 10.0) -> None:
        """Waits until all ranks have called this."""
        self._store.set(f"{what}-{self.seat.rank}", "")
        keys = [f"{what}-{rank}" for rank in range(self.seat.size)]
        self._store.wait(keys, timedelta(seconds=limit_s))


def _end(why: str) -> None:
    """Nothing else ends a thread that waits for a device."""
    print(f"{why} for {_STUCK_S:.0f} s: this process ends", file=sys.stderr, flush=True)
    os._exit(RetriesExhausted.exit_status)


def open_store(seat: Seat, offered: Any, rank: int, is_over: Callable[[], bool]) -> Any:
    """Waits until all ranks of a generation have reached its store, and returns it.

    A rank that has died in the meantime is noticed here, not while the others connect to it. It
    may be the rank that serves the store: torch's client waits for it much longer than the roster
    needs to notice, and without a limit if its machine does not answer.

    Args:
        seat: the seat of this process in the generation.
        offered: the store, if this process serves it.
        rank: the rank of this process in the run.
        is_over: whether the generation is over.

    Raises:
        RuntimeError: a rank was lost, or does not arrive.
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
