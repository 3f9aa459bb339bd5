"""A loop of your own that resumes at any step with the same bits; on Ray, a death repeats no step.

Here: python examples/own_loop.py. On Ray: with --num-workers 3. Or torchrun.
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
    layers = nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    model = run.prepare(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 230)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(10):
        for step in run.steps(points(1437, seed=1), batch_size=64, micro_batch=16):
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.log(loss=step.loss)
        metrics = {"accuracy": MulticlassAccuracy(10)}
        run.log(**run.evaluate(metrics, model, points(600, seed=2)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int)
    raytrain_ddp.launch(train, num_workers=parser.parse_args().num_workers, save_every_s=60)
