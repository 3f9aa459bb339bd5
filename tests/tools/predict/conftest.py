"""A trained run, and one of JPEGs, for all tests of predictions and exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.sections import DataConfig, EmaConfig, LogConfig, ModelConfig

LOG = LogConfig(tensorboard=False)


@pytest.fixture(autouse=True)
def reset_switches() -> Iterator[None]:
    """Restores the process-wide switches that the commands set."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of six steps on the digits, with averaged weights."""
    folder = tmp_path_factory.mktemp("trained")
    config = TrainConfig(
        name="digits",
        storage=str(folder),
        steps=6,
        batch_size=128,
        micro_batch=64,
        ema=EmaConfig(decay=0.5, warmup=False),
        log=LOG,
    )
    assert fit_locally(config).step == 6
    torch.use_deterministic_algorithms(False)
    return str(folder / "digits")


def write_jpegs(folder: Path, each: int = 9) -> None:
    """Two classes of pictures of several sizes."""
    random = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            size = (40 + number, 60 - number, 3)
            pixels = random.integers(100 * label, 100 * label + 120, (6, 6, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize(size[1::-1])
            picture.save(folder / name / f"{number}.jpg", quality=95)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of two steps on JPEGs, and their folder, which has been moved away from the run."""
    folder = tmp_path_factory.mktemp("photos")
    write_jpegs(folder / "data")
    config = TrainConfig(
        name="photos",
        storage=str(folder),
        steps=2,
        batch_size=8,
        micro_batch=4,
        data=DataConfig(source=str(folder / "data"), image_size=32, holdout=0.2),
        model=ModelConfig(name="timm:test_resnet"),
        log=LOG,
    )
    fit_locally(config)
    torch.use_deterministic_algorithms(False)
    (folder / "data").rename(folder / "moved")
    return str(folder / "photos"), folder / "moved"
