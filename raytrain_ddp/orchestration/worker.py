"""What runs in each Ray Train worker.

Ray's controller imports this module too, to hand it on; so nothing heavy is imported at its top.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.failpoints import arm


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """All that a worker is given.

    Args:
        board: the handle of the Board actor.
        look_every_s: how often to look for a notice that nodes are taken away; 0: never.
        failpoints: what the driver's environment arms, and the folder in which it is noted.
    """

    config: dict[str, Any]
    folder: str
    import_paths: tuple[str, ...]
    log_folder: str | None
    board: Any
    look_every_s: float = 0.0
    failpoints: tuple[str, str] = ("", "")


def train_on_worker(loop_config: dict[str, WorkerSettings]) -> None:
    """The train function of the TorchTrainer; Ray hands it a dict."""
    given = loop_config["given"]
    _settle(given)
    import ray
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    if not ray.get(given.board.join.remote(_start(), rank, socket.gethostname())):
        return
    with _Tee(given.log_folder, rank):
        _train(given, rank)


def _train(given: WorkerSettings, rank: int) -> None:
    from raytrain_ddp.orchestration.session import RaySession
    from raytrain_ddp.recipe import from_dict
    from raytrain_ddp.tasks.load import load_task
    from raytrain_ddp.training.loop import train
    from raytrain_ddp.training.recorder import Best

    session: RaySession | None = None
    try:
        config = from_dict(given.config)
        task = load_task(config)
        best = Best(task.monitor, task.goal)
        with RaySession(config, given.board, best, given.look_every_s) as session:
            outcome = train(config, task, session)
            if session.is_taken_away(outcome):
                outcome = dataclasses.replace(outcome, signal=session.hold())
            session.tell({"kind": "outcome", **dataclasses.asdict(outcome)})
    except BaseException as error:
        tell_failure(given, rank, session.step if session is not None else None, error)
        raise


def _settle(given: WorkerSettings) -> None:
    """Same folder, import paths and failpoints as the driver's, where this machine has them."""
    if Path(given.folder).is_dir():
        os.chdir(given.folder)
    for path in reversed(given.import_paths):
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)
    arm(*given.failpoints)


def _start() -> str:
    """What the workers of one start share, and no others: where they met."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def tell_failure(given: WorkerSettings, rank: int, step: int | None, error: BaseException) -> None:
    """All ranks tell theirs: the driver finds the one that the others only suffer from."""
    import ray

    from raytrain_ddp.errors import RaytrainError

    if _is_lack_of_memory(error):
        error = _without_memory(given.config, rank, step, error)
    known = isinstance(error, RaytrainError)
    event = {
        "kind": "failed",
        "start": _start(),
        "rank": rank,
        "step": step,
        "error": type(error).__name__,
        "message": str(error) if known else f"{type(error).__name__}: {error}",
        "traceback": "" if known else _users_traceback(error),
        "status": error.exit_status if isinstance(error, RaytrainError) else 1,
        "cause": "error" if known else cause_of(error),
    }
    ray.get(given.board.push.remote([event]), timeout=10)


def cause_of(error: BaseException) -> str:
    """ "peer": another worker died; "outside": may pass by itself; "error": will happen again."""
    import torch.distributed as dist
    from ray.exceptions import RayError

    words = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "c10d")
    of_collectives = any(word in str(error).lower() for word in words)
    if isinstance(error, (RayError, dist.DistError)) or not isinstance(error, Exception):
        return "peer"  # Ray's own collectives, torch's, or an end from outside
    if isinstance(error, RuntimeError) and of_collectives:
        return "peer"
    passing = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH)
    if isinstance(error, (ConnectionError, TimeoutError)):
        return "outside"
    return "outside" if isinstance(error, OSError) and error.errno in passing else "error"


def _is_lack_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _without_memory(
    config: Mapping[str, Any], rank: int, step: int | None, error: BaseException
) -> BaseException:
    """The config's own remedy. It would happen again, so it is not retried."""
    import resource

    import torch

    from raytrain_ddp.errors import RetriesExhausted

    gib = 2**30
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        peak = f"{torch.cuda.max_memory_allocated() / gib:.1f} of {total / gib:.1f} GiB on its GPU"
    else:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = f"{kib * 1024 / gib:.1f} GiB of its host's memory"
    when = f"at step {step}" if step else "while starting"
    return RetriesExhausted(
        f"rank {rank} had too little memory {when}, with {peak} in use at its peak. Lower "
        f"--micro-batch (now {config['micro_batch']}): the global batch of "
        f"{config['batch_size']} stays. {next(iter(str(error).splitlines()), '')}"
    )


def _users_traceback(error: BaseException) -> str:
    """Without the frames of this package that lead to the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parent.parent)
    mine = [n for n, f in enumerate(frames) if f.filename.startswith(package)]
    users = frames[mine[-1] + 1 :] if mine and mine[-1] + 1 < len(frames) else frames
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    return "".join(lines + traceback.format_exception_only(type(error), error))


class _Tee:
    """Copies this worker's output into the run's own log folder while training lasts."""

    def __init__(self, folder: str | None, rank: int) -> None:
        there = folder is not None and Path(folder).parent.is_dir()
        self._path = Path(str(folder)) / f"rank-{rank}.log" if there else None
        self._file: IO[str] | None = None
        self._streams: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Both(stream, self._file) for stream in self._streams)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._file is None:
            return
        if error is not None:
            self._file.write("".join(traceback.format_exception(error)))
        sys.stdout, sys.stderr = self._streams
        self._file.close()


class _Both:
    """A stream that writes to two."""

    def __init__(self, stream: Any, copy: IO[str]) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        if not self._copy.closed:
            self._copy.write(text)
        return int(self._stream.write(text) or len(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
