"""The process of a worker: its device, its folder, its output, and its end with the raylet.

Imports nothing heavy at its top: see worker.py.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend.ray_private import raylet_of_worker

if TYPE_CHECKING:
    import torch

    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.membership.roster import Seat
    from raytrain_ddp.ray_backend.worker import WorkerSettings
    from raytrain_ddp.training.runtime.world import World


def world_of_worker(threads: int, seat: Seat | None = None) -> World:
    """This worker's world, by Ray Train, or by its seat in a generation."""
    from raytrain_ddp.training.runtime.world import World

    if seat is not None:
        return World(seat.rank, seat.size, seat.local_rank, _device(), threads, seat.ranks)
    import ray.train  # 0.3 s, which workers that are placed one by one save

    context = ray.train.get_context()
    place = context.get_world_rank(), context.get_world_size(), context.get_local_rank()
    return World(*place, _device(), threads)


def place_of_worker(given: WorkerSettings, rank: int, node: str) -> Place:
    """The place of this worker in the generations; the mailbox keeps the roster."""
    import ray
    import ray.util

    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.membership.roster import Member

    here = ray.get_runtime_context().get_node_id()
    token, mailbox = os.urandom(8).hex(), given.mailbox
    member = Member(rank, given.size, given.least, token, 0, node, here, most=given.most)
    registry: Any = SimpleNamespace(
        meet=lambda member: ray.get(mailbox.meet.remote(member)),
        is_over=lambda member: ray.get(mailbox.is_over.remote(member)),
    )
    return Place(member, ray.util.get_node_ip_address(), registry, given.backend)


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
    """Makes this process end when Ray's raylet does.

    A worker of Ray 2.60 notices that itself and tries to exit. But a thread of Ray Train that
    passes a report to the dead controller waits forever, and Python's exit waits for it.
    """

    def wait(raylet: int) -> None:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(raylet)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        # Not the parent, if that is a warm process.
        raylet = raylet_of_worker()
        threading.Thread(target=wait, args=(raylet,), name="raylet", daemon=True).start()


@contextmanager
def copied_output(folder: str | None, rank: int) -> Iterator[None]:
    """Copies this worker's output, and the error that ends it, to the run's log folder.

    A failing copy, as on a full disk, does not end the training.
    """
    file: IO[str] | None = None
    with suppress(OSError):
        if folder is not None and Path(folder).parent.is_dir():
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder, f"rank-{rank}.log")
            file = path.open("a", encoding="utf-8", buffering=1)
    if file is None:
        yield
        return
    out, err = _Tee(sys.stdout, file), _Tee(sys.stderr, file)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        except BaseException:
            out.copy(traceback.format_exc())
            raise
        finally:
            with suppress(OSError):
                file.close()


class _Tee:
    """A stream whose text is also written to a file."""

    def __init__(self, stream: Any, file: IO[str]) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        self.copy(text)
        return int(self._stream.write(text) or len(text))

    def copy(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
