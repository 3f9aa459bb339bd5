"""Two optimizers that take turns: a DCGAN (arXiv:1511.06434) that draws digits of 8 x 8 pixels.

    python -m raytrain_ddp.fit --task examples/dcgan.py:DCGAN --epochs 60

`loss` is called for each optimizer in turn, on the same batch, while the other network is frozen.
"""

from __future__ import annotations

from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn.functional import softplus
from torchmetrics import MeanMetric

import raytrain_ddp
from raytrain_ddp import ArraySource, Data, Task, TrainConfig


class GAN(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4), nn.Flatten(0)
        )
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(32, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width),
            nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the discriminator, (n,): of the real images, and of as many drawn ones."""
        drawn = self.generator(torch.randn(len(real), 32, 1, 1, device=real.device))
        return self.discriminator(real), self.discriminator(drawn)


class DCGAN(Task):
    monitor, goal, unit = "taken_for_real", "max", "images"

    def __init__(self, config: TrainConfig, width: str = "64") -> None:
        self._width = int(width)

    def model(self) -> nn.Module:
        return GAN(self._width)

    def train_data(self) -> Data:
        return Data(digits("train"))

    def eval_data(self) -> Data:
        return Data(digits("test"))

    def optimizer(self, model: Any) -> dict[str, torch.optim.Optimizer]:
        adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999), fused=True)
        return {name: adam(network.parameters()) for name, network in model.named_children()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], optimizer: str) -> Tensor:
        real, drawn = model(batch["image"])
        binary_cross_entropy = softplus(-real).mean() + softplus(drawn).mean()
        return softplus(-drawn).mean() if optimizer == "generator" else binary_cross_entropy

    def metrics(self) -> dict[str, Any]:
        return {"taken_for_real": MeanMetric()}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        metrics["taken_for_real"].update(model(batch["image"])[1].sigmoid())


def digits(split: str) -> ArraySource:
    files = Path(raytrain_ddp.__file__).parent.glob(f"data/digits/{split}-*.parquet")
    rows = parquet.read_table(next(files))["image"].to_pylist()
    images = np.stack([Image.open(BytesIO(row["bytes"])).convert("L") for row in rows])
    return ArraySource({"image": images[:, None].astype(np.float32) / 127.5 - 1})  # (n, 1, 8, 8)
