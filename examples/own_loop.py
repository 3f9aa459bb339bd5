"""A loop of your own that resumes at any step, with the same bits: here, a death changes nothing.

python examples/own_loop.py                     in this process
python examples/own_loop.py --num-workers 3     on Ray, whose workers are replaced if they die
torchrun --nproc-per-node 3 examples/own_loop.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import raytrain_ddp


def points(count: int, seed: int) -> TensorDataset:
    """Points around ten centers in 20 dimensions, and which center each belongs to."""
    centers = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(count, 20, generator=generator), labels)


def train(run: raytrain_ddp.OwnRun) -> None:
    net = nn.Sequential(
        *(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    )
    model = run.prepare(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 230)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)

    data, held_out = points(1437, seed=1), points(600, seed=2)
    for _ in run.epochs(10):
        for step in run.steps(data, batch_size=64, micro_batch=16):
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.log(loss=step.loss)
        run.log(**run.evaluate({"accuracy": MulticlassAccuracy(10)}, model, held_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int)
    given = parser.parse_args()
    raytrain_ddp.launch(train, num_workers=given.num_workers, save_every_s=60)
