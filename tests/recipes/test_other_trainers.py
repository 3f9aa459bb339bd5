"""The arguments of other trainers, as docs/reference/other-trainers.md translates them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from split_checks import folder as class_folders
from timm.scheduler import create_scheduler_v2
from torch import nn

from raytrain_ddp import fit_locally
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate

Flags = Mapping[str, str]  # flag -> its values
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "other-trainers.md"


def flags_of(words: str) -> dict[str, str]:
    pairs = re.findall(r"(--\S+)\s*((?:(?!--)\S+\s*)*)", words)
    return {flag: " ".join(values.split()) for flag, values in pairs}


# Of flags that the page shows without a value.
VALUES = flags_of("""
    --augment.crop random --augment.scale 0.2 1 --augment.jitter 0.4 0.4 0.4 0
    --augment.policy randaugment --augment.magnitude 7 --augment.erase 0.5 --augment.repeats 2
    --augment.mixup 0.2 --augment.cutmix 1 --batch-size 8 --micro-batch 4 --compute.precision bf16
    --checkpoint.every-epochs 1 --checkpoint.every-s 5 --checkpoint.every-steps 1
    --checkpoint.keep-last 3 --data.eval-crop 0.9 --data.eval-size 48 --data.image-size 48
    --data.eval-split val --data.train-split train --data.interpolation bicubic --data.workers 2
    --data.mean 0.5 0.5 0.5 --data.std 0.2 0.2 0.2 --data.source photos --ema.decay 0.9 --epochs 1
    --eval.every-epochs 1 --eval.every-steps 1 --eval.micro-batch 2 --limit-eval-batches 1
    --limit-train-batches 1 --log.every-steps 1 --max-time 10m --model.name own_net.py:net
    --model.weights runs/first --name other --optim.betas 0.9 0.99 --optim.clip-norm 1
    --optim.label-smoothing 0.1 --optim.layer-decay 0.8 --optim.lr 0.01 --optim.momentum 0.8
    --optim.name sgd --optim.nonfinite skip --optim.weight-decay 0.01 --overfit-batches 1
    --schedule.final-lr 0.01 --schedule.gamma 0.2 --schedule.name cosine --schedule.step-epochs 1
    --schedule.warmup-epochs 1 --scaling.use-gpu false --seed 1 --steps 2 --stop.min-delta 0.01
    --stop.patience 2 --storage elsewhere
""")
NEEDS = {
    "--augment.magnitude": "--augment.policy randaugment",
    "--augment.scale": "--augment.crop random",
    "--augment.spread-repeats": "--augment.repeats 2",
    "--ema.warmup": "--ema.decay 0.9",
    "--model.weights": "--model.name own_net.py:net",
    "--optim.betas": "--optim.name adamw",
    "--optim.layer-decay": "--model.name timm:test_vit",
    "--optim.momentum": "--optim.name sgd",
    "--optim.no-nesterov": "--optim.name sgd",
    "--schedule.final-lr": "--schedule.name cosine",
    "--schedule.gamma": "--schedule.name step",
    "--schedule.step-epochs": "--schedule.name step",
    "--stop.min-delta": "--stop.patience 2",
}
# What the page's own words stand for.
MEANT = {
    "--data.classes A B": "--data.classes cat dog",
    "--model.args drop_path_rate 0.1": "--model.args drop_path_rate 0.1 --model.name timm:test_vit",
    "--model.args bn_momentum 0.05": "--model.args bn_momentum 0.05 "
    "--model.name timm:test_efficientnet",
    "--model.name MODULE:FUNCTION": "--model.name own_net:net",
    "--model.weights FILE": "--model.weights weights.pth",
    "--model.weights RUN": "--model.weights runs/first",
    "--resume-from RUN": "--resume-from runs/first --epochs 2",
}
# Weights on the Hub; torchvision's data sets; minutes; services; Ray; prints only.
NOT_RUN = ("timm:NAME.TAG", "--data.root", "--compute.compile", "--log.wandb", "--log.mlflow")
NOT_RUN += ("--scaling.num-workers", "--dry-run")
BASE = flags_of("""
    --data.source photos --model.name own_net.py:net --data.image-size 32 --epochs 1
    --batch-size 8 --micro-batch 4 --log.no-tensorboard --local --storage runs
""")
NET = """
from torch import nn

def net(classes):
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), *pool, nn.Linear(4, classes))
"""
MOST = 25  # flags of a command line


def rows() -> list[Flags]:
    """For each flag on the page, those to give."""
    spans = [
        span
        for here in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", PAGE.read_text(), re.M)
        for span in re.findall(r"`(--[^`]+)`", here)
        if not span.endswith(NOT_RUN)
    ]
    meant = [flags_of(MEANT.get(span, span)) for span in spans]
    given = [{f: values or VALUES.get(f, "") for f, values in row.items()} for row in meant]
    return [{**flags_of(NEEDS.get(next(iter(row)), "")), **row} for row in given]


def config_of(flags: Flags, name: str) -> Any:
    given = {**BASE, "--name": name, **flags}
    if "--steps" in flags:
        del given["--epochs"]
    if "--log.tensorboard" in flags:
        del given["--log.no-tensorboard"]
    words = " ".join(f"{flag} {values}" for flag, values in given.items())
    return parse_fit(words.split()).config


def together(rows: list[Flags]) -> list[Flags]:
    """A few command lines that have all rows; the state of a run is resumed without changes."""
    lines: list[dict[str, str]] = []
    for row in rows:
        for line in lines:
            both = {**line, **row}
            is_alone = "--resume-from" in both or (len(both) > MOST and both != line)
            clashes = any(flag.replace(".no-", ".") in both for flag in both if ".no-" in flag)
            if is_alone or clashes or both != {**row, **line}:
                continue
            try:
                config_of(both, "tried")
            except ConfigError:
                continue
            line.update(row)
            break
        else:
            lines.append(dict(row))
    return lines


def test_each_row_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows in one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for split in ("train", "val"):
        class_folders(tmp_path / "photos" / split, cat=8, dog=8)
    Path("own_net.py").write_text(NET)
    assert fit_locally(config_of({}, "first")).step == 2
    model: dict[str, Any] = {}
    exec(NET, model)
    torch.save(model["net"](2).state_dict(), "weights.pth")
    assert len(rows()) > 120
    for number, line in enumerate(together(rows())):
        result = fit_locally(config_of(line, f"line-{number}"))
        assert (result.exit_status, result.step > 0) == (0, True), line


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (
            "--epochs 7 --schedule.name cosine --schedule.warmup-epochs 2 --schedule.final-lr 0.02",
            {
                **{"sched": "cosine", "num_epochs": 5, "warmup_epochs": 2, "warmup_prefix": True},
                **{"min_lr": 0.02 * 0.05, "warmup_lr": 0.05 / 15},  # the latter near 0
            },
        ),
        (
            "--epochs 6 --schedule.name step --schedule.warmup-epochs 0 --schedule.step-epochs 2 "
            "--schedule.gamma 0.3",
            {"sched": "step", "num_epochs": 6, "decay_epochs": 2, "decay_rate": 0.3},
        ),
    ],
)
def test_rates_equal_those_of_timm(flags: str, arguments: dict[str, Any]) -> None:
    """min-lr of timm is a learning rate, final-lr here is a fraction of it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.05)
    given: dict[str, Any] = {"step_on_epochs": False, "updates_per_epoch": 7, **arguments}
    scheduler, epochs = create_scheduler_v2(optimizer, **given)
    config = parse_fit(["--optim.lr", "0.05", *flags.split()]).config
    assert config.epochs == epochs
    for step in range(epochs * 7):
        scheduler.step_update(step)
        ours = learning_rate(config, step, 7)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
