"""Predictions and exports of numeric targets, from non-square images that are not resized."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parquet_files import hugging_face, png, write_parquet

from raytrain_ddp import DataConfig, ModelConfig, TrainConfig, fit_locally
from raytrain_ddp.config.sections import LogConfig, LossConfig
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.tools.export.__main__ import main as export
from raytrain_ddp.tools.predict.__main__ import main as predict

ROWS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two numbers of pictures that are 12 pixels high and 10 wide."""
    folder = tmp_path_factory.mktemp("numbers")
    age = np.linspace(0, 1, ROWS)
    columns = {"image": hugging_face([png(i) for i in range(ROWS)]), "age": age, "size": age + 1}
    source = write_parquet(folder / "train.parquet", columns)
    other = write_parquet(folder / "other.parquet", columns)
    config = TrainConfig(
        name="numbers",
        storage=str(folder),
        steps=1,
        batch_size=8,
        micro_batch=4,
        data=DataConfig(source=source, target_columns=("age", "size"), eval_source=other),
        loss=LossConfig(name="mse"),
        model=ModelConfig(name="timm:test_resnet"),
        log=LogConfig(tensorboard=False),
    )
    fit_locally(config)
    torch.use_deterministic_algorithms(False)
    return str(folder / "numbers")


def test_the_export_of_a_regression_run_states_the_preprocessing(run: str, tmp_path: Path):
    out = tmp_path / "e"
    assert export([run, "--format", "safetensors", "--out", str(out)]) == 0
    facts = json.loads((out / "preprocessing.json").read_text())
    assert (facts["image_size"], facts["resize_shorter_side"], facts["crop"]) == (
        [12, 10],
        None,
        "none",
    )


def test_predictions_have_the_names_of_the_numbers_and_their_targets(run: str, tmp_path: Path):
    """The training data are not needed."""
    out = tmp_path / "p.csv"
    (Path(run).parent / "train.parquet").unlink()
    assert predict([run, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    wanted = ["file", "row", "target:age", "target:size", "value:age", "value:size", "error"]
    assert list(rows[0]) == wanted
    assert [float(row["target:size"]) for row in rows] == pytest.approx(np.linspace(1, 2, ROWS))


def test_numeric_targets_are_evaluated_on_columns_with_other_names(run: str, tmp_path: Path):
    values = np.linspace(0, 1, ROWS)
    columns = {"image": hugging_face([png(i) for i in range(ROWS)]), "a": values, "b": values + 1}
    table = write_parquet(tmp_path / "t.parquet", columns)
    found = []
    for names in (("a", "b"), ("b", "a")):
        out = tmp_path / "e.json"
        evaluate([run, "--data", table, "--data.target-columns", *names, "--out", str(out)])
        found.append(json.loads(out.read_text())["metrics"]["loss"])
    evaluate([run, "--out", str(tmp_path / "own.json")])
    own = json.loads((tmp_path / "own.json").read_text())["metrics"]["loss"]
    assert found[0] == own != found[1]
