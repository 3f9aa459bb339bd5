"""The class of each label: the same for the same content in files of any format."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
        (
            ["12345678901234567890", "12345678901234567891", "5"],
            ["5"],
            ["5", "12345678901234567890", "12345678901234567891"],
        ),
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


TEXTS: Mapping[str, tuple[list[str], list[str]]] = {
    "zero-padded": (["007", "7", "8", "7"], ["007", "7", "8"]),
    "whole numbers": (["10", "9", "2", "10"], ["2", "9", "10"]),
    "a word among numbers": (["01", "02", "cat", "01"], ["01", "02", "cat"]),
    "decimals": (["1.0", "1", "1.1"], ["1", "1.0", "1.1"]),
    "exponents": (["1e3", "1000", "1E3"], ["1000", "1E3", "1e3"]),
    "signs": (["+1", "-1", "1"], ["+1", "-1", "1"]),
    "a negative number among words": (["-1", "cat", "dog"], ["-1", "cat", "dog"]),
    "minus zero": (["-0", "0"], ["-0", "0"]),
    "booleans": (["true", "True", "FALSE"], ["FALSE", "True", "true"]),
    "words for nothing": (["NA", "null", "None", "nan"], ["NA", "None", "nan", "null"]),
    "spaces": (["a", " a", "a ", "a b"], [" a", "a", "a ", "a b"]),
    "beyond 64 bits": ([str(2**64), str(2**63), "5"], ["5", str(2**63), str(2**64)]),
    "Unicode forms": (["caf\u00e9", "cafe\u0301", "b"], ["b", "caf\u00e9"]),
    "a quotation mark": (['5" disk', "b"], ['5" disk', "b"]),
    "long": (["x" * 200 + "1", "x" * 200 + "2"], ["x" * 200 + "1", "x" * 200 + "2"]),
}
VALUES: Mapping[str, tuple[list[Any], list[str]]] = {
    "integers": ([10, 9, 2, 10], ["2", "9", "10"]),
    "large integers": ([2**62 + 1, 2**62, 5], ["5", str(2**62), str(2**62 + 1)]),
    "whole floats": ([2.0, 0.0, 10.0], ["0", "2", "10"]),
    "booleans": ([True, False, True], ["False", "True"]),
}
WRONG: Mapping[str, list[Any]] = {
    "null": ["a", "b", None],
    "empty": ["a", "b", ""],
    "blank": ["a", "b", "  "],
    "negative": [0, 1, -1],
    "negative text": ["0", "1", "-1"],
    "fraction": [0.0, 1.0, 0.5],
    "not a number": [0.0, 1.0, float("nan")],
    "infinite": [0.0, 1.0, float("inf")],
    "a large float": [0.0, 1.0, 1e300],
    "a list": [["a"], ["b"], ["a"]],
    "an object": [{"a": 1}, {"a": 2}, {"a": 1}],
    "numbers and texts": [0, 1, "a"],
    "booleans and numbers": [True, 1, 0],
    "a long text and a null": ["x" * 100_000, "y" * 100_000, None],
}


def as_csv(folder: Path, labels: Sequence[Any], end: str = ".csv", mark: str = ",") -> None:
    with (folder / f"train{end}").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows([("image", "label"), *((f"../{r}.png", x) for r, x in enumerate(labels))])


def as_json(folder: Path, labels: Sequence[Any]) -> None:
    rows = [{"image": f"../{row}.png", "label": label} for row, label in enumerate(labels)]
    (folder / "train.JSONL").write_text("\n".join(map(json.dumps, rows)))


def as_parquet(folder: Path, labels: Any) -> None:
    images = [png(row) for row in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": labels}), folder / "train.PARQUET")


def as_dictionary(folder: Path, labels: Sequence[Any]) -> None:
    as_parquet(folder, pa.array(labels).dictionary_encode())


def as_arrow(folder: Path, labels: Sequence[Any]) -> None:
    table = pa.table({"image": [png(row) for row in range(len(labels))], "label": labels})
    with pa.ipc.new_file(str(folder / "train.Arrow"), table.schema) as writer:
        writer.write_table(table)


def as_tar(folder: Path, labels: Sequence[Any], end: str = "cls") -> None:
    with tarfile.open(folder / "train.TAR", "w") as file:
        for row, label in enumerate(labels):
            text = json.dumps({"label": label}) if end == "json" else f"{label}\n"
            for name, content in ((f"{row}.png", png(row)), (f"{row}.{end}", text.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def as_folders(folder: Path, labels: Sequence[str]) -> None:
    for row, label in enumerate(labels):
        (folder / "train" / unicodedata.normalize("NFC", label)).mkdir(parents=True, exist_ok=True)
        (folder / "train" / unicodedata.normalize("NFC", label) / f"{row}.png").write_bytes(
            png(row)
        )


Write = Callable[[Path, Any], None]
TYPED: Mapping[str, Write] = {
    "json": as_json,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "tar .json": lambda folder, labels: as_tar(folder, labels, "json"),
}
UNTYPED: Mapping[str, Write] = {
    "csv": as_csv,
    "tsv": lambda folder, labels: as_csv(folder, labels, ".TSV", "\t"),
    "tar .cls": as_tar,
    "tar .txt": lambda folder, labels: as_tar(folder, labels, "txt"),
}
READERS = {**TYPED, **UNTYPED, "dictionary": as_dictionary, "folders": as_folders}


def written(folder: Path, reader: str, labels: Sequence[Any]) -> tuple[Path, dict[str, str]]:
    """A folder with a data set, and the fields to read it."""
    (folder / "set").mkdir()
    if reader in ("csv", "tsv", "json"):
        for row in range(len(labels)):
            (folder / f"{row}.png").write_bytes(png(row))
    READERS[reader](folder / "set", labels)
    return folder / "set", {"label_column": "txt"} if reader == "tar .txt" else {}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("spelling", TEXTS)
def test_text_is_the_same_class_in_each_format(spelling: str, reader: str, tmp_path: Path):
    labels, classes = TEXTS[spelling]
    folder, fields = written(tmp_path, reader, labels)
    found = splits(folder, **fields)
    if reader.startswith("tar .") and reader != "tar .json":  # lines of their own
        labels = [label.strip() for label in labels]
        classes = [name for name in classes if name == name.strip()]
    if reader == "folders":  # in the order of torchvision's ImageFolder
        classes = sorted(classes)
    assert found.class_names == classes
    pictures = {png(row): unicodedata.normalize("NFC", name) for row, name in enumerate(labels)}
    read = found.train.read(np.arange(len(labels)))
    assert [classes[number] for _, number in read] == [pictures[image] for image, _ in read]
    assert found.train.labels().tolist() == [number for _, number in read]


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_is_the_same_class_in_each_format(kind: str, reader: str, tmp_path: Path):
    labels, classes = VALUES[kind]
    if reader in UNTYPED and kind == "whole floats":
        classes = ["0.0", "10.0", "2.0"]
    folder, fields = written(tmp_path, reader, labels)
    found = splits(folder, **fields)
    assert found.class_names == classes
    names = map(str, labels if reader in UNTYPED or kind != "whole floats" else map(int, labels))
    assert named(found)[0] == [*names]


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_not_a_label_is_refused_in_one_line(kind: str, reader: str, tmp_path: Path):
    labels = ["" if label is None else label for label in WRONG[kind]]
    if reader in TYPED:
        labels = WRONG[kind]
    elif not any(label in ("", "  ", -1, "-1") for label in labels):
        pytest.skip("this is text like any other")
    try:
        folder, fields = written(tmp_path, reader, labels)
    except pa.ArrowException:
        pytest.skip("the format has no such column")
    with pytest.raises(DataError) as caught:
        splits(folder, **fields)
    assert "label" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
def test_negative_labels_are_classes_if_the_classes_are_named(reader: str, tmp_path: Path):
    folder, fields = written(tmp_path, reader, [1, -1, 1])
    with pytest.raises(DataError, match=r"-1.*data\.classes -1 1"):
        splits(folder, **fields)
    assert splits(folder, **fields, classes=("-1", "1")).train.labels().tolist() == [1, 0, 1]


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
def test_whole_numbers_index_classes_that_are_named_otherwise(reader: str, tmp_path: Path):
    folder, fields = written(tmp_path, reader, [0, 2, 1])
    found = splits(folder, **fields, classes=("cat", "dog", "emu"))
    assert named(found)[0] == ["cat", "emu", "dog"]


@pytest.mark.parametrize(
    ("first", "second", "classes"),
    [
        (["01", "02"], ["01", "cat"], ["01", "02", "cat"]),
        (["1", "10"], ["9", "1"], ["1", "9", "10"]),
    ],
)
def test_the_files_of_a_tar_data_set_decide_together(
    first: list[str], second: list[str], classes: list[str], tmp_path: Path
):
    for number, labels in enumerate((first, second)):
        as_tar(tmp_path, labels)
        (tmp_path / "train.TAR").rename(tmp_path / f"train-{number}.tar")
    found = splits(tmp_path)
    assert found.class_names == classes
    assert named(found)[0] == [*first, *second]


def test_the_label_type_is_determined_by_all_files_of_a_list(tmp_path: Path):
    write_list(tmp_path / "lists/train-0.csv", ["0", "1", "2"])
    write_list(tmp_path / "lists/train-1.csv", ["0", "x"])
    assert named(splits(tmp_path / "lists"))[0] == ["0", "1", "2", "0", "x"]


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
    write_list(tmp_path / "lists/train.csv", ['5" disk', '"a" big', '"x" "y"', "b"])
    texts = pd.read_csv(tmp_path / "lists/train.csv")["label"].tolist()
    assert named(splits(tmp_path / "lists"))[0] == texts == ['5" disk', "a big", 'x "y"', "b"]


@pytest.mark.parametrize("reader", ["json", "tar .json"])
def test_integers_of_json_are_exact(reader: str, tmp_path: Path):
    folder, _ = written(tmp_path, reader, [2**64 + 1, 2**64, 2**63, 5])
    assert splits(folder).class_names == ["5", str(2**63), str(2**64), str(2**64 + 1)]


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


@pytest.mark.parametrize(
    ("labels", "row"),
    [
        ([["a", 1], ["a"], ["a", "b"], []], 0),
        ([["a"], ["b"], [], ["a", "b"], [1]], 4),
        ([["a"], ["b"], "c"], 2),
        ([["a"], None, 1, ["b"]], 2),
    ],
)
def test_the_odd_one_of_lists_of_labels_is_named(labels: list[Any], row: int, tmp_path: Path):
    folder, _ = written(tmp_path, "json", labels)
    with pytest.raises(DataError, match=f"row {row}: label .* has a different type"):
        splits(folder, target_columns=("label",))


def test_null_in_a_list_is_not_the_class_none(tmp_path: Path):
    write_named(tmp_path / "train.parquet", "tags", [["None", "a"], [None], ["a"]], None)
    with pytest.raises(DataError, match=r"row 1: tags: a label is null"):
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
