"""The process group: NCCL's settings and time limit, and the wait for a launcher's processes.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, first_line
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
    import torch.distributed as dist

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


_MIN_S = 1800.0
_PATIENCE = 2 * 60  # multiple of scaling.hang_s; the watchdog's own is 60 for the slowest
_HANG_S = 30.0  # auto

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ALWAYS = {
    # A failed or late collective ends the process, which is then replaced. Not 1, which first
    # aborts the communicators, and may itself hang.
    _ON_ERROR: "3",
    # The flight recorder: the last collectives of each rank, which a report of a hang reads. The
    # second switches on the dump below, for which torch 2.10 reads no other name.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    # If the watchdog of this package could not report: the same into a file of each rank.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # Ends a process whose thread for NCCL makes no progress: CUDA or the driver hangs.
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
}
SAME_BITS = {
    # Sums in the order of a ring, and in no switch (NVLS, CollNet), whose order is its own; which
    # algorithm NCCL would take depends on its measurements of the machines.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def nccl_settings(config: TrainConfig) -> dict[str, str]:
    """NCCL's settings for a run. Exact runs sum by themselves, so nothing is pinned for them."""
    pins = config.compute.deterministic and not config.exact
    return ALWAYS | (SAME_BITS if pins else {})


def set_for_replacing(config: TrainConfig) -> None:
    """Sets the variables in a process that continues when another one dies: what torch does about a
    failed collective, ending the process or aborting the communicator, is done by `Connections`,
    which notes it first.

    Raises:
        PreflightError: the environment wants torch to do it.
    """
    for name in (_ON_ERROR, "TORCH_GLOO_LAZY_INIT"):  # the second: a connection shows a death
        wanted = os.environ.setdefault(name, "0")
        if wanted != "0":
            raise PreflightError(
                f"{name}={wanted} is set on {platform.node()}: workers that continue when another "
                "one dies need 0. Unset it, or set --scaling.replace-workers false."
            )
    set_missing(nccl_settings(config))


def set_missing(settings: Mapping[str, str]) -> None:
    """Sets those of the variables that nobody has set, in this process."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def collective_timeout(scaling: ScalingConfig) -> timedelta:
    """After which torch ends a collective of NCCL's: later than any patience of the watchdog, which
    knows more, and above 0 also where that is switched off."""
    hang_s = _HANG_S if isinstance(scaling.hang_s, str) else scaling.hang_s
    return timedelta(seconds=max(_MIN_S, _PATIENCE * hang_s))
