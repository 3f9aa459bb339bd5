"""Classifies worker failures: transient ones, and those that would happen again."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import CheckpointError, RemoteTraceback, is_passing
from raytrain_ddp.events import End
from raytrain_ddp.messages import Cause
from raytrain_ddp.ray_backend.foreign_texts import (
    is_assertion_on_device,
    is_lack_of_host_memory,
    is_of_device,
    is_of_gloo,
)
from raytrain_ddp.user_code import is_foreign

_PACKAGE = f"{Path(__file__).parent.parent}/"
_WATCHES = "__torch_dispatch__"
_OF_COMPILER = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")


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
        f"rank {rank} ran out of memory {when}, with {peak} in use at its peak. Lower "
        f"--micro-batch (now {config['micro_batch']}): the global batch of "
        f"{config['batch_size']} stays the same. {next(iter(str(error).splitlines()), '')}"
    )


def users_traceback(error: BaseException) -> str:
    """The traceback from the first line of the user's code, without this package's frames."""
    if isinstance(error.__cause__, RemoteTraceback):
        return str(error.__cause__)
    frames = traceback.extract_tb(error.__traceback__)
    above = (n for n, f in enumerate(frames) if f.filename.startswith(_PACKAGE))
    first = next((n for n in above if frames[n].name != _WATCHES), -1)
    others = [n for n, f in enumerate(frames) if n > first and is_foreign(f.filename)]
    if others:  # a torch operation may pass through this package's dispatch mode
        below = (n for n, f in enumerate(frames) if n > others[-1] and f.name == _WATCHES)
        users = frames[others[0] : next(below, len(frames))]
        frames = traceback.StackSummary(f for f in users if not f.filename.endswith(_OF_COMPILER))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join(lines + traceback.format_exception_only(type(error), error))
