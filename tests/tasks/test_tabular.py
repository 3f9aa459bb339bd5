"""The example `tabular`: what it reads, leaves out, and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.tasks.task_loading import imported

EXAMPLE = Path(__file__).parents[2] / "examples" / "tabular.py"
Tabular: Any = imported("task", f"{EXAMPLE}:Tabular")


def frame(rows: int = 120) -> pd.DataFrame:
    """Two columns on different scales, the first of which determines the label, and a constant
    one."""
    x = np.random.default_rng(0).normal(size=(rows, 2))
    label = np.where(x[:, 0] > 0, "yes", "no")
    return pd.DataFrame({"a": 1e4 * x[:, 0] + 5e4, "b": x[:, 1], "c": 3, "label": label})


def config_of(source: Path, **data: Any) -> TrainConfig:
    return TrainConfig(data=DataConfig(source=str(source), **{"holdout": 0.25, **data}))


def written(path: Path, table: pd.DataFrame) -> Path:
    if path.suffix.lower() == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    return path


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".csv", "text"), (".TSV", "number"), (".parquet", "boolean")]
)
def test_a_table_is_read_as_by_pandas(suffix: str, kind: str, tmp_path: Path):
    table = frame()
    if kind != "text":
        table["label"] = (table["label"] == "yes").astype(bool if kind == "boolean" else int)
    task = Tabular(config_of(written(tmp_path / f"t{suffix}", table)))
    table["label"] = table["label"].map(str)
    assert task.class_names == sorted(table["label"].unique())
    train, rest = (
        data.source.read(np.arange(data.rows)) for data in (task.train_data(), task.eval_data())
    )
    assert (len(train["y"]), len(rest["y"])) == (90, 30)
    assert rest["y"].mean() == pytest.approx(train["y"].mean(), abs=0.02)  # alike for each class
    both = np.concatenate([np.column_stack([p["x"], p["y"]]) for p in (train, rest)])
    codes = table["label"].map({name: i for i, name in enumerate(task.class_names)})
    expected = table[["a", "b", "c"]].assign(y=codes).to_numpy(float)
    order = np.lexsort(both.T), np.lexsort(expected.T)
    np.testing.assert_allclose(both[order[0]], expected[order[1]], rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "data", "named"),
    [
        (lambda t: t, {"label_column": "y"}, "'y'"),
        (lambda t: t.assign(b="red"), {}, "'b'"),
        (lambda t: t.assign(b=[1.0, np.inf] * 60), {}, "row 1:"),
        (lambda t: t.assign(label=t.b), {}, "120 different"),
        (lambda t: t.assign(label=["a", "b", ""] * 40), {}, "row 2:"),
    ],
)
def test_an_unsuitable_table_is_refused(
    change: Any, data: dict[str, Any], named: str, tmp_path: Path
):
    source = written(tmp_path / "t.parquet", change(frame()))
    with pytest.raises(RaytrainError, match=named) as caught:
        Tabular(config_of(source, **data))
    assert caught.value.exit_status == 4
    assert "\n" not in str(caught.value)


def test_other_rows_are_standardized_in_the_model_like_the_training_rows(tmp_path: Path):
    """Their columns are in another order; what is constant is not scaled by rounding."""
    table, other = frame().assign(c=14.62), frame(40).assign(c=15.0)  # its deviation is 9e-14
    source = written(tmp_path / "t.csv", table)
    rest = written(tmp_path / "e.csv", other[["label", "c", "b", "a"]])
    task = Tabular(config_of(source, holdout=0.0, eval_source=str(rest)))
    read = torch.from_numpy(task.eval_data().source.read(np.arange(40))["x"])
    seen, mean, std = task.model()[0](read), table[["a", "b"]].mean(), table[["a", "b"]].std(ddof=0)
    expected = ((other[["a", "b"]] - mean) / std).to_numpy(np.float32)
    torch.testing.assert_close(seen[:, :2], torch.tensor(expected))
    assert seen[:, 2].abs().max() < 1
