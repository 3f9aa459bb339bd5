"""Memory of batches: the same tensors are reused, but never written to while in use."""

from __future__ import annotations

import gc

import torch

from raytrain_ddp.data.loading.batch_memory import BatchMemory


def test_batch_memory_is_reused_only_when_no_view_is_left() -> None:
    memory = BatchMemory()
    batch = memory.empty(4, 8, 6)
    assert batch.shape == (4, 3, 8, 6)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    place, view = batch.data_ptr(), batch[1:3].flip(0)[0:1].view_as(batch[:1])
    kept = batch.fill_(7)[3:]
    del batch
    other = memory.empty(4, 8, 6).fill_(9)
    assert other.data_ptr() != place
    assert bool((kept == 7).all())
    del kept, view
    gc.collect()
    assert memory.empty(4, 8, 6).data_ptr() == place
