"""The environment variables and the time limit that a run gives NCCL. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import timedelta

from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError

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
