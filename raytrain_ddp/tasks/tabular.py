"""A multilayer perceptron on the rows of a table: classes, several labels, or numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.formats.labels import kind_of, normalized
from raytrain_ddp.data.formats.targets import Targets, kind_of_targets
from raytrain_ddp.data.holdout import held_out
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.errors import DataError
from raytrain_ddp.tasks.criterion import Criterion
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
    """Predicts `data.label_column`, or `data.target_columns`, of a CSV, TSV or Parquet file from
    its other columns, which are numbers. Evaluates on `data.eval_source`, or on `data.holdout` of
    the rows.

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
        self._criterion = Criterion(config, lambda: torch.bincount(torch.from_numpy(self._y)))
        wanted, of_targets = data.target_columns or (data.label_column,), self._criterion.of_targets
        if of_targets:
            self.monitor, self.goal = self._criterion.monitor, self._criterion.goal
        self._binary = config.loss.name == "bce" if of_targets else None
        x, labels = _columns(data.source, wanted, self._binary)
        self.class_names = [*labels] if of_targets else _classes(labels, data.source)
        y = self._numbers(labels, data.source)
        if data.eval_source is not None:
            other, names = _columns(data.eval_source, wanted, self._binary, [*x])
            ends = _matrix(other), self._numbers(names, data.eval_source)
            self._x, self._y = _matrix(x), y
        elif data.holdout:
            strata = np.zeros(len(y), np.int64) if of_targets else y
            kept = held_out(strata, data.holdout, data.holdout_seed)
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
        from raytrain_ddp.tasks.class_metrics import Mean, MeanAuroc, TopK  # seconds

        classes = len(self.class_names)
        if self._criterion.of_targets:
            return {"loss": Mean(), **self._criterion.metrics(classes)}
        return {"loss": Mean(), "top1": TopK(1), "auroc": MeanAuroc(classes)}

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Metric]
    ) -> None:
        logits, others = model(batch["x"]).float(), {**metrics}
        if "auroc" in others:
            of_each = self._criterion.predicted(logits)["probability"]
            others.pop("auroc").update(of_each, batch["y"])
        self._criterion.update(others, logits, batch["y"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._criterion.predicted(model(batch["x"]).float())

    def _numbers(self, labels: Table, source: str) -> Any:
        """The class of each row, int64 (rows,), or its targets, float32 (rows, targets)."""
        if self._binary is None:
            return _numbers(next(iter(labels.values())), self.class_names, source)
        targets = Targets([*labels], [*labels], "number", self._binary)
        rows = [*zip(*(column.tolist() for column in labels.values()), strict=True)]
        numbers = [targets.number(row) for row in rows]
        for row, number in enumerate(numbers):
            if number is None:
                raise DataError(f"{source}, row {row}: {targets.what_is_wrong(rows[row])}.")
        return np.stack([number for number in numbers if number is not None])


def _classes(labels: Table, source: str) -> list[Any]:
    """The distinct labels.

    Raises:
        DataError: they are numbers that are no classes.
    """
    ((column, values),) = labels.items()
    names = sorted({*values.tolist()})
    if values.dtype.kind == "f" and len(names) > len(values) / 2:
        raise DataError(
            f"{source}: column {column!r} has {len(names)} different numbers in {len(values)} "
            "rows: classes are expected. For regression: --data.target-columns and --loss.name mse."
        )
    return names


def _columns(
    source: str, labels: Sequence[str], binary: bool | None, wanted: list[str] | None = None
) -> tuple[Table, Table]:
    """The columns of a table but for the labels, and those of the labels.

    Args:
        binary: of targets, see `kind_of_targets`; None: classes.
    """
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
    lacking = [label for label in labels if label not in table.column_names]
    if lacking:
        flag = "label-column is one" if binary is None else "target-columns are some"
        raise DataError(
            f"{source}: there is no column {lacking[0]!r}: --data.{flag} of "
            f"{', '.join(table.column_names)}."
        )
    types = {label: table.schema.field(label).type for label in labels}
    if binary is not None and kind_of_targets(source, types, binary) == "list":
        raise DataError(f"{source}: column {labels[0]!r} has lists: give each label a column.")
    names = wanted or [name for name in table.column_names if name not in labels]
    twice = [name for name in (*names, *labels) if table.column_names.count(name) > 1]
    if twice:
        raise DataError(f"{source}: there are several columns {twice[0]!r}: rename or remove some.")
    if not names:
        raise DataError(f"{source}: there is no column besides {', '.join(map(repr, labels))}.")
    columns: Table = {}
    for name in (*names, *labels):
        if name not in table.column_names:
            raise DataError(f"{source}: there is no column {name!r}, which the training data have.")
        column = table[name]
        if column.null_count:
            raise DataError(f"{source}: column {name!r} has {column.null_count} nulls: fill them.")
        kind = column.type
        number = (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        )
        if name not in labels and not number:
            raise DataError(
                f"{source}: column {name!r} has {kind}, not numbers: encode or remove it."
            )
        columns[name] = _labels(column, source, name) if name in labels else column.to_numpy()
        if pa.types.is_floating(kind) and not np.isfinite(columns[name]).all():
            row = int(np.flatnonzero(~np.isfinite(columns[name]))[0])
            raise DataError(f"{source}, row {row}: column {name!r} is {columns[name][row]}.")
    return columns, {label: columns.pop(label) for label in labels}


def _labels(column: Any, source: str, name: str) -> np.ndarray[Any, Any]:
    """The values of a label column; texts as those of images."""
    from pyarrow import types

    if types.is_nested(column.type):
        raise DataError(f"{source}: column {name!r} has {column.type}, not one label in each row.")
    if kind_of(column.type) != "string":
        return column.to_numpy()  # type: ignore[no-any-return]
    texts = [normalized(text) for text in column.to_pylist()]
    if "" in texts:
        raise DataError(
            f"{source}, row {texts.index('')}: column {name!r} is an empty string: fill it or "
            "remove the row."
        )
    return np.array(texts, object)


def _matrix(columns: Table) -> np.ndarray[Any, Any]:
    """float64 (rows, columns)."""
    return np.stack([column.astype(np.float64) for column in columns.values()], 1)


def _numbers(labels: np.ndarray[Any, Any], classes: list[Any], source: str) -> Any:
    """The class of each row, int64 (rows,)."""
    number = {name: place for place, name in enumerate(classes)}
    unknown = {*labels.tolist()} - {*classes}
    if unknown or len(classes) < 2:
        found = f"labels {sorted(unknown)}" if unknown else f"only the label {classes}"
        raise DataError(f"{source}: {found}; the classes of the training data are {classes}.")
    return np.array([number[label] for label in labels.tolist()], np.int64)
