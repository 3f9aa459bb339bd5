"""Connects the processes that torchrun or another launcher starts, if there are any."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raytrain_ddp.config.environment import cpus_of_process, ranks_of_launcher
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import PreflightError, first_line
from raytrain_ddp.training.runtime.nccl_settings import collective_timeout, set_missing
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.uri import answer_within

LIMIT_S = 600.0  # as torchrun waits for its nodes
_FIRST_NOTE_S = 5.0
_POLL_S = 0.05
UNSET = (
    "Start all WORLD_SIZE processes with the same command line, as torchrun does; for a single "
    "process, unset RANK and WORLD_SIZE."
)


class Waiting:
    """Reports at growing intervals what this process waits for, and for how long.

    Args:
        what: what is missing now.
        tell: shows a line; None: on standard error.
    """

    def __init__(self, what: Callable[[], str], tell: Callable[[str], None] | None) -> None:
        self._what, self._tell = what, tell or (lambda text: print(text, file=sys.stderr))
        self._began, self._next_s = time.monotonic(), _FIRST_NOTE_S

    def look(self) -> bool:
        """Reports it if it is time; returns whether the time limit has passed."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._next_s *= 2
            self._tell(f"{self._what()}: {waited_s:.0f} s so far, at most {LIMIT_S:.0f} s")
        return waited_s >= LIMIT_S


def join_launched(
    rank: int, size: int, connect: Callable[[Any], None], tell: Callable[[str], None] | None
) -> None:
    """Waits until all processes have reached their store, and connects them through it.

    The thread that calls it can be interrupted by signals at any time.

    Args:
        connect: receives the store; called in another thread.
        tell: see Waiting.

    Raises:
        PreflightError: some did not connect, or this one cannot reach the others.
    """
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    there, given_up = 0, threading.Event()

    def join() -> None:
        nonlocal there
        limit = timedelta(seconds=LIMIT_S)
        # With a size of 1, the store does not silently wait for the others.
        store, _, _ = next(dist.rendezvous("env://", rank, 1, timeout=limit))  # type: ignore[attr-defined]
        # torchrun's store survives a restart, with the addresses of the previous processes.
        start = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
        if store.add(f"rank-{rank}", 1) > 1:
            raise PreflightError(f"another process at {at} has RANK = {rank}, too. {UNSET}")
        store.add("there", 1)
        while (there := store.add("there", 0)) < size and not given_up.is_set():
            time.sleep(_POLL_S)
        connect(store)

    def what() -> str:
        if 0 < there < size:
            return f"rank {rank} waits for {size - there} of {size} processes at {at}"
        return f"rank {rank} waits for " + (f"its {size - 1} peers" if there else f"rank 0 at {at}")

    answer = answer_within(LIMIT_S, join, Waiting(what, tell).look)
    given_up.set()
    if isinstance(answer, PreflightError):
        raise answer
    if isinstance(answer, TimeoutError):
        raise PreflightError(f"{what()}, which did not connect within {LIMIT_S:g} s. {UNSET}")
    if isinstance(answer, Exception):
        raise PreflightError(f"rank {rank} cannot connect at {at}: {first_line(answer)} {UNSET}")


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
