"""A task for tests with a real Ray; imported by its workers."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, nn

from raytrain_ddp import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.tasks.image_classification import ImageClassification


class Paced(ImageClassification):
    """Digits, with a pause in each forward pass while a file exists."""

    def __init__(self, config: TrainConfig, slow: str, pause_s: str = "0.05") -> None:
        super().__init__(config)
        self._slow, self._pause_s = Path(slow), float(pause_s)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._slow.exists():
            time.sleep(self._pause_s)
        return super().loss(model, batch)
