"""Data sets of Hugging Face: what `datasets` resolves, and what is split on purpose otherwise."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from split_checks import Parts, found_at, of_datasets, of_ours, parts_of, write

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import open_data_set
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.errors import DataError, PreflightError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


DIFFERENT: dict[str, tuple[Sequence[str], str, Parts | str]] = {
    # name: (files, what datasets does, ours: files by split, or the error)
    "case is ignored": (
        ("Train-0.parquet", "TEST-0.parquet"),
        "all is training data",
        {"train": {"Train-0.parquet"}, "test": {"TEST-0.parquet"}},
    ),
    "the inner folder names the split": (
        ("train/train/0.parquet", "train/val/0.parquet"),
        "train/val is in both splits",
        {"train": {"train/train/0.parquet"}, "validation": {"train/val/0.parquet"}},
    ),
    "a name of two splits names none": (
        ("train_test/train/0.parquet", "train_test/test/0.parquet"),
        "all files are in both splits",
        {"train": {"train_test/train/0.parquet"}, "test": {"train_test/test/0.parquet"}},
    ),
    "what lies beside train under a longer name": (
        ("train-00000-of-00001.parquet", "train_extra-00000-of-00001.parquet"),
        "all is training data",
        {
            "train": {"train-00000-of-00001.parquet"},
            "train-extra": {"train_extra-00000-of-00001.parquet"},
        },
    ),
    "train by file, test by folder": (
        ("train.parquet", "test/0.parquet"),
        "there is no training data",
        {"train": {"train.parquet"}, "test": {"test/0.parquet"}},
    ),
    "Hive's folders": (
        ("split=train/0.parquet", "split=train/year=2020/1.parquet", "split=test/0.parquet"),
        "they are merged",
        {
            "train": {"split=train/0.parquet", "split=train/year=2020/1.parquet"},
            "test": {"split=test/0.parquet"},
        },
    ),
    "several configs without a README.md": (
        ("plain_text/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet"),
        "they are merged",
        "several data sets, each with its own splits: other, plain_text",
    ),
    "several data sets by their names": (
        ("cifar-train.parquet", "mnist-train.parquet", "mnist-test.parquet"),
        "they are merged",
        "file names of the train split belong to several data sets",
    ),
}


@pytest.mark.parametrize("layout", DIFFERENT)
def test_intentional_differences_from_the_splits_of_datasets(layout: str, tmp_path: Path):
    files, _, expected = DIFFERENT[layout]
    root = write(tmp_path / "root", *files)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            of_ours(root)
        assert of_datasets(root)
    else:
        ours = of_ours(root)
        assert ours == expected
        assert of_datasets(root) != ours


TWO_CONFIGS = """---
license: mit
configs:
- config_name: plain
  data_files:
  - split: train
    path: one/train-*
  - split: test
    path: [one/test-*]
- config_name: other
  data_files:
  - split: train
    path: two/*.parquet
---
# A data set
"""


CARD_FILES = ("one/train-0.parquet", "one/test-0.parquet", "two/a.parquet", "two/b.parquet")


def card(configs: str) -> str:
    return f"---\nconfigs:\n{configs}---\n"


def test_a_readme_with_configs_is_resolved_by_datasets(tmp_path: Path):
    root = write(tmp_path / "root", *CARD_FILES, "train.parquet", readme=TWO_CONFIGS)
    for name in (*CARD_FILES, "README.md"):
        fsspec.filesystem("memory").pipe(f"/card/{name}", (root / name).read_bytes())
    for source in (str(root), "memory://card"):
        found = open_data_set(source, "data.source", DataConfig(config="plain"))
        assert found.splits == {"train": ["one/train-0.parquet"], "test": ["one/test-0.parquet"]}
        assert "the config other is not used" in found.notes
    assert of_ours(root, "other") == {"train": {"two/a.parquet", "two/b.parquet"}}
    default = write(root, readme=TWO_CONFIGS.replace("other", "default"))
    assert of_ours(default) == {"train": {"two/a.parquet", "two/b.parquet"}}
    folder = write(root, readme=card("- config_name: x\n  data_dir: two\n"))
    assert of_ours(folder) == {"train": {"two/a.parquet", "two/b.parquet"}}


def test_several_configs_without_a_default_are_refused(tmp_path: Path):
    root = write(tmp_path / "root", *CARD_FILES, readme=TWO_CONFIGS)
    for source, config, reported in (
        (root, "auto", "has several configs: plain, other. Name one with --data.config"),
        (root, "plane", "has no config 'plane', only plain, other"),
        (root, "Plain", "has no config 'Plain'"),
        (write(tmp_path / "x", "train.parquet"), "plain", "has no config 'plain'"),
        ("digits", "plain", "has no config"),
        ("torchvision:MNIST", "plain", "has no config"),
    ):
        with pytest.raises(DataError, match=reported):
            found_at(source, config=config)


@pytest.mark.parametrize(
    ("readme", "reported"),
    [
        (card("- [\n"), "cannot resolve its README.md: while parsing"),
        (card("- name: x\n"), "must include `config_name`"),
        (card("- config_name: x\n  data_files: [{split: train}]\n"), "'split' and 'path'"),
        (
            card("- config_name: x\n  data_files: /etc/hos*\n"),
            "No .* data files found in its folder",
        ),
        (card("- config_name: x\n  data_files: {beside}\n"), "README.md names files outside"),
        (card("- config_name: x\n  data_files: s3://x/x.parquet\n"), "README.md: .*s3"),
        (card("- config_name: x\n  data_files: no-*\n"), "No .* data files found"),
        (
            card("- {config_name: x, data_files: [{split: a, path: t*}, {split: b, path: x}]}\n"),
            "specify the files of a split by a glob",
        ),
    ],
)
def test_a_readme_that_datasets_refuses_is_reported(readme: str, reported: str, tmp_path: Path):
    beside = tmp_path / "beside.csv"
    beside.write_text("")
    readme = readme.replace("{beside}", str(beside))
    root = write(tmp_path / "root", "train.parquet", readme=readme)
    with pytest.raises(DataError, match=reported) as caught:
        found_at(root)
    assert "\n" not in str(caught.value)
    assert found_at(root / "train*").train.paths


def test_missing_shards_that_a_readme_selects_are_named(tmp_path: Path):
    files = [f"data/train-0000{number}-of-00005.parquet" for number in (0, 1, 4)]
    readme = "- config_name: x\n  data_files: 'data/train-0000[0-{last}]*'\n"
    root = write(tmp_path / "root", *files, readme=card(readme.format(last=1)))
    assert len(found_at(root).train.paths) == 2
    with pytest.raises(DataError, match=r"1 of 5 shards are missing: data/train-00002-of-00005"):
        found_at(write(root, readme=card(readme.format(last=2))))


def test_several_folders_with_the_same_splits_are_named_or_selected_by_a_glob(tmp_path: Path):
    files = ("a/b/train-0.parquet", "a/b/val-0.parquet", "c/train-0.parquet", "train.parquet")
    root = write(tmp_path, *files)
    with pytest.raises(DataError, match=r"several data sets.*: \., a/b, c"):
        found_at(root)
    assert len(found_at(root / "a/b").train.paths) == 1
    assert len(found_at(root / "**" / "train*.parquet").train.paths) == 3


def test_images_that_a_readme_selects_are_read_by_datasets(tmp_path: Path):
    readme = card("- config_name: x\n  data_files: [{split: train, path: pics/one/**}]\n")
    root = write(tmp_path / "root", "pics/one/a/0.png", "pics/one/b/0.png", readme=readme)
    with pytest.raises(DataError, match="train: only datasets reads its files: use hf:"):
        found_at(root)
    assert parts_of(found_at(root / "pics/one"), root)[0] == {"pics/one"}


def test_what_datasets_loads_by_name_is_read_from_its_arrow_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = [f"{split}/{name}/0.png" for split in ("train", "test") for name in ("cat", "dog")]
    root = write(tmp_path / "root", *files)
    splits = open_splits(DataConfig(source=f"hf:{root}"))
    assert splits.class_names == ["cat", "dog"]
    assert splits.eval_from == "the test split of data.source"
    rows = np.arange(2)
    assert splits.train.labels().tolist() == [0, 1]
    assert [bytes(image) for image, _ in splits.train.read(rows)] == [
        (root / name).read_bytes() for name in files[:2]
    ]
    with pytest.raises(DataError, match="has no config 'x', only default"):
        found_at(f"hf:{root}", config="x")
    with pytest.raises(DataError, match="datasets cannot load it: "):
        found_at(f"hf:{write(tmp_path / 'none', 'x/')}")
    with pytest.raises(PreflightError, match=r"'hf:a/b': datasets cannot load it: .*OfflineMode"):
        found_at("hf:a/b")


def test_an_unreachable_hub_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import HfFileSystem

    def offline(*_: Any, **__: Any) -> None:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except OSError as error:
            raise RuntimeError(str(error)) from error

    monkeypatch.setattr(HfFileSystem, "info", offline)
    reported = r"'hf://datasets/a/b' cannot be reached: .*Name or service not known"
    with pytest.raises(PreflightError, match=reported):
        found_at("hf://datasets/a/b")

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("a/b")

    monkeypatch.setattr(HfFileSystem, "info", missing)
    with pytest.raises(DataError, match="hf auth login"):
        found_at("hf://datasets/a/b")
