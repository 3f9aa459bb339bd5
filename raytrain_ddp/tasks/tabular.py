"""Classification of the rows of a table with a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require
from raytrain_ddp.data.holdout import held_out
from raytrain_ddp.data.sources import ArraySource, Data
from raytrain_ddp.errors import DataError
from raytrain_ddp.tasks.classification_loss import Criterion
from raytrain_ddp.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric

Table = dict[str, np.ndarray[Any, Any]]


class Standardized(nn.Module):
    """Columns with mean 0 and variance 1 in the training rows, (n, columns) -> the same. Part of
    the model, so that its weights are all that is needed to use it."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        super().__init__()
        spread = rows.std(0)
        self.register_buffer("mean", torch.from_numpy(rows.mean(0)))
        self.register_buffer("spread", torch.from_numpy(np.where(spread > 0, spread, 1.0)))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.spread).float()  # type: ignore[operator]


class Tabular(Task):
    """Predicts `data.label_column` of a CSV, TSV or Parquet file from its other columns, which are
    numbers. Evaluates on `data.eval_source`, or on `data.holdout` of the rows.

    Args:
        hidden: units of each hidden layer, such as "100" or "64,64".

    Raises:
        DataError: a file cannot be read, or has other columns, texts, or gaps.
    """

    monitor = "auroc"
    goal: Literal["min", "max"] = "max"
    unit = "rows"

    def __init__(self, config: TrainConfig, hidden: str = "100") -> None:
        data = config.data
        parts = hidden.split(",")
        sizes_ok = all(part.strip().isdecimal() and int(part) > 0 for part in parts)
        rule = "must be numbers above 0, separated by commas"
        require(sizes_ok, "task_options.hidden", hidden, rule)
        self._hidden = [int(part) for part in parts]
        x, labels = _columns(data.source, data.label_column)
        self.class_names = sorted({*labels.tolist()})
        if labels.dtype.kind == "f" and len(self.class_names) > len(labels) / 2:
            raise DataError(
                f"{data.source}: column {data.label_column!r} has {len(self.class_names)} "
                f"different numbers in {len(labels)} rows: classes are expected."
            )
        y = _numbers(labels, self.class_names, data.source)
        self._criterion = Criterion(config, lambda: torch.bincount(torch.from_numpy(self._y)))
        if data.eval_source is not None:
            other, names = _columns(data.eval_source, data.label_column, [*x])
            ends = _matrix(other), _numbers(names, self.class_names, data.eval_source)
            self._x, self._y = _matrix(x), y
        elif data.holdout:
            kept = held_out(y, data.holdout, data.holdout_seed)
            rest = np.setdiff1d(np.arange(len(y)), kept)
            ends = _matrix(x)[kept], y[kept]
            self._x, self._y = _matrix(x)[rest], y[rest]
        else:
            raise DataError(
                f"{data.source}: no rows to evaluate on: set --data.holdout 0.2 or "
                "--data.eval-source."
            )
        self._eval = {"x": ends[0], "y": ends[1]}

    def model(self) -> nn.Module:
        widths = [self._x.shape[1], *self._hidden]
        layers: list[nn.Module] = [Standardized(self._x)]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], len(self.class_names)))

    def train_data(self) -> Data:
        return Data(ArraySource({"x": self._x, "y": self._y}))

    def eval_data(self) -> Data:
        return Data(ArraySource(self._eval))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self._criterion(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics import MeanMetric  # takes seconds to import
        from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

        classes = len(self.class_names)
        return {
            "loss": MeanMetric(),
            "top1": MulticlassAccuracy(classes, average="micro"),
            "auroc": MulticlassAUROC(classes),
        }

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Metric]
    ) -> None:
        logits = model(batch["x"]).float()
        metrics["loss"].update(self._criterion.each(logits, batch["y"]))
        metrics["top1"].update(logits, batch["y"])
        metrics["auroc"].update(logits.softmax(1), batch["y"])


def _columns(
    source: str, label: str, wanted: list[str] | None = None
) -> tuple[Table, np.ndarray[Any, Any]]:
    """The columns of a table but for the labels, and the labels."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if Path(source).suffix == ".parquet":
            table = parquet.read_table(source)
        else:
            tab = "\t" if Path(source).suffix == ".tsv" else ","
            table = csv.read_csv(source, parse_options=csv.ParseOptions(delimiter=tab))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{source}: not a table that can be read: {error}.") from None
    if label not in table.column_names:
        raise DataError(
            f"{source}: there is no column {label!r}: --data.label-column is one of "
            f"{', '.join(table.column_names)}."
        )
    names = wanted or [name for name in table.column_names if name != label]
    twice = [name for name in (*names, label) if table.column_names.count(name) > 1]
    if twice:
        raise DataError(f"{source}: there are several columns {twice[0]!r}: rename or remove some.")
    if not names:
        raise DataError(f"{source}: there is no column beside {label!r}.")
    columns: Table = {}
    for name in (*names, label):
        if name not in table.column_names:
            raise DataError(f"{source}: there is no column {name!r}, which the training data have.")
        column = table[name]
        if column.null_count:
            raise DataError(f"{source}: column {name!r} has {column.null_count} gaps: fill them.")
        kind = column.type
        number = (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        )
        if name != label and not number:
            raise DataError(
                f"{source}: column {name!r} has {kind}, not numbers: encode or remove it."
            )
        columns[name] = column.to_numpy()
        if pa.types.is_floating(kind) and not np.isfinite(columns[name]).all():
            row = int(np.flatnonzero(~np.isfinite(columns[name]))[0])
            raise DataError(f"{source}, row {row}: column {name!r} is {columns[name][row]}.")
    return columns, columns.pop(label)


def _matrix(columns: Table) -> np.ndarray[Any, Any]:
    """float64 (rows, columns)."""
    return np.stack([column.astype(np.float64) for column in columns.values()], 1)


def _numbers(labels: np.ndarray[Any, Any], classes: list[Any], source: str) -> Any:
    """The class of each row, int64 (rows,)."""
    number = {name: place for place, name in enumerate(classes)}
    unknown = {*labels.tolist()} - {*classes}
    if unknown or len(classes) < 2:
        told = f"labels {sorted(unknown)}" if unknown else f"only the label {classes}"
        raise DataError(f"{source}: {told}; the classes of the training data are {classes}.")
    return np.array([number[label] for label in labels.tolist()], np.int64)
