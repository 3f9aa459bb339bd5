"""The output of `save_to_disk` of Hugging Face `datasets`, compared with `load_from_disk`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from parquet_files import png
from PIL import Image
from split_checks import labels_of, lines, splits_of

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.epoch_order import EpochOrder
from raytrain_ddp.errors import DataError

CLASSES = ["ant", "bee", "cow"]
FEATURES = datasets.Features(
    {
        "id": datasets.Value("int64"),
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=CLASSES),
    }
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def rows(ids: range, features: Any = FEATURES, **columns: Any) -> Any:
    images = [{"bytes": png(row), "path": f"{row}.png"} for row in ids]
    return datasets.Dataset.from_dict(
        {"id": [*ids], "image": images, "label": [row % 3 for row in ids], **columns},
        features=features,
    )


def pixels(image: Any) -> Any:
    picture = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    return np.asarray(picture.convert("RGB")).tolist()


def test_a_saved_data_set_has_the_rows_that_load_from_disk_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        datasets.config, "ARROW_RECORD_BATCH_SIZE_FOR_IMAGE_DATASETS", 5, raising=False
    )
    chosen = rows(range(60)).shuffle(seed=0).select(range(40))  # through an index
    chosen.save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "cache-0123456789abcdef.arrow").write_bytes(b"left by map()")
    source = splits_of(tmp_path / "saved").train
    theirs = datasets.load_from_disk(str(tmp_path / "saved"))
    assert source.class_names == theirs.features["label"].names
    assert source.labels().tolist() == labels_of(source) == theirs["label"]
    order = EpochOrder(source.blocks, "full", 0, 0).read(0, 40)
    assert sorted(order.tolist()) == [*range(40)]
    for row, (image, label) in zip(order.tolist(), source.read(order), strict=True):
        assert image == png(theirs[row]["id"])
        assert pixels(image) == pixels(theirs[row]["image"])
        assert label == theirs[row]["label"]
    assert source.where(39).endswith("data-00002-of-00003.arrow, row 12")


def test_a_saved_dict_has_the_splits_of_datasets(tmp_path: Path):
    parts = {
        "train": range(9),
        "validation": range(9, 15),
        "test": range(15, 18),
        "odd one": range(3),
    }
    saved = datasets.DatasetDict({name: rows(ids) for name, ids in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    opened = splits_of(tmp_path / "saved")
    assert (
        lines(opened)["evaluation"] == "6 images of 3 classes: the validation split of data.source"
    )
    assert (
        "the test split (1 file) is not used: the run is evaluated on validation." in opened.notes
    )
    for name, ids in parts.items():
        source = splits_of(tmp_path / "saved", train_split=name, eval_split="none").train
        assert [image for image, _ in source.read(np.arange(len(ids)))] == list(map(png, ids))
    alone = splits_of(tmp_path / "saved/train", holdout=0.4)
    assert alone.eval is not None
    with pytest.raises(DataError, match=r"what save_to_disk wrote is in saved, saved/odd one"):
        splits_of(tmp_path)
    with pytest.raises(DataError, match="has no config"):
        splits_of(tmp_path / "saved", config="x")


def test_labels_may_be_of_any_kind_and_columns_of_any_name(tmp_path: Path):
    names = ["é", "a", "é", "b"]
    image = datasets.Features({"img": datasets.Image(), "kind": datasets.Value("string")})
    pictures = [{"bytes": png(row), "path": None} for row in range(4)]
    datasets.Dataset.from_dict({"img": pictures, "kind": names}, features=image).save_to_disk(
        tmp_path / "x"
    )
    opened = splits_of(tmp_path / "x", image_column="img", label_column="kind")
    assert opened.class_names == ["a", "b", "é"]
    assert labels_of(opened.train) == [2, 0, 2, 1]
    with pytest.raises(
        DataError, match=r"data-00000-of-00001\.arrow: no column 'image' among img, kind"
    ):
        splits_of(tmp_path / "x")


def test_an_image_that_is_null_is_a_bad_record_and_a_bad_label_is_named(tmp_path: Path):
    plain = datasets.Features({**FEATURES, "label": datasets.Value("int64")})
    images = [{"bytes": png(0), "path": None}, None, {"bytes": png(2), "path": None}]
    columns = {"image": images, "label": [0, 1, 0]}
    rows(range(3), plain, **columns).save_to_disk(tmp_path / "x")
    with pytest.raises(DataError, match="row 1: not a readable image: the image is null"):
        splits_of(tmp_path / "x")
    records = splits_of(tmp_path / "x", bad_records="skip").train.read(np.arange(3))
    assert [isinstance(image, BadRecord) for image, _ in records] == [False, True, False]
    for wrong, reported in ((None, "label is null"), (-1, "label -1 is not in the range 0 to 1")):
        rows(range(3), plain, **{**columns, "label": [0, 1, wrong]}).save_to_disk(
            tmp_path / f"{wrong}"
        )
        with pytest.raises(DataError, match=rf"data-00000-of-00001\.arrow, row 2: {reported}"):
            splits_of(tmp_path / f"{wrong}")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


BROKEN: Mapping[str, tuple[str, Callable[[Path], object], str]] = {
    "a truncated file": ("data-00000-of-00001.arrow", cut, "not a readable Arrow file"),
    "no Arrow file": (
        "data-00000-of-00001.arrow",
        lambda p: p.write_bytes(b"hello"),
        "not a readable Arrow",
    ),
    "an empty file": (
        "data-00000-of-00001.arrow",
        lambda p: p.write_bytes(b""),
        "not a readable Arrow",
    ),
    "a missing file": ("data-00000-of-00001.arrow", Path.unlink, "no such file"),
    "damaged JSON": ("state.json", cut, "state.json is damaged"),
    "other JSON": (
        "state.json",
        lambda p: p.write_text('{"_data_files": [1]}'),
        "state.json is damaged",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_saved_data_set_is_named_with_its_file(kind: str, tmp_path: Path):
    rows(range(6)).save_to_disk(tmp_path / "x")
    name, make, reported = BROKEN[kind]
    make(tmp_path / "x" / name)
    with pytest.raises(DataError, match=reported) as caught:
        splits_of(tmp_path / "x")
    assert name in str(caught.value)


def test_an_unrelated_state_json_next_to_images_is_ignored(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(png(0))
    (tmp_path / "state.json").write_text("{}")
    assert splits_of(tmp_path).class_names == ["a", "b"]


def test_a_split_without_its_state_is_named(tmp_path: Path):
    datasets.DatasetDict(train=rows(range(3)), test=rows(range(3))).save_to_disk(tmp_path / "x")
    (tmp_path / "x/test/state.json").unlink()
    with pytest.raises(DataError, match=r"test/state\.json is missing"):
        splits_of(tmp_path / "x")
    (tmp_path / "x/dataset_dict.json").write_text(json.dumps(["train"]))
    with pytest.raises(DataError, match=r"dataset_dict\.json is damaged"):
        splits_of(tmp_path / "x")


def test_an_invalid_offset_is_an_error_and_not_a_crash(tmp_path: Path):
    rows(range(6)).save_to_disk(tmp_path / "x")
    path = tmp_path / "x/data-00000-of-00001.arrow"
    content = bytearray(path.read_bytes())
    size = len(png(0))
    at = content.index(np.array([0, size, size + len(png(1))], np.int32).tobytes()) + 4
    content[at : at + 4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)
    source = splits_of(tmp_path / "x").train
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow, row group 0: cannot be read"):
        source.read(np.arange(6))


def test_the_fingerprint_depends_on_the_content(tmp_path: Path):
    prints = []
    for name, ids in (("a", range(6)), ("b", range(6)), ("c", range(1, 7))):
        rows(ids).save_to_disk(tmp_path / name)
        prints.append(splits_of(tmp_path / name).train.fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_the_arrow_files_of_the_cache_of_datasets_are_read_by_their_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    files = {}
    for split, ids in (("train", range(9)), ("test", range(3))):
        rows(ids).to_parquet(tmp_path / f"{split}.parquet")
        files[split] = str(tmp_path / f"{split}.parquet")
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    (folder,) = {path.parent for path in (tmp_path / "cache").rglob("*.arrow")}
    opened = splits_of(folder)
    assert opened.class_names == CLASSES
    assert [image for image, _ in opened.train.read(np.arange(9))] == list(map(png, range(9)))
    assert opened.eval_from == "the test split of data.source"
