"""Several labels an image, or numbers: an own Dataset over Parquet, with torchvision's transforms.

    python -m raytrain_ddp.fit --task examples/parquet_targets.py:Targets --optim.name adamw \
        --optim.lr 0.001 --task-options train train.parquet eval val.parquet target tags

`target` names a column of lists (of strings or integers): the labels of a row. Or columns, as
in "cat,dog": of booleans, a label each, or of numbers (regression). `image` has encoded bytes.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import timm
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss
from torch.utils.data import Dataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics.classification import MultilabelAveragePrecision
from torchvision.transforms import v2

from raytrain_ddp import Data, MapSource, Task, TrainConfig

LAST = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])])


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, images: Any, targets: np.ndarray, transform: Callable[[Any], Any]) -> None:
        self._images, self._targets, self._transform = images, targets, transform

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        value = self._images[row].as_py()  # bytes, or as Hugging Face has them: {"bytes": ...}
        image = Image.open(BytesIO(value["bytes"] if isinstance(value, dict) else value))
        target = torch.from_numpy(self._targets[row])
        return {"image": LAST(self._transform(image.convert("RGB"))), "target": target}


class Targets(Task):
    unit = "images"

    def __init__(
        self, config: TrainConfig, train: str, eval: str, target: str,
        size: str = "224", model: str = "resnet18", weights: str = "",
    ) -> None:  # fmt: skip
        self._size, self._model, self._weights = int(size), model, weights
        self._tables = [parquet.read_table(path) for path in (train, eval)]
        self._columns, schema = target.split(","), self._tables[0].schema
        kinds = {schema.field(name).type for name in self._columns}
        self._lists = all(pa.types.is_list(kind) for kind in kinds)
        self.labels: Sequence[Any] = self._columns
        if self._lists:
            self.labels = sorted({x for each in self._tables[0][target].to_pylist() for x in each})
        self._is_labels = self._lists or all(pa.types.is_boolean(kind) for kind in kinds)
        self.monitor, self.goal = ("mean_ap", "max") if self._is_labels else ("mae", "min")

    def _data(self, table: Any, *transforms: nn.Module) -> Data:
        columns = [table[name].to_numpy() for name in self._columns]
        if self._lists:
            columns = [[label in each for each in columns[0]] for label in self.labels]
        targets = np.stack(columns, axis=1).astype(np.float32)  # (rows, targets)
        return Data(MapSource(Rows(table["image"], targets, v2.Compose(transforms))))

    def model(self) -> nn.Module:
        return timm.create_model(
            self._model, num_classes=len(self.labels), checkpoint_path=self._weights
        )

    def train_data(self) -> Data:
        crop = v2.RandomResizedCrop(self._size, (0.5, 1.0))
        return self._data(self._tables[0], crop, v2.RandomHorizontalFlip())

    def eval_data(self) -> Data:
        return self._data(self._tables[1], v2.Resize(self._size), v2.CenterCrop(self._size))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        of = binary_cross_entropy_with_logits if self._is_labels else smooth_l1_loss
        return of(model(batch["image"]), batch["target"])

    def metrics(self) -> dict[str, Any]:
        if self._is_labels:
            return {"mean_ap": MultilabelAveragePrecision(len(self.labels))}
        return {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        outputs, targets = model(batch["image"]), batch["target"]
        pair = (outputs.sigmoid(), targets.long()) if self._is_labels else (outputs, targets)
        for metric in metrics.values():
            metric.update(*pair)
