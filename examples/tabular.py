"""Classifies the rows of a table by its numeric columns, with a multilayer perceptron.

    python -m raytrain_ddp.fit examples/tabular.toml --data.source table.csv --data.label-column y

The table is a CSV, TSV or Parquet file. It is evaluated on `--data.holdout` of its rows, or on
those of `--data.eval-source`. Remove columns that only number the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import compress, pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp import ArraySource, Data, Task, TrainConfig
from raytrain_ddp.data.splits import held_out
from raytrain_ddp.errors import ConfigError, DataError

NUMBER = re.compile(r"[+-]?\d*\.?\d+(?:e[+-]?\d+)?", re.ASCII)


class Standardized(nn.Module):
    """Columns, (n, columns), with mean 0 and variance 1 over the rows of the training."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        mean, spread = rows.mean(0), rows.std(0)
        # The bound of scikit-learn's StandardScaler: a smaller variance is rounding error.
        rounding = len(rows) * np.finfo(np.float64).eps
        self.is_constant = spread**2 <= rounding * spread**2 + (rounding * mean) ** 2
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("spread", torch.from_numpy(np.where(self.is_constant, 1.0, spread)))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.spread).float()


class Tabular(Task):
    """Predicts the class of each row.

    Args:
        hidden: units of each hidden layer, such as "100" or "64,64".
    """

    monitor, goal, unit = "auroc", "max", "rows"

    def __init__(self, config: TrainConfig, hidden: str = "100") -> None:
        sizes = hidden.split(",")
        if not all(size.strip().isdecimal() and int(size) for size in sizes):
            rule = "must be numbers above 0, separated by commas"
            raise ConfigError(f"task_options.hidden = {hidden!r}: {rule}.")
        data, self.notes = config.data, list[str]()
        table = read(data.source, data.label_column)
        names = [name for name in table.column_names if name != data.label_column]
        if not names:
            raise DataError(f"{data.source}: there is no column to learn from.")
        x, labels = columns(table, data.source, names, data.label_column)
        are_numbers = all(map(NUMBER.fullmatch, labels))
        self.class_names = sorted({*labels}, key=lambda n: (float(n) if are_numbers else 0, n))
        is_float = are_numbers and re.search("[.e]", "".join(labels))
        if is_float and len(self.class_names) > len(labels) / 2:
            raise DataError(
                f"{data.source}: column {data.label_column!r} has {len(self.class_names)} "
                f"different numbers in {len(labels)} rows: classes are expected."
            )
        if len(self.class_names) < 2:
            raise DataError(f"{data.source}: all rows have the label {self.class_names[0]!r}.")
        place = {name: number for number, name in enumerate(self.class_names)}.__getitem__
        y = np.array([*map(place, labels)])
        if data.eval_source is not None:
            other = read(data.eval_source, data.label_column)
            other_x, labels = columns(other, data.eval_source, names, data.label_column)
            if unknown := {*labels} - {*self.class_names}:
                known = f"the classes of the training data are {self.class_names}"
                raise DataError(f"{data.eval_source}: labels {sorted(unknown)}; {known}.")
            other_y = np.array([*map(place, labels)])
        elif data.holdout:
            kept = held_out(y, data.holdout, data.holdout_seed)
            other_x, other_y = x[kept], y[kept]
            x, y = np.delete(x, kept, 0), np.delete(y, kept)
        else:
            flags = "set --data.holdout 0.2 or --data.eval-source"
            raise DataError(f"{data.source}: no rows to evaluate on: {flags}.")
        self._train, self._eval = {"x": x, "y": y}, {"x": other_x, "y": other_y}
        self._scale, self._sizes = Standardized(x), [x.shape[1], *map(int, sizes)]
        if same := list(compress(names, self._scale.is_constant)):
            shown = ", ".join(map(repr, same))
            self.notes.append(f"{data.source}: {shown} is the same in all training rows.")

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [self._scale]
        for inputs, outputs in pairwise(self._sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self._sizes[-1], len(self.class_names)))

    def train_data(self) -> Data:
        return Data(ArraySource(self._train))

    def eval_data(self) -> Data:
        return Data(ArraySource(self._eval))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["y"])

    def metrics(self) -> dict[str, Any]:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

        classes = len(self.class_names)
        top1 = MulticlassAccuracy(classes, average="micro")
        return {"loss": MeanMetric(), "top1": top1, "auroc": MulticlassAUROC(classes)}

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Any) -> None:
        logits, labels = model(batch["x"]).float(), batch["y"]
        metrics["loss"].update(cross_entropy(logits, labels, reduction="none"))
        metrics["top1"].update(logits, labels)
        metrics["auroc"].update(logits.softmax(1), labels)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["x"]).float()
        return {"probability": logits.softmax(1), "logit": logits}


def read(source: str, label: str) -> pa.Table:
    suffix = Path(source).suffix.lower()
    try:
        if suffix == ".parquet":
            return parquet.read_table(source)
        tab = "\t" if suffix == ".tsv" else ","
        text = csv.ConvertOptions(column_types={label: pa.string()})
        return csv.read_csv(source, None, csv.ParseOptions(delimiter=tab), text)
    except (OSError, pa.ArrowInvalid) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{source}: cannot be read as a table: {why}") from None


def columns(
    table: pa.Table, source: str, names: list[str], label: str
) -> tuple[np.ndarray, list[str]]:
    """The values, float64 (rows, columns), and the texts of the labels, (rows,)."""
    for name in (label, *names):
        if table.column_names.count(name) != 1:
            there = f"the columns are {', '.join(table.column_names)}"
            raise DataError(f"{source}: needs one column {name!r}; {there}.")
    found = []
    for name in (*names, label):
        column = table[name]
        if pa.types.is_dictionary(column.type):  # a categorical of pandas
            column = column.cast(column.type.value_type)
        if column.null_count:
            raise DataError(f"{source}: column {name!r} has {column.null_count} nulls: fill them.")
        kind, of = column.type, pa.types
        is_number = of.is_integer(kind) or of.is_floating(kind) or of.is_boolean(kind)
        is_text = of.is_string(kind) or of.is_large_string(kind)
        if not is_number and (name != label or not is_text):
            wanted = "one label in each row" if name == label else "numbers: encode or remove it"
            raise DataError(f"{source}: column {name!r} has {kind}, not {wanted}.")
        values = column.to_numpy()
        bad = ~np.isfinite(values) if is_number else values == ""
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"{source}, row {row}: column {name!r} is {values[row]!r}.")
        found.append(values)
    # The same text may have different code points.
    labels = [normalize("NFC", str(value)) for value in found.pop().tolist()]
    return np.stack([values.astype(np.float64) for values in found], 1), labels
