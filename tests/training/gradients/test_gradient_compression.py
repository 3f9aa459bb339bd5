"""Gradients that are sent in bf16 or fp16, or in full, over three gloo processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from processes import Group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.config.sections import DdpConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.gradients.reduction import compress
from raytrain_ddp.training.runtime.world import World


class GivenGradients(nn.Module):
    """Gets the given gradients for a kernel, a matrix, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        kernel = torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last)
        self.all = nn.ParameterList([kernel, torch.zeros(40, 60), torch.zeros(7)])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum()


def averaged(rank: int, size: int, ddp: DdpConfig, scale: float) -> list[list[Any]]:
    """(own gradients, averaged gradients), with a loss scale if it is above 0."""
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    net = DistributedDataParallel(GivenGradients(), bucket_cap_mb=0.001)
    compress(net, TrainConfig(ddp=ddp), scaler, world)
    random = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(p.shape, generator=random) for p in net.parameters()]
    loss = net(gradients)
    # With a scale, the hook undoes the division by the number of workers.
    scaler.scale(loss / size if scaler.is_enabled() else loss).backward()
    received = [(p.grad / (scale or 1.0)).numpy() for p in net.parameters()]
    return [[each.numpy() for each in gradients], received]


@pytest.mark.parametrize("scale", [0.0, 4.0])
@pytest.mark.parametrize(("compression", "digits"), [("bf16", 8), ("fp16", 11), ("none", 22)])
def test_all_ranks_receive_the_mean_in_the_precision_that_is_sent(
    compression: Literal["bf16", "fp16", "none"], digits: int, scale: float, workers: Group
):
    ranks = workers(3, averaged, DdpConfig(compression=compression), scale)
    for place in range(3):
        mean = sum(own[place] for own, _ in ranks) / 3
        most = sum(abs(own[place]) for own, _ in ranks)
        for _, received in ranks:
            assert (received[place] == ranks[0][1][place]).all()
            assert (abs(received[place] - mean) <= most * 2.0**-digits).all()
