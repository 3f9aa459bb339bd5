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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.errors import PreflightError

if TYPE_CHECKING:
    import torch

    from raytrain_ddp.membership.roster import Seat
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
    raylet = int(os.environ.get("RAY_RAYLET_PID", parent))
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


class Tee:
    """Copies this worker's output to the run's log folder during training.

    A failing copy, as on a full disk, does not end the training.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        there = folder is not None and Path(folder).parent.is_dir()
        self._path = Path(str(folder)) / f"rank-{rank}.log" if there else None
        self._file: IO[str] | None = None
        self._streams: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        if self._file is None:
            return
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_TeeStream(stream, self._file) for stream in self._streams)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._file is None:
            return
        sys.stdout, sys.stderr = self._streams
        with suppress(OSError), self._file:
            if error is not None:
                self._file.write("".join(traceback.format_exception(error)))


class _TeeStream:
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
