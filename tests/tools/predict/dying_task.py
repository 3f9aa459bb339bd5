"""A task whose process dies while it predicts; imported by Ray's workers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from raytrain_ddp import TrainConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.tasks.image_classification import ImageClassification


class DiesOnce(ImageClassification):
    """Digits; a process that predicts dies in a batch, its second, if it can delete the file."""

    def __init__(self, config: TrainConfig, bomb: str, last: str = "2") -> None:
        super().__init__(config)
        self._bomb, self._last, self._batches = Path(bomb), int(last), 0

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        self._batches += 1
        if self._batches == self._last:
            with suppress(FileNotFoundError):
                self._bomb.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(model, batch)
