"""The digits by hand: the model, batch and schedule of the recipe, in the usual thirty lines."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

import raytrain_ddp
from raytrain_ddp.tasks.small_networks import DigitsCNN

BATCH, WARM_UP = 64, 1
FOLDER = Path(raytrain_ddp.__file__).parent / "data" / "digits"


def digits(split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 8, 8), normalized, and labels (n,)."""
    table = pq.read_table(FOLDER / f"{split}-00000-of-00001.parquet").to_pydict()
    images = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"]]
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return (stacked.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25, torch.tensor(table["label"])


def train(lr: float, dropout: float, epochs: int, seed: int = 0) -> Iterator[float]:
    """Yields the accuracy after each epoch."""
    torch.manual_seed(seed)
    (x, y), (x_test, y_test) = digits("train"), digits("test")
    model = DigitsCNN(10, dropout)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = math.ceil(len(x) / BATCH)

    def factor(step: int) -> float:
        if step < WARM_UP * steps:
            return (step + 1) / (WARM_UP * steps)
        share = (step - WARM_UP * steps) / max(1, (epochs - WARM_UP) * steps)
        return 0.5 * (1 + math.cos(math.pi * share))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(x)).split(BATCH):
            dy, dx = torch.randint(-1, 2, (2,)).tolist()
            images = torch.roll(x[rows], (dy, dx), (2, 3))
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(images), y[rows]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            yield (model(x_test).argmax(1) == y_test).float().mean().item()
