"""What the environment says of this process: its CPUs, and its place among those of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from raytrain_ddp.errors import PreflightError


def under_torchrun() -> bool:
    """Whether torchrun (or its elastic agent) started this process. Then the workers already exist;
    also, torchrun parses a ``--local`` after the script's name as one of its own options."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ranks_of_launcher() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets; 0, 1 and 0 without it.

    Raises:
        PreflightError: they do not fit together.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    words = [os.environ.get(name, default) for name, default in defaults.items()]
    rank, size, local_rank = (int(w) if w.isdecimal() and len(w) < 7 else -1 for w in words)
    torch, port = sys.modules.get("torch"), os.environ.get("MASTER_PORT", "")
    is_initialized = torch is not None and torch.distributed.is_initialized()  # by the caller
    has_address = bool(os.environ.get("MASTER_ADDR")) and port.isdecimal() and int(port) < 65536
    can_meet = size == 1 or is_initialized or has_address
    if not 0 <= rank < size or local_rank < 0 or not can_meet:
        names = [*defaults, *([] if can_meet else ["MASTER_ADDR", "MASTER_PORT"])]
        given = ", ".join(f"{name} = {os.environ.get(name, 'not set')}" for name in names)
        raise PreflightError(
            f"the environment has {given}: start with torchrun, which sets these, or unset them."
        )
    return rank, size, local_rank


def usable_cpus(environ: Mapping[str, str] = os.environ) -> int:
    """The CPUs that this process may use: those of its affinity mask, and, within a Slurm job, no
    more than those of its task."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    in_step = "SLURM_STEP_ID" in environ  # else the job's script, which may use what the node gave
    given = environ.get("SLURM_CPUS_PER_TASK" if in_step else "SLURM_CPUS_ON_NODE", "")
    return min(cpus, int(given)) if given.isdecimal() and int(given) else cpus


def cpus_of_process(environ: Mapping[str, str] = os.environ) -> int:
    """This process's share of the CPUs, whatever OMP_NUM_THREADS says (torchrun sets 1)."""
    local = environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cpus(environ) // max(1, int(local) if local.isdecimal() else 1))
