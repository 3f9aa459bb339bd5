"""The example `tabular`: what it reads, leaves out, refuses, and learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny_config

from raytrain_ddp import fit_locally
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.task_loading import imported

EXAMPLE = Path(__file__).parents[2] / "examples" / "tabular.py"
Tabular: Any = imported("task", f"{EXAMPLE}:Tabular")


def frame(rows: int = 120) -> pd.DataFrame:
    """Two columns on different scales, the first of which determines the label, and a constant
    one."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 2))
    label = np.where(x[:, 0] > 0, "yes", "no")
    return pd.DataFrame({"a": 1e4 * x[:, 0] + 5e4, "b": x[:, 1], "c": 3, "label": label})


def config_of(source: Path, **data: Any) -> TrainConfig:
    data = {"holdout": 0.25, **data}
    return TrainConfig(data=DataConfig(source=str(source), **data))


def written(path: Path, table: pd.DataFrame) -> Path:
    if path.suffix.lower() == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".CSV", ".TSV", ".PARQUET"])
@pytest.mark.parametrize("kind", ["text", "number", "boolean"])
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


def test_other_rows_are_evaluated_with_the_columns_in_any_order(tmp_path: Path):
    source = written(tmp_path / "t.csv", frame())
    other = frame(40)[["label", "c", "b", "a"]]
    task = Tabular(
        config_of(source, holdout=0.0, eval_source=str(written(tmp_path / "e.csv", other)))
    )
    assert (task.train_data().rows, task.eval_data().rows) == (120, 40)
    read = task.eval_data().source.read(np.arange(40))["x"]
    np.testing.assert_allclose(read, other[["a", "b", "c"]].to_numpy(float), rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "data", "reported"),
    [
        (lambda t: t, {"label_column": "y"}, r"one column 'y'; .* are a, b, c, label"),
        (lambda t: t.assign(b=None), {}, r"column 'b' has 120 nulls: fill them"),
        (lambda t: t.assign(b="red"), {}, r"column 'b' has .*string, not numbers: encode"),
        (lambda t: t.assign(b=[1.0, np.inf] * 60), {}, r"t.parquet, row 1: column 'b' is .*inf"),
        (lambda t: t[["label"]], {}, "no column to learn from besides 'label'"),
        (lambda t: t.assign(label=t.b), {}, "120 different numbers in 120 rows: classes are exp"),
        (lambda t: t.assign(label=[[1], [2]] * 60), {}, r"'label' has list<.*, not one label"),
        (lambda t: t.assign(label=[{"a": 1}] * 120), {}, r"'label' has struct<.*, not one label"),
        (lambda t: t.assign(label=["a", "b", ""] * 40), {}, "row 2: column 'label' is ''"),
        (lambda t: t.assign(label="yes"), {}, "all rows have the label 'yes'"),
        (lambda t: t, {"holdout": 0.0}, r"no rows to evaluate on: set --data\.holdout 0\.2"),
    ],
)
def test_an_unsuitable_table_is_refused_in_one_line(
    change: Any, data: dict[str, Any], reported: str, tmp_path: Path
):
    config = config_of(written(tmp_path / "t.parquet", change(frame())), **data)
    with pytest.raises(DataError, match=reported) as caught:
        Tabular(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        (frame().drop(columns="b"), r"e\.csv: needs one column 'b'"),
        (frame().replace("yes", "maybe"), r"e\.csv: labels \['maybe'\]; the classes of .*'yes'"),
    ],
)
def test_unsuitable_evaluation_rows_are_refused_in_one_line(
    other: pd.DataFrame, reported: str, tmp_path: Path
):
    source = written(tmp_path / "t.csv", frame())
    rest = str(written(tmp_path / "e.csv", other))
    with pytest.raises(DataError, match=reported):
        Tabular(config_of(source, holdout=0.0, eval_source=rest))


def shuffled(rows: int) -> pd.DataFrame:
    """Noise in b and c; the number of a row gives its label away."""
    table = pd.DataFrame(np.random.default_rng(1).normal(size=(rows, 2)), columns=["b", "c"])
    table["label"] = np.where(table.index < rows // 2, "no", "yes")
    return table.sample(frac=1, random_state=0)


@pytest.mark.parametrize(
    ("write", "left_out"),
    [
        (lambda t, path: t.to_parquet(f"{path}.parquet"), "'__index_level_0__'"),
        (lambda t, path: t.rename_axis("key").to_parquet(f"{path}.parquet"), "'key'"),
        (lambda t, path: t[t.b > 0].to_parquet(f"{path}.parquet"), "'__index_level_0__'"),
        (lambda t, path: t.to_csv(f"{path}.csv"), "''"),
        (lambda t, path: t[t.b > 0].to_csv(f"{path}.csv"), "''"),
        (lambda t, path: t.to_csv(f"{path}.tsv", sep="\t"), "''"),
        (lambda t, path: t.to_csv(f"{path}.csv", index_label="Unnamed: 0"), "'Unnamed: 0'"),
        (lambda t, path: t.to_csv(f"{path}.csv", index_label="row"), "'row'"),
        (lambda t, path: t.assign(row=t.index + 1).to_parquet(f"{path}.parquet"), "'row'"),
        (lambda t, path: t[t.b > 0].to_csv(f"{path}.csv", index_label="index"), "'index'"),
        (lambda t, path: t[t.b > 0].to_csv(f"{path}.csv", index_label="level_0"), "'level_0'"),
        (lambda t, path: t.assign(user_id=t.index**2).to_csv(f"{path}.tsv", sep="\t"), "'user_id'"),
        (lambda t, path: t.assign(n=range(9, 369, 3)).to_csv(f"{path}.csv", index=False), "'n'"),
        (lambda t, path: t.to_csv(f"{path}.csv", index=False), ""),
        (lambda t, path: t.reset_index(drop=True).to_parquet(f"{path}.parquet"), ""),
    ],
)
def test_columns_that_only_number_the_rows_are_left_out_with_a_note(
    write: Any, left_out: str, tmp_path: Path
):
    write(shuffled(120), tmp_path / "t")
    (path,) = tmp_path.iterdir()
    task = Tabular(config_of(path))
    assert task.train_data().source.read(np.arange(5))["x"].shape == (5, 2)
    assert [left_out in note for note in task.notes] == [True] * bool(left_out)


def test_a_column_that_is_constant_in_the_training_rows_is_not_scaled_by_rounding(tmp_path: Path):
    table, other = frame(), frame(40)
    table["c"] = 14.62  # its standard deviation is 9e-14 by rounding
    other["c"] = [15.0] * 4 + [14.62] * 36
    source, rest = written(tmp_path / "t.csv", table), written(tmp_path / "e.csv", other)
    task = Tabular(config_of(source, holdout=0.0, eval_source=str(rest)))
    x = torch.from_numpy(task.eval_data().source.read(np.arange(40))["x"])
    assert task.model()[0](x)[:, 2].abs().max() < 1
    (note,) = task.notes
    assert "'c'" in note


@pytest.mark.parametrize("name", ["age", "id"])
def test_an_index_of_pandas_that_is_a_column_of_the_data_is_learned_from(name: str, tmp_path: Path):
    table = frame().assign(**{name: [20, 30, 20, 41] * 30}).set_index(name)
    table.to_parquet(tmp_path / "t.parquet")
    task = Tabular(config_of(tmp_path / "t.parquet"))
    assert task.train_data().source.read(np.arange(5))["x"].shape == (5, 4)
    assert not [note for note in task.notes if "left out" in note]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["07", "7", "8"], ["07", "7", "8"]),
        (["1.0", "1", "2"], ["1", "1.0", "2"]),
        (["true", "True", "false"], ["True", "false", "true"]),
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["nan", "1", "NA"], ["1", "NA", "nan"]),
        (["0.5", "10.5", "2.5"], ["0.5", "2.5", "10.5"]),
    ],
)
def test_labels_in_text_files_are_texts(labels: list[str], classes: list[str], tmp_path: Path):
    table = frame().assign(label=labels * 40)
    source = written(tmp_path / "t.csv", table)
    rest = written(tmp_path / "e.tsv", table[table["label"] == labels[1]])
    task = Tabular(config_of(source, holdout=0.0, eval_source=str(rest)))
    assert task.class_names == classes
    codes = task.train_data().source.read(np.arange(120))["y"]
    assert [classes[code] for code in codes] == labels * 40
    assert set(task.eval_data().source.read(np.arange(40))["y"]) == {classes.index(labels[1])}


def test_a_missing_label_is_not_a_class(tmp_path: Path):
    (tmp_path / "t.csv").write_text("a,label\n1,x\n3,\n4,y\n")
    with pytest.raises(DataError, match=r"t\.csv, row 1: column 'label' is ''"):
        Tabular(config_of(tmp_path / "t.csv"))


def test_both_unicode_forms_of_a_label_are_one_class(tmp_path: Path):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    table, other = frame(), frame(4)
    table["label"] = [composed, decomposed, "tea"] * 40
    other["label"] = [decomposed, composed, "tea", "tea"]
    source, rest = written(tmp_path / "t.csv", table), written(tmp_path / "e.parquet", other)
    task = Tabular(config_of(source, holdout=0.0, eval_source=str(rest)))
    assert task.class_names == [composed, "tea"]
    assert task.train_data().source.read(np.arange(3))["y"].tolist() == [0, 0, 1]
    assert task.eval_data().source.read(np.arange(4))["y"].tolist() == [0, 0, 1, 1]


def test_duplicate_column_names_are_refused(tmp_path: Path):
    (tmp_path / "t.csv").write_text("a,a,label\n1,2,x\n3,4,y\n")
    with pytest.raises(DataError, match="needs one column 'a'"):
        Tabular(config_of(tmp_path / "t.csv"))


@pytest.mark.parametrize("hidden", ["a,b", "-5", "0", "8,", ""])
def test_invalid_layer_sizes_are_refused(hidden: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task_options\.hidden = .*numbers above 0"):
        Tabular(config_of(written(tmp_path / "t.csv", frame())), hidden)


@pytest.mark.parametrize("content", [None, b"", b"a,b\n1\n", b"PAR1"])
def test_a_source_that_is_not_a_table_is_refused_in_one_line(content: bytes | None, tmp_path: Path):
    path = tmp_path / ("t.parquet" if content == b"PAR1" else "t.csv")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a table") as caught:
        Tabular(config_of(path))
    assert "\n" not in str(caught.value)


def test_the_model_standardizes_its_columns_itself(tmp_path: Path):
    task = Tabular(config_of(written(tmp_path / "t.csv", frame())))
    rows = torch.from_numpy(task.train_data().source.read(np.arange(90))["x"])
    seen = task.model()[0](rows)  # type: ignore[index]
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))


def test_a_table_is_learned_and_its_auroc_is_exact(tmp_path: Path):
    source = written(tmp_path / "t.csv", frame())
    config = tiny_config(
        tmp_path / "runs",
        "table",
        epochs=10,
        task=f"{EXAMPLE}:Tabular",
        task_options={"hidden": "16,8"},
        data=replace(config_of(source).data, workers=0),
        optim=OptimConfig(name="adamw", lr=0.01),
    )
    result = fit_locally(config)
    assert result.best["auroc"] > 0.95
    task = Tabular(config)
    rest = task.eval_data().source.read(np.arange(30))
    model, metrics = task.model().eval(), task.metrics()
    batch = {name: torch.from_numpy(values) for name, values in rest.items()}
    task.evaluate(model, batch, metrics)
    scores = model(batch["x"]).softmax(1)[:, 1]
    ours = scores[batch["y"] == 1][:, None] - scores[batch["y"] == 0]
    pairs = (ours > 0).float() + 0.5 * (ours == 0)  # Mann and Whitney
    assert metrics["auroc"].compute() == pytest.approx(pairs.mean().item(), abs=1e-6)
