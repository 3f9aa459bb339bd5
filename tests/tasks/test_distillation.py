"""The distillation example of docs/tutorials/own-task.md, tested with the code on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from safetensors.torch import save_file
from tiny import bits, newest, plain, tiny_config, weights
from torch.nn.functional import cross_entropy, softmax
from torchvision.models import get_model

from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.loop import train
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Requests

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-task.md"
TEACHER = "shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code on the page, and a teacher."""
    (code,) = re.findall(r"```python\n# distilled.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    folder = tmp_path_factory.mktemp("distilled")
    (folder / "distilled.py").write_text(code)
    torch.manual_seed(3)
    teacher = get_model(TEACHER, num_classes=10)
    save_file(teacher.state_dict(), folder / "teacher.safetensors")
    return folder


def config_of(folder: Path, name: str) -> TrainConfig:
    return tiny_config(
        folder,
        name,
        task=f"{folder / 'distilled.py'}:Distilled",
        task_options={"teacher": TEACHER, "weights": str(folder / "teacher.safetensors")},
        data=DataConfig(image_size=32, workers=1),
        augment=AugmentConfig(mixup=0.2),
        limit_train_batches=3,
        limit_eval_batches=1,
        epochs=2,
    )


def test_the_loss_combines_the_labels_and_the_teacher(folder: Path):
    config = config_of(folder, "loss")
    task: Any = load_task(config)
    torch.manual_seed(1)
    model = task.model()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(6)
    loss, parts = task.loss(model, {"image": images, "label": labels})
    teacher = get_model(TEACHER, num_classes=10).eval()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (config.data.mean, config.data.std))
    inputs = (images / 255 - mean) / std
    teacher.load_state_dict(task.teacher.state_dict())
    target, logits = softmax(teacher(inputs) / 2, 1), model(inputs)
    guess = softmax(logits / 2, 1)
    soft = (target * (target / guess).log()).sum(1).mean() * 4
    torch.testing.assert_close(parts["soft"], soft, rtol=1e-3, atol=1e-4)
    hard = cross_entropy(logits, labels, label_smoothing=config.optim.label_smoothing)
    torch.testing.assert_close(loss, (hard + soft) / 2, rtol=1e-3, atol=1e-4)


class Stopped(LocalSession):
    """A session that asks to stop in its first step."""

    def requests(self) -> Requests:
        return Requests(stop=15)


def run(rank: int, size: int, plain_config: Mapping[str, Any], stops: bool) -> None:
    config = from_dict(plain_config)
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    kind = Stopped if stops else LocalSession
    with kind(config, world, Best("top1", "max"), lambda event: None) as session:
        train(config, load_task(config), session)


def test_a_distillation_resumes_with_equal_bits_and_does_not_save_the_teacher(
    folder: Path, workers: Group
):
    whole, stopped = config_of(folder, "whole"), config_of(folder, "stopped")
    workers(3, run, plain(whole), False)
    for stops in (True, False):
        workers(3, run, plain(stopped), stops)
    assert bits(stopped) == bits(whole)
    assert not any("teacher" in name for name in weights(whole))
    lines = newest(whole).read("log.json").decode()
    assert {"hard", "soft"} <= {*json.loads(lines)[0]["scalars"]}
