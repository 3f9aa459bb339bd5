"""Train functions for tests of loops of one's own, and how groups of workers call them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tiny import ScriptedMembership, bits, log_of, newest
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from raytrain_ddp import failpoints
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import CheckpointConfig, LogConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tasks.task import OwnLoop
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.own_run import OwnRun
from raytrain_ddp.training.runtime.world import World

ROWS, EPOCHS = 86, 3  # 4 steps an epoch; the last is smaller


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Noise, augmented with the global generator."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        x = torch.sin(torch.arange(6.0) * (row + 1))
        return x + 0.1 * torch.randn(6), row % 3


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    )


def plain_loop(run: OwnRun) -> None:
    """Batch norm, dropout, a scheduler per step and one per epoch, clipping, an evaluation."""
    model = run.prepare(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run.register(model=model, optimizer=optimizer, warm=warm, decay=decay)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(Samples(), batch_size=24, micro_batch=6):
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            warm.step()
            optimizer.zero_grad()
            run.log(loss=step.loss, norm=model.state_dict()[next(iter(model.state_dict()))].norm())
        decay.step()
        run.log(**run.evaluate({"accuracy": MulticlassAccuracy(3)}, model, Samples()))


LOOP = """
def train(run):
    model = run.prepare(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.register(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        for step in run.steps(Samples(), batch_size=24, micro_batch=6):
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


def changed_loop(old: str, new: str, run: OwnRun) -> None:
    """`LOOP` with another text in the place of `old`."""
    assert old in LOOP
    names = dict(globals())
    exec(LOOP.replace(old, new), names)
    names["train"](run)


def counting_loop(by_tokens: bool, run: OwnRun) -> None:
    """Keeps the gradient of the first step, in float64, and of all its samples at once."""
    torch.manual_seed(3)
    model = run.prepare(nn.Linear(6, 3).double())
    run.register(model=model)
    data = [(torch.sin(torch.arange(6.0, dtype=torch.float64) * (n + 1)), n % 3) for n in range(19)]

    def losses(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = y + 1 if by_tokens else torch.ones_like(y)  # a sample of class y has y + 1 tokens
        return (cross_entropy(model(x), y, reduction="none") * tokens).sum(), tokens.sum()

    for _ in run.epochs(1):
        for step in run.steps(data, batch_size=20, micro_batch=4):
            for x, y in step:
                total, count = losses(x, y)
                step.backward(total / count, **({"count": count} if by_tokens else {}))
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            of_all = [torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])]
            total, count = losses(*of_all)
            whole = torch.autograd.grad(total / count, [*model.parameters()])
            for own, other in zip(found, whole, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(step.loss, (total / count).detach(), rtol=1e-12, atol=0)


def scaled_loop(run: OwnRun) -> None:
    """A GradScaler whose first scale overflows in float16's range on one rank's slot only."""
    model = run.prepare(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    run.register(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(Samples(), batch_size=24, micro_batch=6):
            for number, (x, y) in enumerate(step):
                big = 1e35 if run.rank == 0 and number == 0 else 1.0
                step.backward(cross_entropy(model(x), y) * (big if run.step == 1 else 1.0))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.log(scale=scaler.get_scale())


def adversaries_loop(run: OwnRun) -> None:
    """Two networks that are updated one after another in each step."""
    made, judge = run.prepare(nn.Linear(2, 6)), run.prepare(nn.Linear(6, 1))
    of_made, of_judge = (torch.optim.Adam(net.parameters(), 1e-2) for net in (made, judge))
    run.register(made=made, judge=judge, of_made=of_made, of_judge=of_judge)
    for _ in run.epochs(EPOCHS):
        for step in run.steps(Samples(), batch_size=24, micro_batch=6):
            for x, _ in step:
                fake = made(torch.randn(len(x), 2)).detach()
                step.backward((judge(fake) - judge(x)).mean())
            of_judge.step()
            for x, _ in step:
                step.backward(-judge(made(torch.randn(len(x), 2))).mean())
            of_made.step()
            of_made.zero_grad()
            of_judge.zero_grad()


def own_config(folder: Path, exact: bool = False, every: int = 2) -> TrainConfig:
    return TrainConfig(
        task="tests:loop(run)",
        name="own",
        storage=str(folder),
        batch_size=10**7,
        micro_batch=1,
        exact=exact,
        checkpoint=CheckpointConfig(every_steps=every, every_s=0),
        log=LogConfig(every_steps=1, tensorboard=False),
        scaling=ScalingConfig(use_gpu=False, check_every_steps=1),
    )


def run_own(
    rank: int, size: int, config: Mapping[str, Any], loop: Any, stop_at: int = 0, points: str = ""
) -> tuple[int, int]:
    """Calls a loop on one worker; returns the steps done, and the signal that stopped it."""
    made = from_dict(config)
    failpoints.arm(points, f"{made.storage}/fired")
    world = World(rank, size, rank, torch.device("cpu"), 1)
    membership = ScriptedMembership(world, stop_at)
    try:
        outcome = take_part(membership, made, lambda _: Build(made, world, OwnLoop(loop)))
    finally:
        failpoints.arm("", "")
    assert outcome is not None
    return outcome.step, outcome.signal


def result(config: TrainConfig) -> tuple[Any, Any]:
    """Hashes of all states in the newest checkpoint, and the log without times."""
    checkpoint = newest(config)
    state = json.loads(checkpoint.read("state.json"))
    log = [(r["step"], r.get("loss"), r.get("scalars"), r.get("metrics")) for r in log_of(config)]
    return {**bits(config), "state": sha256(json.dumps(state).encode()).hexdigest()}, log
