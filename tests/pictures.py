"""Pictures, and data sets as users write them: one keeps a file open, and draws from all global
generators."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import TinyTask, tiny_arrays
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, IterableDataset
from torchvision import transforms
from torchvision.transforms import v2

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data, MapSource

SIDE = 4
BYTES = SIDE * SIDE


def picture(height: int = 20, width: int = 26, seed: int = 0) -> Tensor:
    """Soft shapes with noise, partly clipped; uint8 (3, height, width)."""
    random = np.random.Generator(np.random.Philox(seed))
    shapes = torch.from_numpy(random.random((1, 3, 4, 4)))
    shapes = interpolate(shapes, (height, width), mode="bicubic")[0]
    noise = torch.from_numpy(random.random((3, height, width)))
    return (shapes * 320 - 40 + noise * 40).clamp(0, 255).to(torch.uint8)


def write_pictures(path: Path, rows: int) -> None:
    """One byte per pixel; the first two bytes of each picture are its row."""
    pixels = (tiny_arrays(rows, 0)["x"] * 40 + 128).clip(0, 255).astype(np.uint8).reshape(rows, -1)
    pixels[:, 0], pixels[:, 1] = np.arange(rows) // 256, np.arange(rows) % 256
    path.write_bytes(pixels.tobytes())


class OneFile:
    """Closed together with its owner."""

    _path: str
    _file: Any = None

    def open(self) -> Any:
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        return self._file

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


class Pictures(OneFile, Dataset):  # type: ignore[type-arg]
    """Keeps one open file and moves it, as h5py, zip, tar and LMDB do.

    Args:
        augment: random transforms of torchvision v1 and v2, and noise of numpy and Python.
        die_at: in this row, once (marker), its process kills itself.
    """

    def __init__(self, path: str, rows: int, augment: bool = True, die_at: int = -1) -> None:
        self._path, self._rows, self._augment, self._die_at = path, rows, augment, die_at
        self._home = os.getpid()  # where pytest may have imported Ray
        self._v1 = transforms.Compose([transforms.RandomAffine(20), transforms.RandomErasing(0.5)])
        self._v2 = v2.Compose([v2.RandomResizedCrop(SIDE), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == self._die_at and not os.path.exists(f"{self._path}.died"):
            Path(f"{self._path}.died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        file = self.open()
        file.seek(row * BYTES)
        time.sleep(1e-5)  # another thread may move it
        pixels = torch.frombuffer(bytearray(file.read(BYTES)), dtype=torch.uint8)
        image = pixels.view(1, SIDE, SIDE).float() / 255
        if self._augment:
            image = self._v2(self._v1(image)) + random.random() * 0.1
            image += torch.from_numpy(np.random.rand(1, SIDE, SIDE)).float() * 0.1
        return {
            "x": image,
            "y": row % 5,
            "row": row,
            "stored": int(pixels[0]) * 256 + int(pixels[1]),
            "ray": os.getpid() != self._home and "ray" in sys.modules,
        }


class Lines(OneFile, IterableDataset):  # type: ignore[type-arg]
    """Iterates over its single file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Any:
        file = self.open()
        file.seek(0)
        while line := file.read(BYTES):
            time.sleep(1e-5)
            yield {"row": line[0] * 256 + line[1], "drawn": torch.rand(2)}


class PicturesTask(TinyTask):
    """Classes of pictures, trained and evaluated on by one data set object."""

    def __init__(self, config: TrainConfig, path: str, rows: int, die_at: int = -1) -> None:
        super().__init__(config)
        self._dataset = Pictures(path, rows, die_at=die_at)

    def train_data(self) -> Data:
        return Data(MapSource(self._dataset, rows_per_block=16))

    def eval_data(self) -> Data:
        return Data(MapSource(self._dataset))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        require_right(batch)
        return super().loss(model, batch)

    def evaluate(self, model: torch.nn.Module, batch: Batch, metrics: Any) -> None:
        require_right(batch)
        super().evaluate(model, batch, metrics)


def require_right(batch: Batch) -> None:
    assert batch["stored"].tolist() == batch["row"].tolist()
    assert not batch["ray"].any()
