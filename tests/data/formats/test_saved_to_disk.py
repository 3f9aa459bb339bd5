"""The output of `save_to_disk` of Hugging Face `datasets`, compared with `load_from_disk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_files import png
from split_checks import labels_of, splits_of

from raytrain_ddp.data.order import EpochOrder
from raytrain_ddp.errors import DataError

datasets = pytest.importorskip("datasets")

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
    order = EpochOrder(source.blocks, "full", 0, 0).at(np.arange(40))
    for row, (image, label) in zip(order.tolist(), source.read(order), strict=True):
        assert image == png(theirs[row]["id"])
        assert label == theirs[row]["label"]
    assert source.where(39).endswith("data-00002-of-00003.arrow, row 12")


def test_a_saved_dict_has_the_splits_of_datasets(tmp_path: Path):
    parts = {"train": range(9), "validation": range(9, 15), "test": range(15, 18), "odd": range(3)}
    saved = datasets.DatasetDict({name: rows(ids) for name, ids in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    opened = splits_of(tmp_path / "saved")
    assert opened.eval is not None
    assert int(opened.eval.blocks.sum()) == 6
    for name, ids in parts.items():
        source = splits_of(tmp_path / "saved", train_split=name, eval_split="none").train
        assert [image for image, _ in source.read(np.arange(len(ids)))] == list(map(png, ids))
    (tmp_path / "saved/test/state.json").unlink()
    with pytest.raises(DataError, match=r"test/state\.json"):
        splits_of(tmp_path / "saved")
    (tmp_path / "saved/dataset_dict.json").write_text('["train"]')
    with pytest.raises(DataError, match=r"dataset_dict\.json"):
        splits_of(tmp_path / "saved")


def test_a_broken_saved_data_set_is_named_with_its_file(tmp_path: Path):
    rows(range(6)).save_to_disk(tmp_path / "x")
    for name in ("data-00000-of-00001.arrow", "state.json"):
        path = tmp_path / "x" / name
        content = path.read_bytes()
        other = b'{"_data_files": [1]}' if name == "state.json" else b""
        for broken in (content[: len(content) * 2 // 3], b"hello", other):
            path.write_bytes(broken)
            with pytest.raises(DataError, match=name):
                splits_of(tmp_path / "x")
        path.write_bytes(content)
    arrow = tmp_path / "x/data-00000-of-00001.arrow"
    offset = bytearray(arrow.read_bytes())  # one that points beyond the file: no crash
    size = len(png(0))
    at = offset.index(np.array([0, size, size + len(png(1))], np.int32).tobytes()) + 4
    offset[at : at + 4] = (2**31 - 1).to_bytes(4, "little")
    arrow.write_bytes(offset)
    source = splits_of(tmp_path / "x").train
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow, row group 0"):
        source.read(np.arange(6))
    arrow.unlink()
    with pytest.raises(DataError, match=arrow.name):
        splits_of(tmp_path / "x")
