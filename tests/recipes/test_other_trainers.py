"""The arguments of other trainers, as docs/reference/other-trainers.md translates them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.scheduler import create_scheduler_v2
from torch import nn

from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.tasks.model_zoo import build
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "other-trainers.md"
# Values of the flags that the page shows without one. "-": not on this command line.
VALUES = {
    "augment.crop": "random",
    "augment.cutmix": "1",
    "augment.erase": "0.5",
    "augment.jitter": "0.4 0.4 0.4 0",
    "augment.magnitude": "7",
    "augment.mixup": "0.2",
    "augment.policy": "randaugment",
    "augment.repeats": "2",
    "augment.scale": "0.2 1",
    "checkpoint.every-epochs": "1",
    "checkpoint.every-s": "5",
    "checkpoint.every-steps": "1",
    "checkpoint.keep-last": "3",
    "compute.compile": "-",  # takes minutes
    "compute.precision": "bf16",
    "data.eval-crop": "0.9",
    "data.eval-size": "48",
    "data.eval-split": "val",
    "data.image-size": "48",
    "data.interpolation": "bicubic",
    "data.mean": "0.5 0.5 0.5",
    "data.root": "-",  # of torchvision's data sets
    "data.std": "0.2 0.2 0.2",
    "data.train-split": "train",
    "data.workers": "2",
    "ema.decay": "0.9",
    "ema.warmup": "true",
    "eval.every-epochs": "1",
    "eval.every-steps": "1",
    "eval.micro-batch": "2",
    "limit-eval-batches": "1",
    "limit-train-batches": "1",
    "log.every-steps": "1",
    "log.mlflow": "-",
    "log.wandb": "-",
    "max-time": "10m",
    "name": "other",
    "optim.betas": "0.9 0.99",
    "optim.clip-norm": "1",
    "optim.decay-bias": "true",
    "optim.decay-norms": "true",
    "optim.label-smoothing": "0.1",
    "optim.layer-decay": "0.8",
    "optim.lr": "0.01",
    "optim.momentum": "0.8",
    "optim.name": "sgd",
    "optim.nonfinite": "skip",
    "optim.weight-decay": "0.01",
    "overfit-batches": "1",
    "profile": "",
    "schedule.final-lr": "0.01",
    "schedule.gamma": "0.2",
    "schedule.name": "cosine",
    "schedule.step-epochs": "1",
    "schedule.warmup-epochs": "1",
    "scaling.num-workers": "-",  # of Ray
    "scaling.use-gpu": "false",
    "seed": "1",
    "steps": "1",
    "stop.min-delta": "0.01",
    "stop.patience": "2",
}
# What a flag of a row needs besides.
NEEDS = {
    "augment.scale": ["--augment.crop", "random"],
    "augment.magnitude": ["--augment.policy", "randaugment"],
    "augment.spread-repeats": ["--augment.repeats", "2"],
    "ema.warmup": ["--ema.decay", "0.9"],
    "optim.betas": ["--optim.name", "adamw"],
    "optim.momentum": ["--optim.name", "sgd"],
    "optim.no-nesterov": ["--optim.name", "sgd"],
    "schedule.final-lr": ["--schedule.name", "cosine"],
    "schedule.gamma": ["--schedule.name", "step"],
    "schedule.step-epochs": ["--schedule.name", "step"],
    "stop.min-delta": ["--stop.patience", "2"],
}
GIVEN = {
    "--model.args drop_path_rate 0.1": ["--model.name", "timm:test_vit"],
    "--model.args bn_momentum 0.05": ["--model.name", "timm:test_efficientnet"],
}
_HELP = {"--data.source", "--model.name", "--epochs", "--batch-size", "--micro-batch", "--storage"}
PLACES = ("FILE", "RUN", "NAME")


def rows() -> list[Any]:
    """A flag of a row, with its values if the page has some; named by the arguments there."""
    found = []
    for there, here in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M):
        spans = [span for span in re.findall(r"`([^`]+)`", here) if span.startswith("--")]
        found += [pytest.param([span], id=f"{there[:40]}: {span}") for span in spans]
    return found


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    (tmp_path / "own_net.py").write_text(
        "import timm\n\ndef net(classes):\n"
        "    model = timm.create_model('test_vit', num_classes=classes)\n"
        "    model.set_grad_checkpointing()\n    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_net", None)


def flags_of(spans: list[str]) -> dict[str, list[str]]:
    """Flag -> its values."""
    given: dict[str, list[str]] = {}
    for span in spans:
        words = GIVEN.get(span, []) + span.split()
        for word in words:
            if word.startswith("--"):
                given[word] = []
                last = word
            else:
                given[last].append(word)
    for flag, values in list(given.items()):
        name = flag.removeprefix("--")
        if (values and values[0] not in PLACES) or flag in _HELP:
            continue
        given[flag] = VALUES.get(name, "").split()
        for other in NEEDS.get(name, [])[::2]:
            given[other] = NEEDS[name][1:]
    return {flag: values for flag, values in given.items() if values != ["-"]}


def run(flags: dict[str, list[str]], photos: Path) -> Any:
    base = {
        "--data.source": ["photos"],
        "--model.name": ["timm:test_vit"],
        "--data.image-size": ["32"],
        **({} if "--steps" in flags else {"--epochs": ["1"]}),
        "--batch-size": ["8"],
        "--micro-batch": ["4"],
        "--storage": [str(photos / "runs")],
        "--log.no-tensorboard": [],
    }
    known = {flag: values for flag, values in flags.items() if values or flag not in base}
    words = [word for flag, values in {**base, **known}.items() for word in (flag, *values)]
    return fit_locally(parse_fit([*words, "--local"]).config, default_name="row")


@pytest.mark.parametrize("spans", rows())
def test_each_row_works_as_written(spans: list[str], photos: Path) -> None:
    flags = flags_of(spans)
    if "--resume-from" in flags or "--model.weights" in flags:
        run({"--name": ["first"]}, photos)
        weights = photos / "runs" / "first"
        flags |= {key: [str(weights)] for key in ("--model.weights",) if key in flags}
        flags.pop("--resume-from", None)
    if flags.get("--data.classes") == ["A", "B"]:
        flags["--data.classes"] = (photos / "names.txt").read_text().split()
    if flags.get("--model.name"):
        name = flags["--model.name"][0]
        flags["--model.name"] = [
            {"MODULE:FUNCTION": "own_net:net", "timm:NAME.TAG": "timm:test_vit.r160_in1k"}.get(
                name, name
            )
        ]
    if "r160" in str(flags):
        build(parse_fit(["--model.name", *flags["--model.name"]]).config.model, 2)
        return  # its weights are on the Hub
    flags.pop("--dry-run", None)  # prints only
    result = run(flags, photos)
    assert result.exit_status == 0
    assert result.step >= 1


def rates(config: TrainConfig, steps_per_epoch: int) -> list[float]:
    total = config.epochs * steps_per_epoch
    return [learning_rate(config, step, steps_per_epoch) for step in range(total)]


def test_rates_equal_those_of_timm() -> None:
    """min-lr of timm is a learning rate, final-lr here is a fraction of it."""
    parameter = nn.Parameter(torch.zeros(()))
    steps, lr, min_lr, warmup = 7, 0.05, 1e-3, 2
    config = parse_fit(
        f"--optim.lr {lr} --epochs 7 --schedule.name cosine --schedule.warmup-epochs {warmup} "
        f"--schedule.final-lr {min_lr / lr}".split()
    ).config
    given: dict[str, Any] = {"step_on_epochs": False, "updates_per_epoch": steps}
    optimizer = torch.optim.SGD([parameter], lr)
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=5,
        min_lr=min_lr,
        warmup_epochs=warmup,
        warmup_prefix=True,
        warmup_lr=lr / (warmup * steps + 1),  # near 0
        **given,
    )
    assert epochs == 7
    theirs = []
    for step in range(7 * steps):
        scheduler.step_update(step)
        theirs.append(optimizer.param_groups[0]["lr"])
    assert rates(config, steps) == pytest.approx(theirs, rel=1e-6)

    config = parse_fit(
        f"--optim.lr {lr} --epochs 6 --schedule.name step --schedule.warmup-epochs 0 "
        "--schedule.step-epochs 2 --schedule.gamma 0.3".split()
    ).config
    optimizer = torch.optim.SGD([parameter], lr)
    scheduler, _ = create_scheduler_v2(
        optimizer, "step", num_epochs=6, decay_epochs=2, decay_rate=0.3, **given
    )
    theirs = []
    for step in range(6 * steps):
        scheduler.step_update(step)
        theirs.append(optimizer.param_groups[0]["lr"])
    assert rates(config, steps) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("test_vit", "drop_path_rate", 0.1),
        ("test_vit", "drop_rate", 0.1),
        ("test_vit", "global_pool", "avg"),
        ("test_resnet", "drop_block_rate", 0.1),
        ("test_efficientnet", "bn_momentum", 0.05),
        ("test_efficientnet", "bn_eps", 0.002),
    ],
)
def test_model_arguments_give_timms_model(model: str, name: str, value: Any) -> None:
    words = ["--model.name", f"timm:{model}", "--model.args", name, str(value)]
    ours = build(parse_fit([*words, "--data.source", "photos"]).config.model, 3)
    assert str(ours) == str(timm.create_model(model, num_classes=3, **{name: value}))
