"""What runs in each Ray Train worker.

Ray's controller imports this module too, to hand it on; so nothing heavy is imported at its top.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.failpoints import arm
from raytrain_ddp.messages import WorkerFailed
from raytrain_ddp.ray_backend.failure_causes import (
    cause_of,
    is_lack_of_memory,
    users_traceback,
    without_memory,
)

if TYPE_CHECKING:
    from raytrain_ddp.ray_backend.ray_session import RaySession

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """All that a worker is given.

    Args:
        task: the task, pickled, where its name is not enough.
        board: the handle of the Board actor.
        lease: the token by which the driver holds the run; "": not known.
        look_every_s: how often to look for a notice that nodes are taken away; 0: never.
        failpoints: what the driver's environment arms, and the folder in which it is noted.
    """

    config: dict[str, Any] = dataclasses.field(repr=False)  # a URI in it may hold a secret
    folder: str
    import_paths: tuple[str, ...]
    log_folder: str | None
    board: Any
    lease: str = ""
    look_every_s: float = 0.0
    failpoints: tuple[str, str] = ("", "")
    task: bytes | None = dataclasses.field(default=None, repr=False)


def train_on_worker(loop_config: dict[str, WorkerSettings]) -> None:
    """The train function of the TorchTrainer; Ray hands it a dict."""
    given = loop_config["given"]
    end_with_parent()
    import ray
    import ray.train
    import torch.distributed as dist

    rank = ray.train.get_context().get_world_rank()
    grouped = dist.is_initialized()
    sessions: list[RaySession] = []
    try:
        if ray.get(given.board.join.remote(_start(), rank, socket.gethostname())):
            _settle(given)
            with _Tee(given.log_folder, rank):
                _train(given, sessions)
    except BaseException as error:
        step = sessions[0].step if sessions else None
        tell_failure(given, rank, step, error, torn_down=grouped and not dist.is_initialized())
        raise


def _train(given: WorkerSettings, sessions: list[RaySession]) -> None:
    """`sessions`: the one that is made is added to them, whatever comes."""
    from raytrain_ddp.checkpoint.lease import is_seen
    from raytrain_ddp.checkpoint.run_folder import run_storage
    from raytrain_ddp.config.recipe import from_dict
    from raytrain_ddp.errors import PreflightError
    from raytrain_ddp.ray_backend.ray_session import RaySession
    from raytrain_ddp.tasks.task_loading import load_task
    from raytrain_ddp.training.loop import train
    from raytrain_ddp.training.recorder import Best
    from raytrain_ddp.uri import without_secrets

    config = from_dict(given.config)
    if given.lease and not is_seen(run_storage(config), given.lease):
        raise PreflightError(
            f"storage = {without_secrets(config.storage)}: node {socket.gethostname()} does not "
            "see the run's folder there, or sees an older local folder. Several nodes need a "
            "shared folder or a URI."
        )
    if given.task is not None:
        config = dataclasses.replace(config, task=pickle.loads(given.task))
    reads: set[str] = set()
    task = load_task(config, reads)
    best = Best(task.monitor, task.goal)
    with RaySession(config, given.board, best, given.look_every_s, _start()) as session:
        sessions.append(session)
        outcome = train(config, task, session, reads)
        if session.is_taken_away(outcome):
            outcome = dataclasses.replace(outcome, signal=session.hold())
        session.tell(outcome)


def _settle(given: WorkerSettings) -> None:
    """Same folder, import paths and failpoints as the driver's, where this machine has them."""
    if Path(given.folder).is_dir():
        os.chdir(given.folder)
    for path in reversed(given.import_paths):
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)
    arm(*given.failpoints)


def end_with_parent() -> None:
    """From now on Linux ends this process when the one that started it (Ray's raylet) is gone.

    A worker of Ray 2.60 notices that by itself, too, and wants to exit. But a thread of Ray Train
    that hands a report to the dead controller waits for ever, and Python's exit waits for it.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


def _start() -> str:
    """What the workers of one start share, and no others: where they met."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def tell_failure(
    given: WorkerSettings,
    rank: int,
    step: int | None,
    error: BaseException,
    torn_down: bool = False,
) -> None:
    """All ranks tell theirs: the driver finds the one that the others only suffer from.

    Args:
        torn_down: Ray has ended this rank's process group, as it does when another rank has died:
            whatever is raised then (a ValueError, a KeyError) may come from that.
    """
    import ray

    from raytrain_ddp.errors import RaytrainError, status_of

    if is_lack_of_memory(error):
        error = without_memory(given.config, rank, step, error)
    known = isinstance(error, RaytrainError)
    event = WorkerFailed(
        start=_start(),
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=f"{error}" if known and f"{error}" else f"{type(error).__name__}: {error}",
        traceback="" if known else users_traceback(error),
        status=status_of(error) if isinstance(error, RaytrainError) else 1,
        cause=cause_of(error) if known or not torn_down else "peer",
    )
    with suppress(Exception):  # of a board that is gone or slow: the error itself counts more
        ray.get(given.board.push.remote([event]), timeout=10)


class _Tee:
    """Copies this worker's output into the run's own log folder while training lasts.

    A copy that cannot be written, as on a full disk, ends no training.
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
        sys.stdout, sys.stderr = (_Both(stream, self._file) for stream in self._streams)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._file is None:
            return
        sys.stdout, sys.stderr = self._streams
        with suppress(OSError), self._file:
            if error is not None:
                self._file.write("".join(traceback.format_exception(error)))


class _Both:
    """A stream that writes to two."""

    def __init__(self, stream: Any, copy: IO[str]) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        if not self._copy.closed:
            with suppress(OSError):
                self._copy.write(text)
        return int(self._stream.write(text) or len(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
