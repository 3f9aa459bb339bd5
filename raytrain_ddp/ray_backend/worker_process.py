"""The process of a worker: its device, its folder, its output, and its end with the raylet.

Imports nothing heavy at its top: see worker.py.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend.ray_private import raylet_of_worker

if TYPE_CHECKING:
    import torch

    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.membership.roster import Member, Seat
    from raytrain_ddp.ray_backend.worker import WorkerSettings
    from raytrain_ddp.training.runtime.world import World

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def world_of_worker(threads: int, seat: Seat | None = None) -> World:
    """This worker's world, by Ray Train, or by its seat in a generation."""
    import ray.train
    import ray.train.torch

    from raytrain_ddp.training.runtime.world import World

    if seat is not None:
        return World(seat.rank, seat.size, seat.local_rank, _device(), threads, seat.ranks)
    context = ray.train.get_context()
    return World(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        device=ray.train.torch.get_device(),
        threads=threads,
    )


def place_of_worker(given: WorkerSettings, rank: int, node: str) -> Place:
    """The place of this worker in the generations; the mailbox keeps the roster."""
    import ray
    import ray.util

    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.membership.roster import Member

    here = ray.get_runtime_context().get_node_id()
    token = os.urandom(8).hex()
    member = Member(rank, given.size, given.least, token, 0, node, here, most=given.most)
    registry = _Remote(given.mailbox)
    return Place(member, ray.util.get_node_ip_address(), registry, given.backend)


class _Remote:
    """The mailbox's roster."""

    def __init__(self, mailbox: Any) -> None:
        import ray

        self._mailbox, self._get = mailbox, ray.get

    def meet(self, member: Member) -> Seat | None:
        seat: Seat | None = self._get(self._mailbox.meet.remote(member))
        return seat

    def is_over(self, member: Member) -> bool:
        return bool(self._get(self._mailbox.is_over.remote(member)))


def set_environment(seat: Seat) -> None:
    """A task may read these. For Ray Train, each worker is a group of its own."""
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.size))
    os.environ.update(LOCAL_RANK=str(seat.local_rank), LOCAL_WORLD_SIZE=str(seat.local_size))
    os.environ.update(NODE_RANK=str(seat.node_rank))


def _device() -> torch.device:
    """The GPU that Ray gave to this process, if any; as `ray.train.torch.get_device`, but also for
    actors that are not Ray Train's."""
    import ray
    import torch

    mine = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not mine:
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return torch.device("cuda", int(mine[0]))
    if mine[0] not in (devices := visible.split(",")):
        raise PreflightError(
            f"Ray gave GPU {mine[0]} to this worker, but CUDA_VISIBLE_DEVICES={visible} in "
            f"{socket.gethostname()}'s environment lacks it: unset it there."
        )
    return torch.device("cuda", devices.index(mine[0]))


def enter_folder(folder: str, import_paths: Sequence[str], argv: Sequence[str] = ()) -> None:
    """Sets the driver's working folder and import paths, as far as they exist here, and its
    command instead of Ray's."""
    sys.argv[:] = argv or sys.argv[:1]
    if Path(folder).is_dir():
        os.chdir(folder)
    for path in reversed(import_paths):
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)


def end_with_raylet() -> None:
    """Makes Linux end this process when Ray's raylet ends, which is its parent unless it was forked
    by a warm process.

    A worker of Ray 2.60 notices that itself and tries to exit. But a thread of Ray Train that
    passes a report to the dead controller waits forever, and Python's exit waits for it.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    raylet = raylet_of_worker()
    if raylet != parent:
        threading.Thread(target=_die_with, args=(raylet,), name="raylet", daemon=True).start()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended in the meantime
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with(process: int) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def copied_output(folder: str | None, rank: int) -> Iterator[None]:
    """Copies this worker's output, and the error that ends it, to the run's log folder.

    A failing copy, as on a full disk, does not end the training.
    """
    with ExitStack() as stack:
        file: IO[str] | None = None
        if folder is not None and Path(folder).parent.is_dir():
            with suppress(OSError):
                Path(folder).mkdir(parents=True, exist_ok=True)
                path = Path(folder) / f"rank-{rank}.log"
                file = path.open("a", encoding="utf-8", buffering=1)
        if file is not None:
            stack.callback(_close, file)
            stack.enter_context(redirect_stdout(_Tee(sys.stdout, file)))
            stack.enter_context(redirect_stderr(_Tee(sys.stderr, file)))
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if file is not None:
                    file.write(traceback.format_exc())
            raise


def _close(file: IO[str]) -> None:
    with suppress(OSError):
        file.close()


class _Tee:
    """A stream that writes to two others."""

    def __init__(self, stream: Any, copy: IO[str]) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        if not self._copy.closed:
            with suppress(OSError):
                self._copy.write(text)
        return int(self._stream.write(text) or len(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
