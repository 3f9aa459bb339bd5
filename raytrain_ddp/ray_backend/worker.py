"""The function that runs in each Ray Train worker.

Ray's controller imports this module, too, to pass it on; so it imports nothing heavy at its top.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import socket
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from raytrain_ddp.events import Placed, WorkerFailed
from raytrain_ddp.failpoints import arm
from raytrain_ddp.ray_backend.failure_causes import (
    cause_of,
    is_lack_of_memory,
    out_of_memory_error,
    users_traceback,
)
from raytrain_ddp.ray_backend.worker_process import (
    copied_output,
    end_with_raylet,
    enter_folder,
    place_of_worker,
    set_environment,
)
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
        least: how many workers continue if others die, which are replaced; 0: all are restarted.
            See ray_workers.py.
        size, most: how many there are at first then, and how many there may be.
        backend: of their process groups then.
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
    least: int = 0
    size: int = 0
    most: int = 0
    backend: str = "gloo"
    failpoints: tuple[str, str] = ("", "")
    argv: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    code: UserCode = dataclasses.field(default_factory=UserCode, repr=False)
    task: bytes | None = dataclasses.field(default=None, repr=False)


def train_on_worker(loop_config: dict[str, WorkerSettings]) -> None:
    """The train function of the TorchTrainer; Ray passes it a dict."""
    import ray.train

    given, rank = loop_config["given"], ray.train.get_context().get_world_rank()
    if rank == 0:
        given.mailbox.push.remote([Placed(ray.util.get_current_placement_group())])
    train_as(given, rank)


def train_as(given: WorkerSettings, rank: int) -> None:
    """Trains in this process as the worker of this rank of the run."""
    end_with_raylet()
    import ray
    import torch.distributed as dist

    node, grouped = socket.gethostname(), dist.is_initialized()
    place = place_of_worker(given, rank, node) if given.least else None
    membership: RayMembership | None = None
    try:
        if place or ray.get(given.mailbox.join.remote(group_name(), rank, node)):
            enter_folder(given.folder, given.import_paths, given.argv)
            arm(*given.failpoints)
            with copied_output(given.log_folder, rank):
                from raytrain_ddp.ray_backend.ray_membership import RayMembership

                look_s = given.look_every_s
                membership = RayMembership(given.mailbox, given.threads, look_s, place)
                with closing(membership):
                    _train(given, membership, place)
    except BaseException as error:
        step = membership.step if membership else None
        torn_down = grouped and not dist.is_initialized()
        report_failure(given, rank, step, error, torn_down, group_name(place))
        if isinstance(error, SystemExit):  # Ray would not take it for a failure
            raise RuntimeError(f"the task called sys.exit({error.code!r})") from error
        raise


def _train(given: WorkerSettings, membership: RayMembership, place: Place | None) -> None:
    """Trains in one process group, or in those of `place` one after another."""
    import ray

    from raytrain_ddp.config.recipe import from_dict
    from raytrain_ddp.errors import OUTAGE_S
    from raytrain_ddp.membership.roster import Seat
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import made_ahead, take_part

    config, build = from_dict(given.config), None
    require_folder(config, given.lease, OUTAGE_S if given.least else 0.0)

    def make(is_begun: bool = False) -> Build:
        made = config
        if given.task is not None:  # the driver's own task object
            made = dataclasses.replace(config, task=pickle.loads(given.task))
        return Build(made, membership.world, is_begun=is_begun)

    if place is not None:
        _before_joining(config, given.backend)
        if given.least != given.most and ray.get(given.mailbox.has_formed.remote()):
            # The others train without it meanwhile.
            set_environment(Seat(0, rank=place.rank, size=given.most, local_size=1))
            build = made_ahead(make())
    take_part(membership, config, make, build)


def _before_joining(config: TrainConfig, backend: str) -> None:
    """What must precede, or need not wait for, the process group: once this process joins, the
    others wait for it."""
    import torch

    from raytrain_ddp.membership.process_group import set_for_replacing

    if "nccl" in backend:
        set_for_replacing(config)
    torch.use_deterministic_algorithms(config.compute.deterministic)  # loads a thousand modules
    gc.freeze()  # imports stay; without them, a collection takes a tenth of the time


def require_folder(config: TrainConfig, lease: str, outage_s: float = 0.0) -> None:
    """Checks that this node sees the run's folder with the driver's lease, if that is known.

    Args:
        outage_s: how long the storage may fail. Others, which keep their state, wait meanwhile.
    """
    from raytrain_ddp.checkpoint.lease import is_seen
    from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, run_storage
    from raytrain_ddp.errors import PreflightError, with_backoff
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


def group_name(place: Place | None = None) -> str:
    """An id shared by the ranks of a process group: its generation in `place`, "" before the first;
    or the rendezvous address of Ray Train's."""
    if place is not None:
        return place.seat.generation
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def report_failure(
    given: WorkerSettings,
    rank: int,
    step: int | None,
    error: BaseException,
    torn_down: bool = False,
    start: str | None = None,
) -> None:
    """Reports an error of any rank: the driver finds the rank that caused the others' errors.

    Args:
        torn_down: Ray has shut down this rank's process group, as it does when another rank has
            died: any exception then (a ValueError, a KeyError) may result from that.
        start: see `Joined`; "": it has joined none. Default: of Ray Train's own process group.
    """
    import ray

    from raytrain_ddp.errors import RaytrainError, status_of

    if is_lack_of_memory(error):
        error = out_of_memory_error(given.config, rank, step, error)
    known = isinstance(error, RaytrainError)
    event = WorkerFailed(
        start=group_name() if start is None else start,
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=f"{error}" if known and f"{error}" else f"{type(error).__name__}: {error}",
        traceback="" if known else users_traceback(error),
        status=status_of(error) if isinstance(error, RaytrainError) else 1,
        cause=cause_of(error) if known or not torn_down else "peer",
    )
    with suppress(Exception):  # the mailbox may be gone or slow; the error itself matters more
        ray.get(given.mailbox.push.remote([event]), timeout=10)
