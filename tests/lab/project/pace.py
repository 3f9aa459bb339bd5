"""A user's task, as it would be in the user's folder: digits, at a pace that tests can follow."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from torch import Tensor, nn

from raytrain_ddp import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.tasks.image_classification import ImageClassification


class Paced(ImageClassification):
    """Records the time of each forward pass by host; pauses until a file `hurry` exists."""

    def __init__(self, config: TrainConfig, notes: str, pause_s: str = "0.2") -> None:
        super().__init__(config)
        self._notes, self._pause_s = Path(notes), float(pause_s)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not (self._notes / "hurry").exists():
            time.sleep(self._pause_s)
        with (self._notes / socket.gethostname()).open("a", encoding="utf-8") as file:
            file.write(f"{time.time():.3f}\n")
        return super().loss(model, batch)
