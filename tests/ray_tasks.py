"""Tasks that misbehave, for tests with a real Ray: imported by its workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor, nn

from raytrain_ddp import TrainConfig
from raytrain_ddp.data.source import Batch
from raytrain_ddp.tasks.images import ImageClassification


class KilledOnce(ImageClassification):
    """Digits; rank 1 kills itself (SIGKILL) in its `at`-th forward pass, once per marker file."""

    def __init__(self, config: TrainConfig, marker: str, at: str, pause_s: str = "0") -> None:
        super().__init__(config)
        self._marker, self._at, self._pause_s = Path(marker), int(at), float(pause_s)
        self._passes = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._passes += 1
        time.sleep(self._pause_s)  # so that a test can act in the middle of a run
        if os.environ["RANK"] == "1" and self._passes == self._at and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Faulty(ImageClassification):
    """Digits; raises in the user's code on every rank."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._fault(batch)

    def _fault(self, batch: Batch) -> Tensor:
        return batch["no such key"]
