"""What runs in a worker: its process, its part in the run, and its report if it fails.

Ray's controller imports this module, too, to pass it on; so it imports nothing heavy at its top.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.errors import PreflightError, RaytrainError, status_of
from raytrain_ddp.events import Placed, WorkerFailed
from raytrain_ddp.failpoints import arm
from raytrain_ddp.ray_backend.failure_causes import (
    cause_of,
    is_lack_of_memory,
    out_of_memory_error,
    users_traceback,
)
from raytrain_ddp.ray_backend.ray_private import raylet_of_worker
from raytrain_ddp.user_code import UserCode

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.ray_backend.ray_membership import RayMembership


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Everything that a worker receives.

    Args:
        task: the pickled task, if its name does not suffice.
        mailbox: handle of the Mailbox actor.
        threads: CPUs of the worker.
        lease: the token with which the driver holds the run; "": unknown.
        look_every_s: how often to check for preemption notices; 0: never.
        replaced: whether the others go on if a worker dies, which is replaced; else all restart.
        least: how many may go on without the others, see `Member`; 0: none.
        size, most: how many there are at first, and how many there may be; 0: as many as Ray Train
            has placed.
        backend: of their process groups.
        limit_s: the time limit of a collective.
        failpoints: those armed in the driver's environment, and the folder that records them.
        code: the user's modules, which the worker imports from here.
        argv: sys.argv of the driver.
    """

    config: dict[str, Any] = dataclasses.field(repr=False)  # a URI in it may contain a secret
    folder: str
    import_paths: tuple[str, ...]
    log_folder: str | None
    mailbox: Any
    threads: int = 1
    lease: str = ""
    look_every_s: float = 0.0
    replaced: bool = False
    least: int = 0
    size: int = 0
    most: int = 0
    backend: str = "gloo"
    limit_s: float = 1800.0
    failpoints: tuple[str, str] = ("", "")
    argv: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    code: UserCode = dataclasses.field(default_factory=UserCode, repr=False)
    task: bytes | None = dataclasses.field(default=None, repr=False)


def train_on_worker(given: WorkerSettings) -> None:
    """Trains as a worker of the TorchTrainer."""
    import ray.train

    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        given.mailbox.push.remote([Placed(ray.util.get_current_placement_group())])
    if not given.size:
        size = context.get_world_size()
        given = dataclasses.replace(given, least=size, size=size)
    train_as(given, context.get_world_rank())


def train_as(given: WorkerSettings, rank: int) -> None:
    """Trains in this process as the worker of this rank of the run."""
    end_with_raylet()
    place = _place_of_worker(given, rank)
    membership: RayMembership | None = None
    try:
        enter_folder(given.folder, given.import_paths, given.argv)
        arm(*given.failpoints)
        with copied_output(given.log_folder, rank):
            from raytrain_ddp.ray_backend.ray_membership import RayMembership

            membership = RayMembership(given, place)
            with closing(membership):
                _train(given, membership, place)
    except BaseException as error:
        step = membership.step if membership else None
        is_affected = isinstance(error, Exception) and place.has_lost_ranks(error)
        report_failure(given, rank, step, error, is_affected, place.seat.generation)
        if isinstance(error, SystemExit):  # Ray would not take it for a failure
            raise RuntimeError(f"the task called sys.exit({error.code!r})") from error
        raise


def _place_of_worker(given: WorkerSettings, rank: int) -> Place:
    """The place of this worker in the generations; the mailbox keeps the roster."""
    import ray
    import ray.util

    from raytrain_ddp.membership.generations import Place
    from raytrain_ddp.membership.roster import Member

    mailbox, token = given.mailbox, os.urandom(8).hex()
    node, node_id = socket.gethostname(), ray.get_runtime_context().get_node_id()
    member = Member(rank, given.size, given.least, token, 0, node, node_id, most=given.most)
    registry: Any = SimpleNamespace(
        meet=lambda member: ray.get(mailbox.meet.remote(member)),
        is_over=lambda member: ray.get(mailbox.is_over.remote(member)),
    )
    address, stays = ray.util.get_node_ip_address(), given.replaced
    return Place(member, address, registry, given.backend, given.limit_s, stays)


def _train(given: WorkerSettings, membership: RayMembership, place: Place) -> None:
    """Trains in the process groups of `place`, one after another."""
    import ray

    from raytrain_ddp.config.recipe import from_dict
    from raytrain_ddp.errors import OUTAGE_S
    from raytrain_ddp.membership.roster import Seat
    from raytrain_ddp.ray_backend.ray_membership import set_environment
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import made_ahead, take_part

    config, build = from_dict(given.config), None
    require_folder(config, given.lease, OUTAGE_S)

    def make(is_begun: bool = False) -> Build:
        made = config
        if given.task is not None:  # the driver's own task object
            made = dataclasses.replace(config, task=pickle.loads(given.task))
        return Build(made, membership.world, is_begun=is_begun)

    _before_joining(config, given)
    if given.least < given.most and ray.get(given.mailbox.has_formed.remote()):
        # The others train without it meanwhile.
        set_environment(Seat(0, rank=place.rank, size=given.most, local_size=1))
        build = made_ahead(make())
    take_part(membership, config, make, build)


def _before_joining(config: TrainConfig, given: WorkerSettings) -> None:
    """What must precede, or need not wait for, the process group: once this process joins, the
    others wait for it."""
    import torch

    from raytrain_ddp.membership.process_group import (
        nccl_settings,
        set_for_replacing,
        set_missing,
    )

    if "nccl" in given.backend and given.replaced:
        set_for_replacing(config)
    elif "nccl" in given.backend:
        set_missing(nccl_settings(config))
    torch.use_deterministic_algorithms(config.compute.deterministic)  # loads a thousand modules
    gc.freeze()  # imports stay; without them, a collection takes a tenth of the time


def require_folder(config: TrainConfig, lease: str, outage_s: float = 0.0) -> None:
    """Checks that this node sees the run's folder with the driver's lease, if that is known.

    Args:
        outage_s: how long the storage may fail.
    """
    from raytrain_ddp.checkpoint.lease import is_seen
    from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, run_storage
    from raytrain_ddp.errors import with_backoff
    from raytrain_ddp.uri import without_secrets

    def look(_: int) -> bool:
        run = run_storage(config)
        return is_seen(run, lease) if lease else run.exists(CONFIG_FILE)

    def pause(wait_s: float, _: OSError) -> bool:
        time.sleep(wait_s if outage_s else 0.0)
        return bool(outage_s)

    if with_backoff(look, pause, outage_s):
        return
    other = ", or sees an older local folder" if lease else ""
    raise PreflightError(
        f"storage = {without_secrets(config.storage)}: node {socket.gethostname()} does not see "
        f"the run's folder there{other}. Several nodes need a shared folder or a URI."
    )


def report_failure(
    given: WorkerSettings,
    rank: int,
    step: int | None,
    error: BaseException,
    is_affected: bool = False,
    start: str = "",
) -> None:
    """Reports an error of any rank: the driver finds the rank that caused the others' errors.

    Args:
        is_affected: the collectives of this rank were ended as another rank was lost: any
            exception then (a ValueError, a KeyError) may result from that.
        start: see `Joined`; "": it has joined none.
    """
    import ray

    if is_lack_of_memory(error):
        error = out_of_memory_error(given.config, rank, step, error)
    known = isinstance(error, RaytrainError)
    event = WorkerFailed(
        start=start,
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=f"{error}" if known and f"{error}" else f"{type(error).__name__}: {error}",
        traceback="" if known else users_traceback(error),
        status=status_of(error) if isinstance(error, RaytrainError) else 1,
        cause=cause_of(error) if known or not is_affected else "peer",
    )
    with suppress(Exception):  # the mailbox may be gone or slow; the error itself matters more
        ray.get(given.mailbox.push.remote([event]), timeout=10)


# ------------------------------------------------------------------ its process


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
