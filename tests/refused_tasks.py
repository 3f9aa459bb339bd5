"""Rows of the table of errors: mistakes in tasks, models and losses, found by a dry run."""

from __future__ import annotations

from refused import Row

TASK = """
import torch
from torch import nn
from raytrain_ddp import ArraySource, Data, Task


class Good(Task):
    def model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        return Data(ArraySource({"x": torch.ones(8, 2), "y": torch.ones(8, 1)}))

    def eval_data(self):
        return None

    def metrics(self):
        return {}

    def evaluate(self, model, batch, metrics):
        pass

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()


class NoModel(Good):
    def model(self):
        return None


class NoLoss(Good):
    loss = None


class NoData(Good):
    def train_data(self):
        return [1, 2]
"""
FILES = {"task.py": TASK}
RUN = "--local --dry-run --batch-size 4 --micro-batch 2 --task"
ROWS = [
    Row(f"{RUN} task.py:NoModel", 1, "NoModel.model None", FILES),
    Row(f"{RUN} task.py:NoData", 1, "NoData.train_data", FILES),
    Row(f"{RUN} task.py:NoLoss", 1, "NoLoss loss()", FILES),
    Row(f"{RUN} task.py:Good --task-options.depth 3", 2, "depth", FILES),
]
