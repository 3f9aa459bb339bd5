"""Two optimizers that take turns: a DCGAN (arXiv:1511.06434) that draws digits of 8 x 8 pixels.

    python examples/dcgan.py --epochs 60
    python examples/dcgan.py --epochs 60 --num-workers 2    # on Ray

A loop of its own goes over the batches of a step once for each network.
"""

from __future__ import annotations

import argparse
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

import raytrain_ddp


def networks(width: int) -> tuple[nn.Module, nn.Module]:
    """Draws images from noise of shape (n, 32, 1, 1); judges images, (n,) logits."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width),
        nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4), nn.Flatten(0)
    )
    return generator, discriminator


def train(epochs: int, width: int, run: raytrain_ddp.OwnRun) -> None:
    generator, discriminator = map(run.prepare, networks(width))
    adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))
    of_generator, of_discriminator = adam(generator.parameters()), adam(discriminator.parameters())
    run.register(generator=generator, of_generator=of_generator)
    run.register(discriminator=discriminator, of_discriminator=of_discriminator)

    def drawn(count: int) -> Tensor:
        image: Tensor = generator(torch.randn(count, 32, 1, 1, device=run.device))
        return image

    def judge(_: nn.Module, batch: list[Tensor], metrics: dict[str, MeanMetric]) -> None:
        metrics["taken_for_real"].update(discriminator(drawn(len(batch[0]))).sigmoid())

    data, held_out = digits("train"), digits("test")
    for _ in run.epochs(epochs):
        for step in run.steps(data, batch_size=64, micro_batch=16):
            for (real,) in step:
                false = discriminator(drawn(len(real)).detach())
                step.backward(softplus(-discriminator(real)).mean() + softplus(false).mean())
            of_discriminator.step()
            run.log(discriminator=step.loss)
            for (real,) in step:
                step.backward(softplus(-discriminator(drawn(len(real)))).mean())
            of_generator.step()
            of_generator.zero_grad()
            of_discriminator.zero_grad()
        metrics = {"taken_for_real": MeanMetric()}
        run.log(**run.evaluate(metrics, generator, held_out, update=judge))


def digits(split: str) -> TensorDataset:
    files = Path(raytrain_ddp.__file__).parent.glob(f"data/digits/{split}-*.parquet")
    rows = parquet.read_table(next(files))["image"].to_pylist()
    images = np.stack([np.asarray(Image.open(BytesIO(row["bytes"])).convert("L")) for row in rows])
    return TensorDataset(torch.from_numpy(images[:, None].astype(np.float32) / 127.5 - 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-workers", type=int)
    given = parser.parse_args()
    loop = partial(train, given.epochs, given.width)
    raytrain_ddp.launch(loop, name="dcgan", num_workers=given.num_workers)
