"""From labels in Parquet files, folders, and torchvision sets to classes, and what is reported."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from parquet_files import png, with_class_names, write_parquet
from split_checks import folder, labels_of, lines, splits_of

from raytrain_ddp.config.recipe import dumps, from_dict, to_dict
from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.formats.labels import Labels, name_of
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.splits import FolderImages, open_splits
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import DataError

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def written(path: Path, labels: Any, **options: Any) -> str:
    return write_parquet(path, {"image": [png(0)] * len(labels), "label": labels}, **options)


def opened(path: str, classes: list[str] | None = None) -> ShardImages:
    return ShardImages([path], DataConfig(), classes)


def encoded(values: list[Any], kind: Any) -> Any:
    return pa.array(values, kind).dictionary_encode()


# ------------------------------------------------------------------ kinds of labels

STRINGS = ["dog", "ape", "cat", "ape", "dog"]
WORDS = (["ape", "cat", "dog"], [2, 0, 1, 0, 2])
LABELS: Mapping[str, tuple[Any, list[str], list[int]]] = {
    "string": (pa.array(STRINGS), *WORDS),
    "large_string": (pa.array(STRINGS, pa.large_string()), *WORDS),
    "dictionary of strings": (encoded(STRINGS, pa.string()), *WORDS),
    "dictionary of integers": (encoded([7, 3, 5, 3, 7], pa.int64()), ["3", "5", "7"], WORDS[1]),
    "boolean": (pa.array([True, False, True]), ["False", "True"], [1, 0, 1]),
    "int16 from 1": (pa.array([1, 2, 3], pa.int16()), ["1", "2", "3"], [0, 1, 2]),
    "uint64": (pa.array([2**63, 1], pa.uint64()), ["1", str(2**63)], [1, 0]),
    "two forms of a word": (pa.array([COMPOSED, DECOMPOSED, "b"]), ["b", COMPOSED], [1, 1, 0]),
}


@pytest.mark.parametrize("write_statistics", [True, False])
def test_labels_of_any_kind_are_classes_in_sorted_order(write_statistics: bool, tmp_path: Path):
    for kind, (labels, names, numbers) in LABELS.items():
        path = written(tmp_path / "x.parquet", labels, write_statistics=write_statistics)
        source = opened(path)
        assert source.class_names == names, kind
        assert labels_of(source) == source.labels().tolist() == numbers
        more = "77" if names[0].isdigit() else "more"
        other = opened(path, [*reversed(names), more])  # whatever the order of the classes
        assert other.class_names == [*reversed(names), more]
        assert labels_of(other) == [len(names) - 1 - number for number in numbers]


# ------------------------------------------------------------------ training and evaluation


def test_both_splits_are_mapped_by_name_despite_order_and_absent_classes(tmp_path: Path):
    with_class_names(tmp_path / "train.parquet", ["ape", "bat", "cat"], [0, 1, 2])
    with_class_names(tmp_path / "test.parquet", ["cat", "ape"], [0, 1, 0])
    assert labels_of(splits_of(tmp_path).eval) == [2, 0, 2]
    written(tmp_path / "test.parquet", ["bat", "bat"])
    splits = splits_of(tmp_path)
    assert labels_of(splits.eval) == [1, 1]
    assert "1 of the 3 classes" in lines(splits)["evaluation"]
    with_class_names(tmp_path / "test.parquet", ["ape", "eel"], [0, 0])
    with pytest.raises(DataError, match="'eel'"):
        splits_of(tmp_path)


def test_the_saved_config_has_the_classes_and_maps_labels_the_same(tmp_path: Path):
    written(tmp_path / "set" / "train.parquet", ["cat", "ape", "dog"])
    written(tmp_path / "set" / "test.parquet", ["dog"])
    checked = check(TrainConfig(data=DataConfig(source=str(tmp_path / "set"))))
    assert checked.data.classes == ("ape", "cat", "dog")
    assert '"ape",\n' in dumps(checked)
    again = from_dict(to_dict(checked))
    other = written(tmp_path / "other" / "test.parquet", ["dog", "cat"])
    assert labels_of(open_splits(replace(again.data, eval_source=other)).eval) == [2, 1]
    chosen = splits_of(tmp_path / "set", classes=("dog", "emu", "cat", "ape"))
    assert labels_of(chosen.train) == [2, 3, 0]
    with pytest.raises(DataError, match=r"row 1: label 'ape'"):
        labels_of(splits_of(tmp_path / "set", classes=("dog", "cat")).train)


# ------------------------------------------------------------------ what is reported or refused


def test_an_unlabeled_test_split_is_ignored_unless_requested(tmp_path: Path):
    """Parquet's is ignored in test_splits.py."""
    folder(tmp_path / "train", a=2, b=2)
    folder(tmp_path, test=3)
    splits = splits_of(tmp_path)
    assert splits.eval is None
    assert "test" in lines(splits)["note"]
    with_class_names(tmp_path / "test.parquet", ["a", "b"], [-1, -1])
    for test in (tmp_path / "test", tmp_path / "test.parquet"):
        with pytest.raises(DataError, match=str(test)):
            splits_of(tmp_path / "train", eval_source=str(test))


def test_unreadable_image_files_are_bad_records_and_devices_do_not_block(tmp_path: Path):
    folder(tmp_path, a=1, b=1)
    (tmp_path / "a" / "device.png").symlink_to(os.devnull)
    (tmp_path / "a" / "lost.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "ring.png").symlink_to(tmp_path / "a" / "ring.png")
    source = FolderImages(str(tmp_path))
    assert source.fingerprint()
    images = [type(image) for image, _ in source.read(np.arange(6))]
    assert images == [bytes, BadRecord, BadRecord, BadRecord, BadRecord, bytes]
    (tmp_path / "b" / "0.png").unlink()  # it was there when the folder was listed
    assert isinstance(source.read(np.array([5]))[0][0], BadRecord)
    for target in ("nowhere", "c"):  # even to itself
        (tmp_path / "c").symlink_to(tmp_path / target)
        with pytest.raises(DataError, match=str(tmp_path / "c")):
            FolderImages(str(tmp_path))
        (tmp_path / "c").unlink()


# ------------------------------------------------------------------ files written by `datasets`


@pytest.mark.parametrize("kind", ["string", "ClassLabel", "bool", "int from 1"])
def test_parquet_written_by_datasets_has_the_classes_of_datasets(kind: str, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    feature = {
        "string": datasets.Value("string"),
        "ClassLabel": datasets.ClassLabel(names=["dog", "ape"]),
        "bool": datasets.Value("bool"),
        "int from 1": datasets.Value("int32"),
    }[kind]
    values = {"string": ["dog", "ape"], "ClassLabel": [1, 0], "bool": [True, False]}
    labels = values.get(kind, [2, 1]) * 3
    images = [{"bytes": png(number), "path": None} for number in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    theirs = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    theirs.to_parquet(str(tmp_path / "train.parquet"))
    ours = splits_of(tmp_path)
    if kind != "ClassLabel":
        theirs = theirs.class_encode_column("label")
    assert ours.class_names == theirs.features["label"].names
    assert labels_of(ours.train) == theirs["label"][:]


def test_an_ambiguous_or_inexact_number_is_no_class() -> None:
    assert isinstance(Labels(["001", "02"]).number(1), str)
    assert [Labels(["1", "0", "True"]).number(label) for label in (1, True, 1.0)] == [0, 2, 0]
    assert name_of(2.0**53) is None  # 2**53 + 1 is the same float
    assert name_of(2.0**53 - 1) == str(2**53 - 1)
