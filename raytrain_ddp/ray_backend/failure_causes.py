"""Classifies worker failures: transient ones, and those that would happen again.

All texts of others that decide anything are here, where a type does not tell. Seen with torch 2.10
to 2.14 (gloo and CUDA) and Ray 2.60. NCCL's and TCPStore's errors have types:
`torch.distributed.DistError`. What storages say is in `errors.is_passing`.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import CheckpointError, RemoteTraceback, is_passing
from raytrain_ddp.events import Cause, End
from raytrain_ddp.user_code import is_foreign

_PACKAGE = f"{Path(__file__).parent.parent}/"
_OF_COMPILER = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
# gloo raises a bare RuntimeError; each begins with the line of its source.
_GLOO = re.compile(r"\bgloo/[\w/]+\.(cc|h):\d+\]")
# What Ray raises, even Exception itself, if a part of it is slow or has ended while it starts.
_RAY_STARTS_SLOWLY = (
    *("timed out", "timeout", "failed to start", "failed to connect", "unable to connect"),
    *("failed to get node info", "no node info found", "not have started", "already occupied"),
    *("unavailable", "rpcerror", "raysystemerror", "quickstarterror"),
)
# Ray's monitor of a node's memory has ended a worker.
_RAY_LACKS_MEMORY = ("running low on memory", "NODE_OUT_OF_MEMORY", "OutOfMemoryError")


def cause_of(error: BaseException) -> Cause:
    """ "peer": another worker died; "outside": transient; "error": would happen again.

    A failure classified as transient that repeats at the same step ends the run.
    """
    import torch
    import torch.distributed as dist

    of_ray = getattr(sys.modules.get("ray.exceptions"), "RayError", ())  # none without Ray
    if isinstance(error, (of_ray, dist.DistError)) or not isinstance(error, Exception):
        # Ray's collectives, torch's, or shut down from outside.
        return "error" if is_own_exit(error) else "peer"
    if is_of_gloo(error):
        return "peer"
    # A failing device or driver (ECC, Xid): a new worker may get a working one.
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or is_of_device(error):
        return "error" if is_assertion_on_device(error) else "outside"
    if isinstance(error, OSError):
        return "outside" if is_passing(error) else "error"
    failed_storage = isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)
    return cause_of(error.__cause__) if failed_storage and error.__cause__ else "error"


def is_own_exit(error: BaseException) -> bool:
    """Whether the user's code has called sys.exit(); Ray ends workers in this way as well."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, SystemExit) else []
    ray = Path(getattr(sys.modules.get("ray"), "__file__", "/none/ray")).parent
    return bool(frames) and not frames[-1].filename.startswith(f"{ray}/")


def failure_event(error: BaseException) -> End:
    """The event for an error in rank 0 that ends a run without Ray."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError) or is_of_gloo(error):
        line = next(iter(str(error).splitlines()), "")
        text = "another worker has ended, and rank 0 with it: see that worker's output."
        return End(1, message=f"{text}\n{type(error).__name__}: {line}")
    text = f"the task failed:\n{users_traceback(error)}"
    return End(1, message=text, rank=0, error=type(error).__name__)


def is_lack_of_memory(error: BaseException) -> bool:
    import torch

    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or is_lack_of_host_memory(error)


def out_of_memory_error(
    config: Mapping[str, Any], rank: int, step: int | None, error: BaseException
) -> BaseException:
    """Adds the config's remedy. Not retried: it would happen again."""
    from raytrain_ddp.errors import RetriesExhausted

    when = f"at step {step}" if step else "while starting"
    return RetriesExhausted(
        f"rank {rank} ran out of memory {when}. Lower --micro-batch (now {config['micro_batch']}): "
        f"the global batch of {config['batch_size']} stays the same. "
        f"{next(iter(str(error).splitlines()), '')}"
    )


def users_traceback(error: BaseException) -> str:
    """The traceback from the first line of the user's code, without this package's frames."""
    if isinstance(error.__cause__, RemoteTraceback):
        return str(error.__cause__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [n for n, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)]
    users = [n for n, f in enumerate(frames) if n > min(own, default=-1) and is_foreign(f.filename)]
    if users:  # a torch operation may pass through this package's dispatch mode
        shown = [frame for n, frame in enumerate(frames) if n >= users[0] and n not in own]
        frames = traceback.StackSummary(f for f in shown if not f.filename.endswith(_OF_COMPILER))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join(lines + traceback.format_exception_only(type(error), error))


# ------------------------------------------------------------------ what others say


def is_of_gloo(error: BaseException) -> bool:
    """Whether a collective over gloo has failed: another rank has ended, or does not answer."""
    return isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))


def is_of_device(error: BaseException) -> bool:
    """Whether a CUDA device or its driver has failed. Torch has a type for it, AcceleratorError,
    but not for all."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def is_assertion_on_device(error: BaseException) -> bool:
    """Whether a kernel's own check failed, as for an index out of range."""
    return "assert" in str(error)


def is_lack_of_host_memory(error: BaseException) -> bool:
    """Whether torch could not allocate a tensor on the CPU."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_slow_start_of_ray(error: BaseException) -> bool:
    """Whether Ray may start at the next try."""
    text = f"{type(error).__name__} {error}".lower()
    return any(each in text for each in _RAY_STARTS_SLOWLY)


def is_ended_for_memory(text: str) -> bool:
    """Whether Ray ended a worker, of which it says `text`, as its node ran out of memory."""
    return any(each in text for each in _RAY_LACKS_MEMORY)
