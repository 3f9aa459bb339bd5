"""Rows of the table of errors: data that is not there, incomplete, damaged or without labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refused import Row

LABELS = [0, 1] * 4


def parquet(**columns: Any) -> Callable[[Path], object]:
    """Two row groups of four rows, whose images are not decoded before the labels are checked."""

    def make(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"image": [b"\xff\xd8"] * 8, "label": LABELS, **columns})
        pq.write_table(table, path, row_group_size=4)

    return make


def cut(path: Path) -> None:
    parquet()(path)
    path.write_bytes(path.read_bytes()[:-10])


def with_one(label: int | None) -> list[int | None]:
    return [*LABELS[:5], label, 0, 1]


LISTED = json.dumps(
    {
        "format": "raytrain_ddp",
        "version": 1,
        "files": [{"path": "y.parquet", "split": "train", "rows": 8, "bytes": 1}],
    }
)
LIST = "data/list.csv"
IMAGE = "data/cat/0.png"
X = "data/x.parquet"
FILES = "--data.source data"
ROWS = [
    Row(FILES, 4, "data", {"data": Path.mkdir}, light=True),
    Row(FILES, 4, "cow", {IMAGE: b"", "data/cow": Path.mkdir}, light=True),
    Row(f"{FILES} --data.train-split x", 4, "train_split x val", {"data/val.parquet": cut}),
    Row(FILES, 4, "x.parquet", {X: cut}, light=True),
    Row(FILES, 4, "x.parquet row group 1 row 1 null", {X: parquet(label=with_one(None))}),
    Row(FILES, 4, "x.parquet row group 1 row 1 -1", {X: parquet(label=with_one(-1))}),
    Row(FILES, 4, "x.parquet 'label' list", {X: parquet(label=[["cat"]] * 8)}, light=True),
    Row(FILES, 4, "'cat' class", {X: parquet(label=["cat"] * 8)}, light=True),
    Row(f"{FILES} --data.image-column img", 4, "'img' 'image'", {X: parquet()}, light=True),
    Row(FILES, 4, "list.csv row 0 gone.png", {LIST: "image,label\ngone.png,1\n"}),
    Row(FILES, 4, "list.csv #3", {LIST: "image,label\n0.png,a\n0.png,b,c\n"}, light=True),
    Row(FILES, 4, "x.tar", {"data/x.tar": b"hello"}, light=True),
    Row(FILES, 4, "y.parquet", {X: parquet(), "data/dataset.json": LISTED}, light=True),
    Row("--data.holdout 1", 2, "data.holdout", light=True),
    Row("--data.holdout 0.1 --data.eval-split test", 2, "data.holdout data.eval_split", light=True),
    Row("--data.start-size 72 --data.image-size 64", 2, "data.start_size", light=True),
    Row("--data.classes cat", 2, "data.classes", light=True),
]
