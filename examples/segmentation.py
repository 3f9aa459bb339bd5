"""Dense labels: segmentation of photos by masks, with mean intersection over union.

    python -m raytrain_ddp.fit --task examples/segmentation.py:Segmentation --batch-size 16 \
        --task-options folder photos classes 21 size 256

The folder has train/images, train/masks, val/images and val/masks. A mask is a PNG of class
numbers with the name of its image, and 255 where nothing is known.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image as pillow  # noqa: N813
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.ops import Conv2dNormActivation
from torchvision.transforms import v2
from torchvision.tv_tensors import Image, Mask

from raytrain_ddp import Data, MapSource, Task, TrainConfig


class Pairs(Dataset[dict[str, Tensor]]):
    """Images and their masks, with the same random crop."""

    def __init__(self, folder: Path, *transforms: nn.Module) -> None:
        self._images = sorted((folder / "images").iterdir())
        self._masks = [folder / "masks" / f"{path.stem}.png" for path in self._images]
        scale = v2.ToDtype({Image: torch.float32, "others": None}, scale=True)
        self._transform = v2.Compose([*transforms, scale])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = Image(pillow.open(self._images[index]).convert("RGB"))
        mask = Mask(pillow.open(self._masks[index]))  # (1, h, w)
        image, mask = self._transform(image, mask)
        return {"image": image.as_subclass(Tensor), "mask": mask.as_subclass(Tensor)[0].long()}


class UNet(nn.Module):
    def __init__(self, classes: int, *widths: int) -> None:
        super().__init__()
        pairs = [*pairwise(widths)]
        self.down = nn.ModuleList(Conv2dNormActivation(a, b) for a, b in [(3, widths[0]), *pairs])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[::-1])
        self.join = nn.ModuleList(Conv2dNormActivation(2 * a, a) for a, _ in pairs[::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, h, w) -> (n, classes, h, w)
        kept: list[Tensor] = []
        for block in self.down:
            x = block(max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x)


class Segmentation(Task):
    monitor, goal, unit = "mean_iou", "max", "images"

    def __init__(self, config: TrainConfig, folder: str, classes: str, size: str = "256") -> None:
        self._folder, self._classes, self._size = Path(folder), int(classes), int(size)

    def model(self) -> nn.Module:
        return UNet(self._classes, 16, 32, 64, 128)

    def train_data(self) -> Data:
        crop = v2.RandomResizedCrop(self._size, (0.5, 1.0), antialias=True)
        return Data(MapSource(Pairs(self._folder / "train", crop, v2.RandomHorizontalFlip())))

    def eval_data(self) -> Data:
        center = v2.Resize(self._size), v2.CenterCrop(self._size)
        return Data(MapSource(Pairs(self._folder / "val", *center)))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Over all pixels, so that it does not matter how a step is cut into micro-batches."""
        logits = model(batch["image"]).movedim(1, -1).flatten(0, -2)  # (pixels, classes)
        pixels = batch["mask"].flatten()
        return cross_entropy(logits, pixels, ignore_index=255, reduction="none").mean()

    def metrics(self) -> dict[str, Any]:
        return {"mean_iou": MulticlassJaccardIndex(self._classes, ignore_index=255)}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        metrics["mean_iou"].update(model(batch["image"]).argmax(1), batch["mask"])
