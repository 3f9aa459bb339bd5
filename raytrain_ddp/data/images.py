"""Images from any source to batches: decode, crop and resize on the host, as uint8.

Normalisation is left to the device. Every random choice comes from the sample's own draws.
"""

from __future__ import annotations

import fcntl
import io
import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from raytrain_ddp.data.draws import Draws
from raytrain_ddp.data.locate import Located
from raytrain_ddp.data.parquet import ParquetImages
from raytrain_ddp.data.plan import Rows, runs_of
from raytrain_ddp.data.source import Batch, Data, Source
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean
from raytrain_ddp.inputs import DataConfig


class ImageSource(Source, Protocol):
    """A source whose records are (image, label); an image is encoded bytes or a PIL image."""

    class_names: list[str]

    def read(self, rows: Rows) -> Sequence[tuple[Any, int]]: ...

    def where(self, row: int) -> str:
        """File and row, for messages."""


def open_images(found: Located, config: DataConfig) -> ImageSource:
    """The source that `locate` found."""
    if found.kind == "parquet":
        return ParquetImages(found.paths, config.image_column, config.label_column)
    if found.kind == "folder":
        return FolderImages(found.paths[0])
    return TorchvisionImages(found.paths[0], Path(config.root), found.split == "train")


class FolderImages:
    """One folder per class, as torchvision's ImageFolder reads them."""

    def __init__(self, root: str) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

        try:
            self.class_names, to_index = find_classes(root)
            self._files = make_dataset(root, to_index, IMG_EXTENSIONS)
        except FileNotFoundError as error:
            raise DataError(f"{root}: {error}") from error
        self._root = root
        self.blocks = runs_of(len(self._files), 256)

    def read(self, rows: Rows) -> list[tuple[bytes, int]]:
        records = []
        for row in rows.tolist():
            path, label = self._files[row]
            try:
                records.append((Path(path).read_bytes(), label))
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
        return records

    def fingerprint(self) -> str:
        digest = sha256()
        for path, label in self._files:
            digest.update(f"{Path(path).relative_to(self._root)} {label}\n".encode())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        return str(self._files[row][0])


class TorchvisionImages:
    """A torchvision classification data set by name, downloaded by the first who needs it."""

    def __init__(self, name: str, root: Path, train: bool) -> None:
        from torchvision import datasets

        if name not in datasets.__all__:
            raise ConfigError(
                f"torchvision has no data set {name!r}.{did_you_mean(name, datasets.__all__)}"
            )
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:  # workers of one node share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._dataset = _make(getattr(datasets, name), root, train)
        self._name = f"torchvision:{name} {'train' if train else 'test'}"
        self.class_names = [str(c) for c in getattr(self._dataset, "classes", ())]
        if not self.class_names:
            labels = {int(self._dataset[i][1]) for i in range(len(self._dataset))}
            self.class_names = [str(label) for label in range(max(labels) + 1)]
        self.blocks = runs_of(len(self._dataset), 256)

    def read(self, rows: Rows) -> list[tuple[Any, int]]:
        return [self._dataset[row] for row in rows.tolist()]

    def fingerprint(self) -> str:
        return sha256(f"{self._name} {len(self._dataset)}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


def image_data(source: ImageSource, config: DataConfig, classes: int, train: bool) -> Data:
    """Batches of {"image": uint8 (n, 3, height, width), "label": int64 (n,)}."""

    def collate(records: Sequence[tuple[Any, int]], draws: Draws) -> Batch:
        crops = draws.uniform(4, stream=0)
        flips = draws.uniform(1, stream=1)[:, 0] < 0.5
        images = []
        for place, (encoded, label) in enumerate(records):
            if not 0 <= label < classes:
                where = source.where(int(draws.rows[place]))
                raise DataError(f"{where}: label {label} is not in 0 to {classes - 1}.")
            try:
                image = _decode(encoded)
            except (RuntimeError, ValueError, OSError) as error:
                where = source.where(int(draws.rows[place]))
                raise DataError(f"{where}: not a readable image: {error}") from error
            if train:
                image = _augment(image, config, crops[place].tolist())
                image = image.flip(-1) if config.flip and flips[place] else image
            else:
                image = _centre(image, config.image_size)
            images.append(image)
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise DataError(f"images of unequal size {sorted(shapes)}: set --data.image-size.")
        labels = torch.tensor([label for _, label in records], dtype=torch.int64)
        return {"image": torch.stack(images), "label": labels}

    return Data(source, collate)


def _make(dataset: Any, root: Path, train: bool) -> Any:
    """torchvision's sets say which part by `train=` or by `split=`."""
    try:
        try:
            return dataset(str(root), train=train, download=True)
        except TypeError:
            return dataset(str(root), split="train" if train else "test", download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"torchvision:{dataset.__name__} cannot be had: {error}") from error


def _decode(image: Any) -> Tensor:
    """RGB, uint8 (3, height, width), from encoded bytes or a PIL image."""
    opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    pixels = np.array(opened.convert("RGB"))  # (height, width, 3)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _augment(image: Tensor, config: DataConfig, draws: list[float]) -> Tensor:
    size = config.image_size
    if config.augment == "crop":
        return _resized_crop(image, size or image.shape[-1], draws)
    image = _centre(image, size)
    if config.augment == "none":
        return image
    height, width = image.shape[-2:]
    margin = max(1, width // 8)
    top, left = (int(draw * (2 * margin + 1)) for draw in draws[:2])
    padded = pad(image, (margin, margin, margin, margin))
    return padded[:, top : top + height, left : left + width]


def _resized_crop(image: Tensor, size: int, draws: list[float]) -> Tensor:
    """A crop of 8 to 100 % of the area and of aspect 3/4 to 4/3, resized (Szegedy et al., 2015)."""
    height, width = image.shape[-2:]
    area = height * width * (0.08 + 0.92 * draws[0])
    aspect = math.exp((2 * draws[1] - 1) * math.log(4 / 3))
    w = min(width, max(1, round(math.sqrt(area * aspect))))
    h = min(height, max(1, round(math.sqrt(area / aspect))))
    top, left = int(draws[2] * (height - h + 1)), int(draws[3] * (width - w + 1))
    return _resize(image[:, top : top + h, left : left + w], size, size)


def _centre(image: Tensor, size: int) -> Tensor:
    """Shorter side to size / 0.875, then the central square; 0: as it is."""
    if not size or tuple(image.shape[-2:]) == (size, size):
        return image
    height, width = image.shape[-2:]
    scale = size / 0.875 / min(height, width)
    h, w = max(size, round(height * scale)), max(size, round(width * scale))
    top, left = (h - size) // 2, (w - size) // 2
    return _resize(image, h, w)[:, top : top + size, left : left + size]


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    batched = image[None]  # a view: the crop is not copied before it is resized
    return interpolate(batched, (height, width), mode="bilinear", antialias=True)[0]
