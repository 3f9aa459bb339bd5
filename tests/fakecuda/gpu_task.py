"""Digits; each worker notes the GPUs that it sees and the one that it uses."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_ddp import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.tasks.image_classification import ImageClassification


class Noting(ImageClassification):
    def __init__(self, config: TrainConfig, notes: str) -> None:
        super().__init__(config)
        self._notes = Path(notes)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = [str(batch["image"].device), str(torch.cuda.current_device())]
        bus = torch.cuda.get_device_properties(0).pci_bus_id
        seen = [os.environ.get("CUDA_VISIBLE_DEVICES", ""), str(bus)]
        (self._notes / f"rank-{rank}-of-{size}").write_text(" ".join([*found, *seen]))
        return super().loss(model, batch)
