"""Differences between versions of torch, and tensors that gloo accepts."""

from __future__ import annotations

import torch
from processes import Group
from torch import Tensor

from raytrain_ddp.training.runtime.torch_compat import all_gather


def gathered(rank: int, size: int) -> list[Tensor]:
    """Rank r gives a row of the value r + 1, in all shapes that callers use."""
    found = []
    for shape in ((5,), (1, 5)):
        parts = torch.zeros(size, 5)
        all_gather(parts, torch.full(shape, rank + 1.0))
        found.append(parts)
    flat = torch.zeros(size * 5)
    work = all_gather(flat, torch.full((5,), rank + 1.0), async_op=True)
    work.wait()
    return [*found, flat.view(size, 5)]


def test_gather_accepts_rows_and_flat_tensors_over_gloo_without_a_warning(workers: Group):
    """Warnings are errors in workers, so a deprecated name of torch would fail."""
    expected = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 5)
    for every in workers(3, gathered):
        assert all(torch.equal(each, expected) for each in every)
