"""Makes workers exchange gradients, in full or in a shorter type."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.runtime.world import World


def compress(
    net: nn.Module, config: TrainConfig, scaler: torch.amp.GradScaler, world: World
) -> None:
    """Makes DDP, if `net` is wrapped in it, send gradients as the config says.

    DDP divides by the world size, which is compensated by multiplying the loss (see DdpReduction);
    not for fp16, where a loss of another size overflows at another scale.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    way = config.ddp.compression
    is_ddp = isinstance(net, DistributedDataParallel)
    if not is_ddp or (way == "none" and not scaler.is_enabled()):
        return
    if way == "none":  # fp16: without a hook DDP would divide by the world size
        net.register_comm_hook(None, _summed_bucket)  # type: ignore[operator]
        return
    hook_of_torch: Any = getattr(default_hooks, f"{way}_compress_hook")
    send = partial(hook_of_torch, None)  # None: all ranks

    # No annotations: DDP checks them by identity and refuses strings. It also refuses the bf16
    # hook's name in a torch without CUDA, where bf16 does work over gloo.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if scaler.is_enabled():
            bucket.buffer().mul_(world.size)
        return send(bucket)

    net.register_comm_hook(None, hook)  # type: ignore[operator]


# No annotations, as for the hook above.
def _summed_bucket(_, bucket):  # type: ignore[no-untyped-def]
    """A DDP hook for sums instead of means; its result has the dtype of the gradients."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])
