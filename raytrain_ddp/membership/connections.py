"""The connections of a process group, which are cut when a rank is lost.

gloo keeps them open as long as anything refers to the group, as a wrapped model does, and cannot
abort a collective. A connection that is shut down fails all collectives on both sides at once.
Collectives of NCCL notice neither that nor the death of a rank: they are aborted, see `cut`.

The functions below are the same for all supported versions of torch. (torch is imported in
functions, which saves seconds in processes without a group.)
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_LEAVING_S = 0.3  # for gloo to see the ends of connections
_EPOLL = "anon_inode:[eventpoll]"


class Connections:
    """The connections of the process group that is made next: those opened while it starts, and
    watched by the epoll that gloo opens then. Ray's threads may open others at the same moment.

    Attributes:
        is_cut: whether `cut` was called; from then on, a collective of NCCL's that seems to be done
            may have left anything as its result.
        is_broken: whether the first call was because a rank was lost, not to leave the group.
    """

    def __init__(self) -> None:
        self.is_cut = self.is_broken = False
        self._cutting, self._cut_at = threading.Lock(), 0.0
        self._before, self._epolls_before = _open_files("socket:"), {*_open_files(_EPOLL)}
        self._own: dict[int, str] = {}
        self._watched: list[int] = []
        self._of_gpus: Any = None  # NCCL's part of the process group

    def cut_s(self) -> float:
        """How long ago `cut` was called; 0: it was not."""
        return time.monotonic() - self._cut_at if self.is_cut else 0.0

    @property
    def aborts(self) -> bool:
        return self._of_gpus is not None

    def opened(self, group: Any, aborts: bool = False) -> None:
        """Called when the process group has been made.

        Args:
            aborts: whether its collectives on GPUs are NCCL's, and are aborted when a rank is lost.
        """
        import torch

        before = {*self._before.values()}
        new = {
            number: name for number, name in _open_files("socket:").items() if name not in before
        }
        watched = {
            number
            for epoll in _open_files(_EPOLL).keys() - self._epolls_before
            for number in _watched_by(epoll)
        }
        self._own = {number: name for number, name in new.items() if number in watched} or new
        self._watched = [number for number, _ in self._connections()]
        if aborts:
            self._of_gpus = group._get_backend(torch.device("cuda"))

    def wait_for_device(self) -> None:
        """Waits until the device has done all queued work, which includes NCCL's collectives."""
        import torch

        done = torch.cuda.Event(blocking=True)  # frees the CPU for the loader's threads
        done.record()
        done.synchronize()

    def cut(self, is_broken: bool = False) -> None:
        """Ends all collectives of this rank, and over gloo those of the others; from any thread."""
        with self._cutting:
            is_first = not self.is_cut
            self.is_broken |= is_first and is_broken
            self._cut_at = time.monotonic() if is_first else self._cut_at
            self.is_cut = True  # before anything is aborted
        for _, connection in self._connections():
            with suppress(OSError):  # it already is
                connection.shutdown(socket.SHUT_RDWR)
        if is_first and self._of_gpus is not None:
            threading.Thread(target=self._abort, name="aborting", daemon=True).start()

    def _abort(self) -> None:
        """May take long, or fail; another thread has to keep sending heartbeats."""
        with suppress(Exception):
            self._of_gpus.abort()

    def ends_within(self, limit_s: float) -> bool:
        """Waits until another rank ends a connection, at most `limit_s`; whether one has."""
        watched = select.poll()
        for number in self._watched:  # also if gloo has seen the end, and has closed it
            watched.register(number, select.POLLRDHUP)
        return bool(watched.poll(limit_s * 1000))

    def replace(self) -> None:
        """Makes gloo's next write to any of them fail.

        gloo receives no more over a connection once a collective has failed for which it was
        receiving. It then neither sees the end of that connection, nor takes a failing write for an
        error if the connection is only shut down; other collectives would wait for their time
        limit. So each is replaced by a socket without an address, to which a write is an error. It
        joins the same epoll, from which gloo will remove it, without any event. A read returns at
        once: gloo may be about to.
        """
        watched = {epoll: _watched_by(epoll) for epoll in _open_files(_EPOLL)}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as without_address:
            without_address.setblocking(False)
            for number, _ in self._connections():
                for epoll, numbers in watched.items():
                    if number in numbers:
                        os.dup2(without_address.fileno(), number)
                        with select.epoll.fromfd(os.dup(epoll)) as watching:
                            watching.register(number, 0)

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Each that is open; not the listening one, whose end would be an error of gloo."""
        for number, name in self._own.items():
            with suppress(OSError):
                copy = os.dup(number)
                if _open_files("socket:", copy).get(copy) != name:  # it is another file's now
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield number, connection


def write_to_all(group: Any, rank: int, size: int) -> None:
    """Sends something to each other rank of a process group; nobody receives it."""
    import torch

    for other in range(size):
        if other != rank:
            with suppress(Exception):  # the failure that is wanted
                group.send([torch.zeros(1)], other, 0)


def let_go(group: Any, connections: Connections, rank: int, size: int) -> None:
    """Drops the last reference to a process group that this process has left.

    gloo then waits for its collectives. One that nobody waits for here, such as a vote, may not
    have noticed: see `Connections.replace`.
    """
    time.sleep(_LEAVING_S)
    connections.replace()
    write_to_all(group, rank, size)


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
    """The file descriptors in an epoll of this process; none if it has been closed meanwhile."""
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def all_gather(parts: Tensor, own: Tensor, async_op: bool = False) -> Any:
    """Puts each rank's `own` into its row of `parts`; all ranks take part.

    Both are passed on flat: gloo accepts no other shapes.

    Args:
        parts: contiguous, shape (ranks, ...) or flat, with as many elements.
        own: contiguous, of any shape.

    Returns:
        A `dist.Work` if `async_op`, else None.
    """
    import torch.distributed as dist

    # torch 2.14 renamed it; from then on the old name raises a FutureWarning.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(parts.view(-1), own.view(-1), async_op=async_op)


def set_timeout(limit: timedelta) -> None:
    """Sets the time limit of the collectives to come in the default process group."""
    from torch.distributed import distributed_c10d as group

    (getattr(group, "set_timeout", None) or group._set_pg_timeout)(limit)


def end_group(is_aborted: bool) -> None:
    """Ends the default process group, also one whose start has failed: without a group, torch keeps
    counting them, and ranks with other counts would never meet.

    Args:
        is_aborted: some of its collectives will never be done; do not wait for them.
    """
    import torch.distributed as dist

    if dist.is_initialized() and is_aborted:
        dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._world.group_count = 0
