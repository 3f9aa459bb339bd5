"""The held-out part of the training rows: which rows, and who reads them."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_files import png, write_parquet
from split_checks import folder, labels_of, lines, splits_of

from raytrain_ddp.config.sections import AugmentConfig, DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.splits import held_out
from raytrain_ddp.errors import ConfigError, DataError

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def pictures(root: Path, rows: int = 60, classes: int = 3) -> Path:
    """Parquet of different pictures, of classes 0, 0, 0, 1, 0, 0, 0, 1, ... 2."""
    labels = [0 if row % 4 else row // 4 % classes for row in range(rows)]
    columns = {"image": [png(row) for row in range(rows)], "label": labels}
    write_parquet(root / "train.parquet", columns)
    return root


def images_of(source: Any) -> list[bytes]:
    return [image for image, _ in source.read(np.arange(source.blocks.sum()))]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=300),
    st.floats(0.01, 0.99),
    st.integers(0, 2**31),
)
def test_each_class_gives_its_share_and_keeps_at_least_one_row(
    labels: list[int], part: float, seed: int
):
    rows = np.array(labels)
    of_class = np.bincount(rows)
    try:
        held = held_out(rows, part, seed)
    except DataError:
        most = np.minimum(np.floor(of_class * part) + 1, of_class - 1)[of_class > 0]
        assert round(part * len(rows)) == 0 or most.max() == 0
        return
    assert held.tolist() == sorted(set(held.tolist()))
    assert held.tolist() == held_out(rows, part, seed).tolist()
    counts = np.bincount(rows[held], minlength=len(of_class))
    assert (np.abs(counts - of_class * part) < 1 + 1e-6)[of_class > 1].all()
    assert ((of_class - counts)[of_class > 0] >= 1).all()
    assert len(held) <= max(round(part * len(rows)), int(np.floor(of_class * part).sum()))


def test_the_held_out_rows_are_frozen_and_spread_over_the_data():
    labels = np.arange(20_000) % 10
    held = held_out(labels, 0.1, 0)
    assert np.bincount(labels[held]).tolist() == [200] * 10
    assert sha256(held.astype("<i8").tobytes()).hexdigest()[:12] == "ca1102c3002a"
    tenths = np.bincount(held // 2000, minlength=10)
    assert tenths.min() > 150
    assert tenths.max() < 250
    other = held_out(labels, 0.1, 1)
    assert 150 < len(np.intersect1d(held, other)) < 260  # as many as expected by chance
    labels = np.repeat([0, 1, 2, 3], [1, 4, 6, 9])  # 0.2: 0.2, 0.8, 1.2, 1.8 of 4 rows
    assert np.bincount(labels[held_out(labels, 0.2, 0)], minlength=4).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_no_row_is_in_both_parts_and_none_is_lost(kind: str, tmp_path: Path):
    source = pictures(tmp_path)
    if kind == "folder":
        source = folder(tmp_path / "set", c0=50, c1=6, c2=4)
    whole, splits = splits_of(source), splits_of(source, holdout=0.2)
    assert splits.eval is not None
    all_rows = Counter(zip(images_of(whole.train), labels_of(whole.train), strict=True))
    parts = [
        Counter(zip(images_of(part), labels_of(part), strict=True))
        for part in (splits.train, splits.eval)
    ]
    assert parts[0] + parts[1] == all_rows
    assert parts[1].total() == 12
    for part in (splits.train, splits.eval):
        assert part.labels().tolist() == labels_of(part)
        assert len({part.where(row) for row in range(int(part.blocks.sum()))}) == part.blocks.sum()
        assert part.blocks.min() >= 1
    marks = {
        splits_of(source, **fields).train.fingerprint()
        for fields in ({}, {"holdout": 0.2}, {"holdout": 0.3}, {"holdout": 0.2, "holdout_seed": 1})
    }
    assert len(marks) == 4
    assert splits.eval.fingerprint() not in marks
    assert "data.holdout" in lines(splits)["evaluation"]


def test_a_holdout_replaces_a_split_with_a_note_unless_one_is_requested(tmp_path: Path):
    pictures(tmp_path)
    write_parquet(tmp_path / "test.parquet", {"image": [png(1)], "label": [1]})
    splits = splits_of(tmp_path, holdout=0.1)
    assert splits.eval is not None
    assert splits.eval.blocks.sum() == 6
    assert "test" in lines(splits)["note"]
    wrong: list[dict[str, Any]] = [{"holdout": part} for part in (-0.1, 1.0, float("nan"))]
    for fields in ({"eval_source": "x"}, {"eval_split": "test"}, *wrong):
        with pytest.raises(ConfigError, match=r"data\.holdout"):
            TrainConfig(data=DataConfig(**{"holdout": 0.1, **fields}))


def test_the_held_out_part_is_not_augmented(tmp_path: Path):
    from raytrain_ddp.tasks.image_classification import ImageClassification

    data = DataConfig(source=str(pictures(tmp_path, rows=80)), holdout=0.2, image_size=8)
    pixels = set()
    for crop in ("random", "none"):
        config = TrainConfig(data=data, batch_size=16, micro_batch=4, augment=AugmentConfig(crop))
        evaluation = ImageClassification(config).eval_data()
        assert evaluation is not None
        for epoch in (0, 1):
            batch = evaluation.batch(Draws(0, epoch, np.arange(evaluation.rows)))
            pixels.add(batch["image"].numpy().tobytes())
    assert len(pixels) == 1
