"""Handles all differences between the supported versions of torch; no other file does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.14 renamed it; from then on the old name raises a FutureWarning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(parts: Tensor, own: Tensor, async_op: bool = False) -> Any:
    """Puts each rank's `own` into its row of `parts`; all ranks take part.

    Both are passed on flat: gloo accepts no other shapes.

    Args:
        parts: contiguous, shape (ranks, ...) or flat, with as many elements.
        own: contiguous, of any shape.

    Returns:
        A `dist.Work` if `async_op`, else None.
    """
    return _all_gather(parts.view(-1), own.view(-1), async_op=async_op)


def end_group(is_aborted: bool) -> None:
    """Ends the default process group, also one whose start has failed: without a group, torch keeps
    counting them, and ranks with other counts would never meet.

    Args:
        is_aborted: some of its collectives will never be done; do not wait for them.
    """
    if dist.is_initialized() and is_aborted:
        dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._world.group_count = 0


def set_timeout(limit: timedelta) -> None:
    """Sets the time limit of the collectives to come in the default process group."""
    group = dist.distributed_c10d
    (getattr(group, "set_timeout", None) or group._set_pg_timeout)(limit)
