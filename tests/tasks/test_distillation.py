"""The distillation example of docs/own-task.md, tested with the code on the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_config, weights
from torch.nn.functional import cross_entropy
from torchvision.models import get_model

from raytrain_ddp import fit_locally
from raytrain_ddp.config.sections import AugmentConfig, DataConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tasks.task_loading import load_task

PAGE = Path(__file__).parents[2] / "docs" / "own-task.md"
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
        batch_size=8,
        micro_batch=4,
        limit_train_batches=2,
        limit_eval_batches=1,
        epochs=1,
    )


def test_a_distillation_logs_both_losses_and_does_not_save_the_teacher(folder: Path):
    config = config_of(folder, "run")
    result = fit_locally(config)
    assert (result.status, result.step) == ("finished", 2)
    assert {"hard", "soft"} <= {*result.history[0]["scalars"]}
    assert not any("teacher" in name for name in weights(config))


def test_the_loss_is_the_mean_of_that_of_the_labels_and_the_teachers_divergence(folder: Path):
    smooth = OptimConfig(label_smoothing=0.0)
    config = replace(config_of(folder, "formula"), augment=AugmentConfig(), optim=smooth)
    task: Any = load_task(config)
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    seen, logits = list[torch.Tensor](), torch.randn(6, 10)
    batch = {"image": images, "label": torch.arange(6)}
    loss, parts = task.loss(lambda inputs: seen.append(inputs) or logits, batch)
    p, q = ((outputs / 2).softmax(1) for outputs in (task.teacher(seen[0]), logits))
    hard, soft = cross_entropy(logits, batch["label"]), 4 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close([loss, *parts.values()], [(hard + soft) / 2, hard, soft])
