"""The session without Ray: a single process, or the processes that torchrun starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType

import torch
import torch.distributed as dist

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.config.environment import cpus_of_process, ranks_of_launcher
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.events import Failed, Note
from raytrain_ddp.signals import handling, heeded
from raytrain_ddp.training.monitoring.watchdog import Exchange, Hang, through_folder
from raytrain_ddp.training.runtime.launched import join_launched
from raytrain_ddp.training.runtime.nccl_settings import collective_timeout, set_missing
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Requests, Session


class LocalSession(Session):
    """Runs `train` in this process, for debugging, tests and torchrun."""

    _signal = 0  # the signal that requests a stop
    _reported = False
    _handlers = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        self.close()

    def requests(self) -> Requests:
        if self._signal and not self._reported:
            self._reported = True
            self.tell(Note("Stopping after this step; the checkpoint follows."))
        return Requests(stop=self._signal)

    def requests_in_evaluation(self) -> Requests:
        return LocalSession.requests(self)

    def look(self) -> None: ...

    def status_exchange(self, owners: Sequence[Owner]) -> Exchange | None:
        """None for a single process: it may stop in a debugger for as long as it likes."""
        if self.world.size == 1:
            return None
        return through_folder(self._run, self.world.rank, owners)

    def report_hang(self, hang: Hang) -> None:
        """torchrun, if present, ends the other processes and restarts them all."""
        text = f"{hang.text} A launcher that restarts all workers resumes from there."
        with suppress(Exception):
            self.tell(Failed(None, hang.step, text, hung=True))
        os._exit(RetriesExhausted.exit_status)

    def stop_on_signals(self) -> None:
        """From now on, Ctrl-C, SIGTERM, SIGHUP (not after `nohup`) and Slurm's warnings (SIGUSR1,
        SIGUSR2) request a checkpoint and a stop; a second signal ends the process at once. A second
        SIGHUP does not: both the shell and the kernel send one when a terminal is closed."""
        numbers = heeded()

        def ask(number: int, _: FrameType | None) -> None:
            self._signal = number  # reported later: the handler may have interrupted the display
            for each in numbers:
                signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)

        self._handlers = ExitStack()
        self._handlers.enter_context(handling(numbers, ask))


def join_world(
    scaling: ScalingConfig,
    exact: bool = False,
    nccl: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> World:
    """This process's world: torchrun's if its variables are set, else of size 1.

    Args:
        scaling: `use_gpu`, `backend` and `cpus_per_worker` are used, the last as the number of
            threads. auto: with a GPU, this process's share of the CPUs, for its loader; without,
            OMP_NUM_THREADS or torch's own number.
        exact: auto is 1 on CPUs, as sums depend on the number of threads.
        nccl: see `nccl_settings`.
        tell: see `Waiting`.

    Raises:
        PreflightError: torchrun's variables contradict each other, the other processes do not
            connect, or a GPU is wanted but there is none for this process.
    """
    rank, size, local_rank = ranks_of_launcher()
    gpus = torch.cuda.device_count()
    use_gpu = gpus > 0 if scaling.use_gpu == "auto" else scaling.use_gpu
    if use_gpu and local_rank >= gpus:
        raise PreflightError(
            f"process {local_rank} of this machine needs a GPU, but there are {gpus}: start fewer, "
            "or train on CPUs with --scaling.use-gpu False."
        )
    if size > 1 and not dist.is_initialized():
        over_nccl = use_gpu and scaling.backend != "gloo"
        if over_nccl:
            set_missing(nccl or {})
        join_launched(
            rank,
            size,
            lambda store: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if over_nccl else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=collective_timeout(scaling) if over_nccl else None,
            ),
            tell,
        )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if scaling.cpus_per_worker != "auto" or (exact and not use_gpu):
        threads = scaling.threads
    else:
        threads = cpus_of_process() if use_gpu else torch.get_num_threads()
    return World(rank, size, local_rank, device, threads)


def idle_gpus_note(world: World) -> str:
    """A note if a process that trains alone leaves other GPUs of its machine idle."""
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.size > 1 or gpus < 2:
        return ""
    return (
        f"1 of {gpus} GPUs is used: this is one process. To use all of them, omit --local, or "
        f"use torchrun --nproc-per-node {gpus}."
    )
