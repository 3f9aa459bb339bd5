"""The type of labels in files without types, and the class of each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import png

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.splits import Splits, open_splits
from raytrain_ddp.errors import DataError


def write_list(path: Path, labels: Sequence[str]) -> None:
    """A CSV of images in the parent folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in range(len(labels)):
        (path.parents[1] / f"{row}.png").write_bytes(png(row))
    rows = [f"../{row}.png,{label}\n" for row, label in enumerate(labels)]
    path.write_text("".join(["image,label\n", *rows]))


def splits(folder: Path, **fields: Any) -> Splits:
    return open_splits(DataConfig(source=str(folder), **fields), binary="target_columns" in fields)


def named(found: Splits) -> tuple[list[str], list[str]]:
    """The class of each row of the training set, and of the evaluation set."""
    names, rows = found.class_names, [source for source in (found.train, found.eval) if source]
    train, *rest = [[names[n] for n in source.labels().tolist()] for source in rows]
    return train, rest[0] if rest else []


@pytest.mark.parametrize(
    ("train", "evaluation", "classes"),
    [
        (["1", "2", "other"], ["1", "2"], ["1", "2", "other"]),
        (["0123", "123", "0x7b", "1"], ["1", "0123"], ["0123", "0x7b", "1", "123"]),
        (["12345678901234567890", "12345678901234567891", "5"], ["5"], None),
        (["NA", "EU", "US"], ["NA", "NA"], ["EU", "NA", "US"]),
        (["10", "9", "2"], ["10", "2"], ["2", "9", "10"]),
        (["2020-01-01", "2021-01-01"], ["2021-01-01"], ["2020-01-01", "2021-01-01"]),
    ],
)
def test_each_distinct_text_is_a_class_and_an_evaluation_set_is_mapped_by_name(
    train: list[str], evaluation: list[str], classes: list[str] | None, tmp_path: Path
):
    write_list(tmp_path / "lists/train.csv", train)
    write_list(tmp_path / "lists/val.csv", evaluation)
    found = splits(tmp_path / "lists")
    assert named(found) == (train, evaluation)
    assert found.class_names == (classes or sorted({*train}))


def test_decimal_numbers_and_booleans_have_one_spelling(tmp_path: Path):
    write_list(tmp_path / "lists/train.csv", ["1.0", "2.0", "3"])
    write_list(tmp_path / "lists/val.csv", ["3.0", "1"])
    assert named(splits(tmp_path / "lists")) == (["1", "2", "3"], ["3", "1"])
    write_list(tmp_path / "flags/train.csv", ["true", "false", "true"])
    write_list(tmp_path / "flags/val.csv", ["True", "FALSE"])
    assert named(splits(tmp_path / "flags")) == (["True", "False", "True"], ["True", "False"])
    write_list(tmp_path / "lists/train.csv", ["1", "2", "0.5"])
    with pytest.raises(DataError, match=r"row 2: label 0\.5 is not a whole number"):
        splits(tmp_path / "lists")


def test_the_label_type_is_determined_by_all_files_of_a_list(tmp_path: Path):
    write_list(tmp_path / "lists/train-0.csv", ["0", "1", "2"])
    write_list(tmp_path / "lists/train-1.csv", ["0", "x"])
    assert named(splits(tmp_path / "lists"))[0] == ["0", "1", "2", "0", "x"]


def test_integers_index_explicitly_named_classes(tmp_path: Path):
    write_list(tmp_path / "lists/train.csv", ["0", "1", "2"])
    assert named(splits(tmp_path / "lists", classes=("cat", "dog", "emu")))[0] == [
        *("cat", "dog", "emu")
    ]


@pytest.mark.parametrize("folders", [("1", "2", "other"), ("01", "02", "03")])
def test_integers_refer_to_classes_that_are_numbers_by_name(
    folders: tuple[str, ...], tmp_path: Path
):
    for name in folders:
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(png(0))
    table = pa.table({"image": [png(0), png(1)], "label": [1, 2]})
    pq.write_table(table, tmp_path / "val.parquet")
    found = splits(tmp_path / "train", eval_source=str(tmp_path / "val.parquet"))
    assert named(found)[1] == [*folders[:2]]


def test_a_quotation_mark_that_is_not_closed_is_refused(tmp_path: Path):
    write_list(tmp_path / "lists/train.csv", ["a", "b", "c", '"a', "b", "a"])
    with pytest.raises(DataError, match=r"train\.csv, row 3: a quotation mark is not closed"):
        splits(tmp_path / "lists")
    write_list(tmp_path / "lists/train.csv", ['5" disk', "b"])
    assert named(splits(tmp_path / "lists"))[0] == ['5" disk', "b"]


def test_labels_that_a_float_cannot_represent_are_refused(tmp_path: Path):
    lines = [json.dumps({"image": "0.png", "label": 2**64 + n}) for n in range(2)]
    (tmp_path / "0.png").write_bytes(png(0))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match="too large to be exact: write the labels as text"):
        splits(tmp_path / "train.jsonl")


def test_the_format_follows_from_the_file_name_only(tmp_path: Path):
    for folder in ("x.tsv_files", "x.jsonl.files"):
        write_list(tmp_path / folder / "train.csv", ["a", "b"])
        assert named(splits(tmp_path / folder))[0] == ["a", "b"]
    content = (tmp_path / "x.tsv_files/train.csv").read_bytes()
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/train.CSV.GZ").write_bytes(gzip.compress(content))
    assert named(splits(tmp_path / "packed"))[0] == ["a", "b"]


# ------------------------------------------------------------------ typed files


def write_named(path: Path, column: str, rows: Sequence[Any], feature: Any) -> None:
    """A Parquet file with a Hugging Face feature, or without one for None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [png(row) for row in range(len(rows))], column: rows})
    if feature is not None:
        metadata = {"huggingface": json.dumps({"info": {"features": {column: feature}}})}
        table = table.replace_schema_metadata(metadata)
    pq.write_table(table, path)


def test_a_file_without_class_names_uses_those_of_its_split(tmp_path: Path):
    names = sorted(map(str, range(12)))
    feature = {"names": names, "_type": "ClassLabel"}
    write_named(tmp_path / "train-00000-of-00002.parquet", "label", [0, 1, 2, 3], feature)
    write_named(tmp_path / "train-00001-of-00002.parquet", "label", [0, 1, 2, 3], None)
    assert splits(tmp_path).train.labels().tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("notation", ["List", "list"])
def test_lists_of_named_labels_are_mapped_by_name(notation: str, tmp_path: Path):
    for split, names in (("train", ["cat", "ant", "bee"]), ("val", ["ant", "bee", "cat"])):
        inner = {"names": names, "_type": "ClassLabel"}
        feature = {"feature": inner, "_type": "List"} if notation == "List" else [inner]
        write_named(tmp_path / f"{split}.parquet", "tags", [[0], [1, 2], []], feature)
    found = splits(tmp_path, target_columns=("tags",))
    assert found.class_names == ["cat", "ant", "bee"]
    assert found.train.labels().tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert found.eval is not None
    assert found.eval.labels().tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_null_in_a_list_is_not_the_class_none(tmp_path: Path):
    write_named(tmp_path / "train.parquet", "tags", [["None", "a"], [None], ["a"]], None)
    with pytest.raises(DataError, match=r"row 1: tags: None is not one of"):
        splits(tmp_path, target_columns=("tags",)).train.labels()


def test_duplicate_one_letter_class_names_are_refused(tmp_path: Path):
    feature = {"names": ["a", "a", "b"], "_type": "ClassLabel"}
    write_named(tmp_path / "train.parquet", "label", [0, 1], feature)
    with pytest.raises(DataError, match="the class 'a' exists twice"):
        splits(tmp_path)


@pytest.mark.parametrize(
    "empty",
    [
        pa.array([None, None], pa.string()),
        pa.array(["", ""]),
        pa.array([None, None], pa.bool_()),
        pa.array([None, float("nan")], pa.float64()),
        pa.array([None, None], pa.null()),
        pa.array([None, None]).cast(pa.string()).dictionary_encode(),
        pa.array([-1, -1]),
    ],
)
def test_an_unlabeled_test_split_of_any_type_is_ignored(empty: Any, tmp_path: Path):
    write_named(tmp_path / "train.parquet", "label", ["x", "y"], None)
    table = pa.table({"image": [png(0), png(1)], "label": empty})
    pq.write_table(table, tmp_path / "test.parquet", write_statistics=False)
    found = splits(tmp_path)
    assert found.eval is None
    assert any("no row has a label" in note for note in found.notes)


def test_an_arrow_file_is_read_like_an_arrow_stream(tmp_path: Path):
    table = pa.table({"image": [png(row) for row in range(4)], "label": [0, 1, 2, 1]})
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    assert splits(tmp_path).train.labels().tolist() == [0, 1, 2, 1]


def test_a_readme_can_name_a_list_next_to_other_tables(tmp_path: Path):
    write_list(tmp_path / "set/train.csv", ["a", "b"])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "set/stats.parquet")
    (tmp_path / "set/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: train.csv\n---\n"
    )
    assert named(splits(tmp_path / "set"))[0] == ["a", "b"]
