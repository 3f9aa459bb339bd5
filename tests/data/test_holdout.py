"""The held-out part of the training rows: which rows, and who reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parquet_files import png, write_parquet
from processes import Group
from split_checks import folder, labels_of, lines, splits_of

from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
from raytrain_ddp.data.formats.row_group_cache import RowGroupCache
from raytrain_ddp.data.holdout import HoldoutRows, held_out
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan
from raytrain_ddp.errors import ConfigError, DataError


def pictures(root: Path, rows: int = 60, classes: int = 3) -> Path:
    """Parquet of different pictures, of classes 0, 0, 0, 1, 0, 0, 0, 1, ... 2."""
    labels = [0 if row % 4 else row // 4 % classes for row in range(rows)]
    columns = {"image": [png(row) for row in range(rows)], "label": labels}
    write_parquet(root / "train.parquet", columns)
    return root


def images_of(source: Any) -> list[bytes]:
    return [image for image, _ in source.read(np.arange(source.blocks.sum()))]


# ------------------------------------------------------------------ which rows


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


def test_rows_of_small_classes_go_to_the_largest_remainders():
    labels = np.repeat([0, 1, 2, 3], [1, 4, 6, 9])  # 0.2: 0.2, 0.8, 1.2, 1.8 of 4 rows
    assert np.bincount(labels[held_out(labels, 0.2, 0)], minlength=4).tolist() == [0, 1, 1, 2]
    with pytest.raises(DataError, match=r"data\.holdout = 0\.1 holds out none of the 3 rows"):
        held_out(np.array([0, 1, 2]), 0.1, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 9))
def test_the_two_parts_contain_every_row_once(flags: list[bool], block: int):
    held = HoldoutRows(np.flatnonzero(flags), "")
    rows = len(flags)
    left = held.of(np.arange(rows - len(held.rows)), True)
    both = np.concatenate([left, held.of(np.arange(len(held.rows)), False)])
    assert np.sort(both).tolist() == list(range(rows))
    assert left.tolist() == np.flatnonzero(~np.array(flags)).tolist()
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        assert held.used(start, stop, False).tolist() == flags[start:stop]
        assert held.used(start, stop, True).tolist() == [not flag for flag in flags[start:stop]]


# ------------------------------------------------------------------ any source


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_no_row_is_in_both_parts_and_none_is_lost(kind: str, tmp_path: Path):
    source = pictures(tmp_path)
    if kind == "folder":
        for label, count in enumerate((50, 6, 4)):
            folder(tmp_path / "set", **{f"c{label}": count})
        source = tmp_path / "set"
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
    assert lines(splits)["evaluation"].endswith("0.2 of the training set (data.holdout)")


def test_a_torchvision_set_without_splits_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from torchvision import datasets

    class Whole:
        """Like EuroSAT."""

        classes = ("cat", "dog")

        def __init__(self, root: str, download: bool = False) -> None:
            self.targets = [0, 1] * 10

        def __len__(self) -> int:
            return 20

        def __getitem__(self, row: int) -> Any:
            return f"picture {row}", self.targets[row]

    monkeypatch.setattr(datasets, "Whole", Whole, raising=False)
    monkeypatch.setattr(datasets, "__all__", (*datasets.__all__, "Whole"))
    source, root = "torchvision:Whole", str(tmp_path)
    with pytest.raises(ConfigError, match=r"--data\.holdout 0\.1"):
        splits_of(source, root=root)
    splits = splits_of(source, root=root, holdout=0.2)
    assert splits.eval is not None
    assert sorted(labels_of(splits.eval)) == [0, 0, 1, 1]
    assert sorted(images_of(splits.eval) + images_of(splits.train)) == sorted(
        f"picture {row}" for row in range(20)
    )


def test_a_holdout_replaces_a_split_with_a_note_unless_one_is_requested(tmp_path: Path):
    pictures(tmp_path)
    columns = {"image": [png(1)], "label": [1]}
    write_parquet(tmp_path / "test.parquet", columns)
    splits = splits_of(tmp_path, holdout=0.1)
    assert splits.eval is not None
    assert splits.eval.blocks.sum() == 6
    assert "is not used" in lines(splits)["note"]
    for fields in ({"eval_source": "x"}, {"eval_split": "test"}):
        said = r"data\.holdout = 0\.1: already provides the evaluation data"
        with pytest.raises(ConfigError, match=said):
            DataConfig(holdout=0.1, **fields)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"data\.holdout"):
            DataConfig(holdout=wrong)


def test_row_groups_are_read_once_per_part_and_evicted(tmp_path: Path):
    rows, plan = 160, Plan(120, slots=3, micro_batch=5)
    random = np.random.default_rng(0)
    columns = {"image": [random.bytes(30_000) for _ in range(rows)], "label": [0, 1] * 80}
    write_parquet(tmp_path / "x.parquet", columns, use_dictionary=False)
    splits = splits_of(tmp_path, holdout=0.25, memory_mib=1)  # of 4.8
    source: Any = splits.train
    assert source.blocks.sum() == 120
    for epoch in range(2):
        order = EpochOrder(source.blocks, "block", 7, epoch, 2)
        with ThreadPoolExecutor(3) as pool:
            parts = [order.read(*plan.span(k, j)) for k in range(8) for j in range(3)]
            assert all(len(part) for part in pool.map(source.read, parts))
    groups: RowGroupCache = source._source._groups
    loads, kept_bytes = groups.loads, groups._bytes
    source.close()
    assert loads <= 2.5 * len(source.blocks)  # twice, and those that lanes share on a busy machine
    assert (
        kept_bytes <= 2**20
    )  # read row groups are evicted, although some of their rows are never read


# ------------------------------------------------------------------ any number of ranks


def look(rank: int, size: int, source: str, batch_size: int) -> Mapping[str, Any]:
    """What this rank reads of both parts."""
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.data.loading.loader import TrainLoader
    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.data.order.sample_rng import Draws
    from raytrain_ddp.tasks.image_classification import ImageClassification

    data = DataConfig(source=source, holdout=0.2, image_size=8)
    config = TrainConfig(
        data=data, batch_size=batch_size, micro_batch=4, augment=AugmentConfig(crop="random")
    )
    task = ImageClassification(config)
    train, evaluation = task.train_data(), task.eval_data()
    assert evaluation is not None
    plan = Plan(train.rows, config.slots, 4)
    loader = TrainLoader(
        train, plan, "full", 1, 0, size, rank, LoaderThreads(0, None, 1, 2**20), False
    )
    steps = loader.steps(0, plan.steps_per_epoch)
    seen = [
        int(n) for slots in steps for slot in slots for n in slot.batch["label"][: slot.samples]
    ]
    everything = np.arange(evaluation.rows)

    batch = evaluation.collate(evaluation.source.read(everything), Draws(0, 0, everything))
    return {
        "train": train.source.fingerprint(),
        "eval": evaluation.source.fingerprint(),
        "labels": seen,
        "pixels": sha256(batch["image"].numpy().tobytes()).hexdigest(),
    }


def test_the_held_out_part_is_the_same_for_any_ranks_and_batch_and_is_not_augmented(
    workers: Group, tmp_path: Path
):
    source = str(pictures(tmp_path, rows=80))
    reported = {
        (size, batch): workers(size, look, source, batch)
        for size in (1, 2, 3)
        for batch in (16, 32)
    }
    first = reported[1, 16][0]
    assert len(first["labels"]) == 64
    for seen in reported.values():
        for name in ("train", "eval", "pixels"):
            assert {of_rank[name] for of_rank in seen} == {first[name]}
        assert Counter(label for of_rank in seen for label in of_rank["labels"]) == Counter(
            first["labels"]
        )
