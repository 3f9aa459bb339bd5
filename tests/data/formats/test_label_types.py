"""The class of each label: the same for the same content in files of any format."""

from __future__ import annotations

import csv
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import png, write_tar

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.splits import Splits, open_splits
from raytrain_ddp.errors import DataError


def splits(folder: Path, **fields: Any) -> Splits:
    return open_splits(DataConfig(source=str(folder), **fields), binary="target_columns" in fields)


def named(found: Splits) -> tuple[list[str], list[str]]:
    """The class of each row of the training set, and of the evaluation set."""
    names, rows = found.class_names, [source for source in (found.train, found.eval) if source]
    train, *rest = [[names[n] for n in source.labels().tolist()] for source in rows]
    return train, rest[0] if rest else []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------ one table, any format

TEXTS: Mapping[str, tuple[list[str], list[str]]] = {
    "zero-padded": (["007", "7", "8", "7"], ["007", "7", "8"]),
    "whole numbers": (["10", "9", "2", "10"], ["2", "9", "10"]),
    "a word among numbers": (["01", "02", "cat", "01"], ["01", "02", "cat"]),
    "decimals": (["1.0", "1", "1.1"], ["1", "1.0", "1.1"]),
    "exponents": (["1e3", "1000", "1E3"], ["1000", "1E3", "1e3"]),
    "signs": (["+1", "-1", "1"], ["+1", "-1", "1"]),
    "minus zero": (["-0", "0"], ["-0", "0"]),
    "booleans": (["true", "True", "FALSE"], ["FALSE", "True", "true"]),
    "words for nothing": (["NA", "null", "None", "nan"], ["NA", "None", "nan", "null"]),
    "spaces": (["a", " a", "a ", "a b"], [" a", "a", "a ", "a b"]),
    "Unicode forms": (["caf\u00e9", "cafe\u0301", "b"], ["b", "caf\u00e9"]),
    "a quotation mark": (['5" disk', "b"], ['5" disk', "b"]),
    "dates": (["2020-01-01", "2021-01-01"], ["2020-01-01", "2021-01-01"]),
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
    "a large float": [0.0, 1.0, 1e300],
    "a list": [["a"], ["b"], ["a"]],
    "an object": [{"a": 1}, {"a": 2}, {"a": 1}],
    "numbers and texts": [0, 1, "a"],
    "booleans and numbers": [True, 1, 0],
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


def as_arrow(folder: Path, labels: Sequence[Any]) -> None:
    table = pa.table({"image": [png(row) for row in range(len(labels))], "label": labels})
    with pa.ipc.new_file(str(folder / "train.Arrow"), table.schema) as writer:
        writer.write_table(table)


def as_tar(folder: Path, labels: Sequence[Any], end: str = "cls") -> None:
    members = []
    for row, label in enumerate(labels):
        text = json.dumps({"label": label}) if end == "json" else f"{label}\n"
        members += [(f"{row}.png", png(row)), (f"{row}.{end}", text.encode())]
    write_tar(folder / "train.TAR", members)


def as_folders(folder: Path, labels: Sequence[str]) -> None:
    for row, label in enumerate(labels):
        place = folder / "train" / unicodedata.normalize("NFC", label)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row}.png").write_bytes(png(row))


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
READERS: Mapping[str, Write] = {
    **TYPED,
    **UNTYPED,
    "dictionary": lambda folder, labels: as_parquet(folder, pa.array(labels).dictionary_encode()),
    "folders": as_folders,
}


def written(folder: Path, reader: str, labels: Sequence[Any]) -> tuple[Path, dict[str, str]]:
    """A folder with a data set, and the fields to read it."""
    (folder / "set").mkdir(parents=True)
    if reader in ("csv", "tsv", "json"):
        for row in range(len(labels)):
            (folder / f"{row}.png").write_bytes(png(row))
    READERS[reader](folder / "set", labels)
    return folder / "set", {"label_column": "txt"} if reader == "tar .txt" else {}


def as_read(reader: str, texts: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """The classes of these texts in such a file."""
    if reader in ("tar .cls", "tar .txt"):  # lines of their own
        return [text.strip() for text in texts], [name for name in names if name == name.strip()]
    return texts, sorted(names) if reader == "folders" else names  # as torchvision's ImageFolder


@pytest.mark.parametrize("reader", READERS)
def test_text_is_the_same_class_in_each_format(reader: str, tmp_path: Path):
    for spelling, (texts, names) in TEXTS.items():
        folder, fields = written(tmp_path / spelling, reader, texts)
        found = splits(folder, **fields)
        labels, classes = as_read(reader, texts, names)
        assert found.class_names == classes, spelling
        of = {png(row): unicodedata.normalize("NFC", name) for row, name in enumerate(labels)}
        read = found.train.read(np.arange(len(labels)))
        assert [classes[number] for _, number in read] == [of[image] for image, _ in read]
        assert found.train.labels().tolist() == [number for _, number in read]


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
def test_a_value_is_the_same_class_in_each_format(reader: str, tmp_path: Path):
    for kind, (labels, names) in VALUES.items():
        folder, fields = written(tmp_path / kind, reader, labels)
        texts, classes = [*map(str, labels)], names
        if kind == "whole floats" and reader in UNTYPED:
            classes = ["0.0", "10.0", "2.0"]
        elif kind == "whole floats":
            texts = [text.partition(".")[0] for text in texts]
        found = splits(folder, **fields)
        assert (found.class_names, named(found)[0]) == (classes, texts), kind
    folder, fields = written(tmp_path / "indices", reader, [0, 2, 1])
    found = splits(folder, **fields, classes=("cat", "dog", "emu"))
    assert named(found)[0] == ["cat", "emu", "dog"]
    folder, fields = written(tmp_path / "negative", reader, [1, -1, 1])
    found = splits(folder, **fields, classes=("-1", "1"))
    assert found.train.labels().tolist() == [1, 0, 1]


@pytest.mark.parametrize("reader", [*TYPED, *UNTYPED])
def test_what_is_not_a_label_is_refused_in_one_line(reader: str, tmp_path: Path):
    refused = 0
    for kind, values in WRONG.items():
        labels = values if reader in TYPED else ["" if each is None else each for each in values]
        if reader in UNTYPED and not any(label in ("", "  ", -1, "-1") for label in labels):
            continue  # this is text like any other
        try:
            folder, fields = written(tmp_path / kind, reader, labels)
        except pa.ArrowException:
            continue  # the format has no such column
        with pytest.raises(DataError) as caught:
            splits(folder, **fields)
        assert "label" in str(caught.value), kind
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700
        refused += 1
    assert refused >= (9 if reader in TYPED else 5)


# ------------------------------------------------------------------ several files


def write_list(path: Path, labels: Sequence[str]) -> None:
    """A CSV of images in the parent folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in range(len(labels)):
        (path.parents[1] / f"{row}.png").write_bytes(png(row))
    rows = [f"../{row}.png,{label}\n" for row, label in enumerate(labels)]
    path.write_text("".join(["image,label\n", *rows]))


def test_all_files_decide_together_and_an_evaluation_set_is_mapped_by_name(tmp_path: Path):
    lists = tmp_path / "lists"
    for train, evaluation in (
        (["1", "2", "other"], ["1", "2"]),
        (["0123", "123", "0x7b", "1"], ["1", "0123"]),
        (["10", "9", "2"], ["10", "2"]),
    ):
        write_list(lists / "train.csv", train)
        write_list(lists / "val.csv", evaluation)
        assert named(splits(lists)) == (train, evaluation)
    write_list(tmp_path / "more/train-0.csv", ["0", "1", "2"])
    write_list(tmp_path / "more/train-1.csv", ["0", "x"])
    assert named(splits(tmp_path / "more"))[0] == ["0", "1", "2", "0", "x"]
    for first, second, classes in (
        (["01", "02"], ["01", "cat"], ["01", "02", "cat"]),
        (["1", "10"], ["9", "1"], ["1", "9", "10"]),
    ):
        for number, labels in enumerate((first, second)):
            (tmp_path / "tars").mkdir(exist_ok=True)
            as_tar(tmp_path / "tars", labels)
            (tmp_path / "tars/train.TAR").rename(tmp_path / f"tars/train-{number}.tar")
        found = splits(tmp_path / "tars")
        assert (found.class_names, named(found)[0]) == (classes, [*first, *second])


def test_quotation_marks_are_read_as_by_pandas_and_must_be_closed(tmp_path: Path):
    write_list(tmp_path / "lists/train.csv", ["a", "b", "c", '"a', "b", "a"])
    with pytest.raises(DataError, match=r"train\.csv, row 3"):
        splits(tmp_path / "lists")
    write_list(tmp_path / "lists/train.csv", ['5" disk', '"a" big', '"x" "y"', "b"])
    texts = pd.read_csv(tmp_path / "lists/train.csv")["label"].tolist()
    assert named(splits(tmp_path / "lists"))[0] == texts == ['5" disk', "a big", 'x "y"', "b"]


# ------------------------------------------------------------------ lists of labels, typed files


def write_named(path: Path, column: str, rows: Sequence[Any], feature: Any) -> None:
    """A Parquet file with a Hugging Face feature."""
    table = pa.table({"image": [png(row) for row in range(len(rows))], column: rows})
    metadata = {"huggingface": json.dumps({"info": {"features": {column: feature}}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)


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
