"""What others' errors say that their types do not. All texts that decide anything are here.

Seen with torch 2.10 to 2.14 (gloo and CUDA) and Ray 2.60. NCCL's and TCPStore's errors have types:
`torch.distributed.DistError`. What storages say is in `errors.is_passing`.
"""

from __future__ import annotations

import re

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
