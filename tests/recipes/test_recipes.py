"""The recipes: each equals its source except for listed differences, and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run_cli
from references import NEUTRAL, REFERENCES, Differs
from split_checks import folder as class_folders
from torchvision import datasets

from raytrain_ddp import fit_locally
from raytrain_ddp.config.recipe import flat, load, load_with_info, shipped_recipes
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig, EvalConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig, idle
from raytrain_ddp.tasks.model_zoo import build
from raytrain_ddp.tasks.task_loading import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = [*shipped_recipes()]
NAMES = [*SHIPPED, *(path.stem for path in sorted(EXAMPLES.glob("*.toml")))]


def path_of(name: str) -> str:
    """A recipe's name, or the file of an example."""
    return name if name in SHIPPED else str(EXAMPLES / f"{name}.toml")


def task_of(name: str) -> str:
    """The task that a recipe names, whatever the current folder is."""
    task = load(path_of(name)).task
    return task if name in SHIPPED else str(EXAMPLES.parent / task)


def test_recipes_describe_themselves_and_so_may_your_own(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("epochs = 3\n[recipe]\nabout = 'photos'\n")
    every = run_cli("fit", "--describe", cwd=tmp_path)
    assert (every.status, every.heavy) == (0, [])
    assert {*SHIPPED} <= {*every.out.splitlines()}
    for name in (*SHIPPED, "mine.toml"):
        path = str(tmp_path / name) if name == "mine.toml" else name
        info = load_with_info(path)[1]
        said = " ".join(info.page(name).split())
        assert all(text in said for text in (info.about, info.source, *info.differs.values()))
    assert load(str(tmp_path / "mine.toml")) == TrainConfig(epochs=3)


# ------------------------------------------------------------------ comparison with the sources


# Where data come from, when they are evaluated, how it is computed.
OUTSIDE = {"data.source", "data.holdout", "task", "compute.channels_last", "eval.every_epochs"}
OUTSIDE |= {"checkpoint.every_epochs", "micro_batch"}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_recipe_equals_its_source_except_for_listed_differences(name: str):
    config, info = load_with_info(path_of(name))
    source, ours = dict(REFERENCES[name]), flat(config)
    differs = {*source.pop("", "").split()}
    unused = {*idle(config), *OUTSIDE} - {*source}
    if config.task != TrainConfig().task:  # what the built-in one reads
        unused |= {field for field in ours if field.startswith("augment.")}
        unused |= {"optim.label_smoothing"}
    for field, value in (NEUTRAL | source).items():
        if isinstance(value, Differs):
            differs.add(str(value))
        else:
            assert field in unused or ours[field] == value, field
    assert differs == {*info.differs}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("imagenet-resnet50", 25_557_032),  # torchvision's ResNet50_Weights
        ("mnist", 1_199_882 + 2 * 32 * 9),  # Keras prints 1,199,882; here, images have 3 channels
        ("cifar10", 11_173_962),  # Cutout's ResNet18
    ],
)
def test_a_recipes_model_has_the_parameter_count_of_its_source(name: str, parameters: int):
    with torch.device("meta"):
        model = build(load(name).model, 1000 if name.startswith("imagenet") else 10)
        assert sum(p.numel() for p in model.parameters()) == parameters
        if name == "cifar10":  # the stem keeps the size of small images
            body: Any = torch.nn.Sequential(*[*model.children()][:-2])
            assert body(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


# ------------------------------------------------------------------ they run


class Fake:
    """A data set of torchvision with a few images of noise, which "downloads" nothing."""

    classes = tuple("0123456789")
    shape: tuple[int, ...] = ()

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        assert download
        self.targets = [row % 10 for row in range(24 if train else 10)]
        shape = (len(self.targets), *self.shape)
        self._images = np.random.default_rng(int(train)).integers(0, 256, shape, np.uint8)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self._images[row]), self.targets[row]


def photos(folder: Path) -> Path:
    """train/ and val/ with a few photos of three classes."""
    for split, count in (("train", 8), ("val", 2)):
        class_folders(folder / split, ants=count, bees=count, cats=count)
    return folder


def small(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A recipe on generated data of its kind, with all its features enabled, for two small
    steps."""
    config = load(path_of(name))
    data, model, options = config.data, config.model, dict(config.task_options)
    if data.source.startswith("torchvision:"):
        fake = data.source.partition(":")[2]
        kind = type(fake, (Fake,), {"shape": (28, 28) if fake == "MNIST" else (32, 32, 3)})
        monkeypatch.setattr(datasets, fake, kind)
        data = replace(data, root=str(folder / "data"))
    elif data.source in ("imagenet", "photos"):
        data = replace(data, source=str(photos(folder / "photos")), image_size=32)
        data = replace(data, eval_size=data.eval_size and 40)
    elif data.source == "table.csv":
        numbers = np.random.default_rng(0).normal(size=60)
        rows = [f"{x},{n % 7},{'yes' if x > 0 else 'no'}\n" for n, x in enumerate(numbers)]
        (folder / "table.csv").write_text("".join(["a,b,label\n", *rows]))
        data = replace(data, source=str(folder / "table.csv"))
    elif data.source == "input.txt":
        text = folder / "input.txt"
        text.write_text("To be, or not to be, that is the question. " * 20)
        data = replace(data, source=str(text))
        options = {"length": "16", "width": "16", "depth": "2", "heads": "2", "dropout": "0.2"}
    if "deit" in model.name:
        model = replace(model, args={**model.args, "img_size": data.image_size, "depth": 2})
    if "convnext" in model.name:
        model = replace(model, args={**model.args, "depths": "(1, 1, 1, 1)"})
    if "resnet" in model.name and "cifar" not in model.name:  # pretrained, or large
        model = replace(model, name="timm:test_resnet")
    slots = max(2, config.augment.repeats if config.augment.spread_repeats else 0)
    return replace(
        config,
        name=name,
        task=task_of(name),
        storage=str(folder / "runs"),
        data=replace(data, workers=0),
        model=model,
        task_options=options,
        optim=replace(config.optim, lr=config.optim.lr / 100),  # for so small a batch
        epochs=1,
        steps=0,
        limit_train_batches=2,
        batch_size=2 * slots,
        micro_batch=2,
        eval=EvalConfig(every_epochs=0),
        checkpoint=CheckpointConfig(every_epochs=0, every_s=0.0),
        log=LogConfig(every_steps=1, tensorboard=False),
        scaling=replace(config.scaling, use_gpu=False),
        compute=ComputeConfig(),  # a CPU is slow in bf16
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_two_steps_and_is_evaluated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = small(name, tmp_path, monkeypatch)
    result = fit_locally(config)
    assert (result.exit_status, result.step) == (0, 2)
    losses = [record["loss"] for record in result.history if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
    assert {*result.last} == {"step", *load_task(config).metrics()}
    assert all(math.isfinite(value) for value in result.last.values())
    events = (tmp_path / "runs" / name / "events.jsonl").read_text()
    assert "has no effect" not in events
    assert "does not read it" not in events
