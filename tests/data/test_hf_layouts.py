"""Layouts of Hugging Face data sets that this package reads by rules of its own."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from split_checks import Parts, below, found_at, of_datasets, of_ours, parts_of, write

from raytrain_ddp.data.discovery.split_names import ROLE_OF
from raytrain_ddp.data.formats.image_folder import FolderImages
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
    "case of folders is ignored": (
        ("Train/0.parquet", "Validation/0.parquet"),
        "all is training data",
        {"train": {"Train/0.parquet"}, "validation": {"Validation/0.parquet"}},
    ),
    "the endings' case is ignored": (
        ("train.PARQUET", "test.parquet"),
        "refused",
        {"train": {"train.PARQUET"}, "test": {"test.parquet"}},
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
    "shards of several names": (
        ("extra-00000-of-00001.parquet", "unsupervised-00000-of-00001.parquet"),
        "all is training data",
        {
            "extra": {"extra-00000-of-00001.parquet"},
            "unsupervised": {"unsupervised-00000-of-00001.parquet"},
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
    "Hive's folders within others": (
        ("year=2020/Split=Training/0.parquet", "year=2020/Split=Val/0.parquet"),
        "they are merged",
        {
            "train": {"year=2020/Split=Training/0.parquet"},
            "validation": {"year=2020/Split=Val/0.parquet"},
        },
    ),
    "Hive's folders by another key": (
        ("subset=train/0.parquet", "subset=dev/0.parquet"),
        "they are merged",
        {"train": {"subset=train/0.parquet"}, "validation": {"subset=dev/0.parquet"}},
    ),
    "Hive's folders of splits of any name": (
        ("split=a/0.parquet", "split=b/0.parquet"),
        "they are merged",
        {"a": {"split=a/0.parquet"}, "b": {"split=b/0.parquet"}},
    ),
    "several configs without a README.md": (
        ("plain_text/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet"),
        "they are merged",
        "several configs: other, plain_text",
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


# ------------------------------------------------------------------ README.md

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


CARDS = {
    # name: (README.md, files, config)
    "of several, one is asked for": (TWO_CONFIGS, CARD_FILES, "plain"),
    "of several, the other is asked for": (TWO_CONFIGS, CARD_FILES, "other"),
    "a default by name": (TWO_CONFIGS.replace("other", "default"), CARD_FILES, None),
    "a default by mark": (
        TWO_CONFIGS.replace("name: other", "name: other\n  default: true"),
        CARD_FILES,
        None,
    ),
    "one config only": (
        card("- config_name: x\n  data_files:\n  - {split: train, path: a/*}\n"),
        ("a/x.parquet", "b/train.parquet"),
        None,
    ),
    "other names of splits": (
        card("- config_name: x\n  data_files:\n  - {split: dev, path: a/**}\n"),
        ("a/b/x.parquet", "a/y.parquet", "z.parquet"),
        None,
    ),
    "files as a list": (
        card("- config_name: x\n  data_files: [a.parquet, b.parquet]\n"),
        ("a.parquet", "b.parquet", "test.parquet"),
        None,
    ),
    "files as one": (
        card("- config_name: x\n  data_files: '**/good-?.parquet'\n"),
        ("a/good-1.parquet", "good-2.parquet", "bad-1.parquet"),
        None,
    ),
    "a folder": (
        card("- config_name: x\n  data_dir: a\n- config_name: y\n  data_dir: b\n"),
        ("a/train.parquet", "a/test.parquet", "b/train.parquet"),
        "x",
    ),
    "a folder and files": (
        card("- config_name: x\n  data_dir: a\n  data_files: '*.parquet'\n"),
        ("a/1.parquet", "b/1.parquet", "for-datasets.parquet"),  # which looks here for the form
        None,
    ),
    "no files of its own": (card("- config_name: x\n"), ("train.parquet", "test.parquet"), None),
    "no configs": ("---\nlicense: mit\n---\n", ("train.parquet", "test.parquet"), None),
    "no YAML": ("# Text\n---\nconfigs: []\n", ("train.parquet", "test.parquet"), None),
}


@pytest.mark.parametrize("layout", CARDS)
def test_the_readme_is_read_as_datasets_reads_it(layout: str, tmp_path: Path):
    readme, files, config = CARDS[layout]
    root = write(tmp_path / "root", *files, readme=readme)
    theirs = of_datasets(root, config)
    assert theirs
    expected = {ROLE_OF.get(split, split): names for split, names in theirs.items()}
    assert of_ours(root, config or "auto") == expected


def test_several_configs_without_a_default_are_refused_by_both(tmp_path: Path):
    root = write(tmp_path / "root", *CARD_FILES, readme=TWO_CONFIGS)
    assert not of_datasets(root)
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
    assert found_at(root, config="plain").notes == ("the config other is not used.",)


@pytest.mark.parametrize(
    ("readme", "reported"),
    [
        (card("- [\n"), "the YAML of README.md is damaged"),
        (card("- name: x\n"), "each with a config_name"),
        ("---\nconfigs: x\n---\n", "must be a list"),
        (card("- config_name: x\n  data_files: [{split: train}]\n"), "a split and a path"),
        (card("- config_name: x\n  data_files: {train: x}\n"), "a split and a path"),
        (card("- config_name: x\n  data_files: ../x.parquet\n"), "is outside the data set"),
        (card("- config_name: x\n  data_files: /x.parquet\n"), "is outside the data set"),
        (card("- config_name: x\n  data_files: s3://x/x.parquet\n"), "is outside the data set"),
        (card("- config_name: x\n  data_dir: /\n"), "is outside the data set"),
        (card("- config_name: x\n  data_files: no-*\n"), "no split to train on .train: none of"),
    ],
)
def test_an_invalid_readme_is_refused(readme: str, reported: str, tmp_path: Path):
    root = write(tmp_path / "root", "train.parquet", readme=readme)
    with pytest.raises(DataError, match=reported):
        found_at(root)


def test_a_folder_is_a_config_if_no_readme_defines_one(tmp_path: Path):
    files = ("a/b/train-0.parquet", "a/b/val-0.parquet", "c/train-0.parquet", "train.parquet")
    root = write(tmp_path / "root", *files)
    for config in ("a/b", "b", "B"):
        train, evaluation = parts_of(found_at(root, config=config), root)
        assert (train, evaluation) == ({files[0]}, {files[1]})
    assert parts_of(found_at(root, config="."), root)[0] == {"train.parquet"}
    with pytest.raises(DataError, match=r"several configs: \., a/b, c"):
        found_at(root)
    assert len(found_at(root / "**" / "train*.parquet").train.paths) == 3


def test_a_config_also_selects_that_of_the_evaluation_source_if_it_exists(tmp_path: Path):
    source = write(tmp_path / "root", *CARD_FILES, readme=TWO_CONFIGS)
    found = found_at(source, eval_source=str(source), config="plain")
    assert found.eval
    assert below(source, found.eval.paths) == {"one/test-0.parquet"}
    plain = write(tmp_path / "plain", "test.parquet")
    assert found_at(source, eval_source=str(plain), config="plain").eval


def test_the_folder_of_a_readme_may_hold_class_folders(tmp_path: Path):
    readme = card(
        "- config_name: x\n  data_files:\n"
        "  - {split: train, path: pics/one/**}\n  - {split: test, path: 'pics/two/*/*.png'}\n"
        "  - {split: odd, path: 'pics/*/x.png'}\n"
    )
    files = ("pics/one/a/0.png", "pics/one/b/0.png", "pics/two/a/0.png")
    root = write(tmp_path / "root", *files, readme=readme)
    assert parts_of(found_at(root), root) == ({"pics/one"}, {"pics/two"})
    with pytest.raises(DataError, match=r"must be FOLDER/\*\*"):
        found_at(root, eval_split="odd")


def test_a_folder_named_only_by_a_readme_is_not_used(tmp_path: Path):
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    test = "  - {split: test, path: 'gone/**'}\n---\n"
    readme = f"{card}  - {{split: train, path: 'train/**'}}\n{test}"
    root = write(tmp_path / "root", "train/a/0.png", readme=readme)
    assert parts_of(found_at(root), root) == ({"train"}, set())
    with pytest.raises(DataError, match=r"'test': .* none of its files exists"):
        found_at(root, eval_split="test")
    write(root, readme=card + test.replace("test", "train"))
    with pytest.raises(DataError, match=r"train.* none of its files exists"):
        found_at(root)
    with pytest.raises(DataError, match=r"gone: cannot be read: No such file or directory\."):
        FolderImages(str(root / "gone"))


@pytest.mark.parametrize("name", ["README.md", "dataset.json", "dataset_dict.json"])
def test_a_readme_that_is_a_broken_symlink_is_refused(name: str, tmp_path: Path):
    root = write(tmp_path / "root", "train/a/0.png")
    (root / name).symlink_to("gone")
    with pytest.raises(DataError, match=f"root': {name}: cannot be read: No such file or dir"):
        found_at(root)


def test_an_unreachable_hub_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import HfFileSystem

    def offline(*_: Any, **__: Any) -> None:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except OSError as error:
            raise RuntimeError(str(error)) from error

    monkeypatch.setattr(HfFileSystem, "info", offline)
    reported = (
        r"'hf://datasets/a/b' cannot be reached: .*Name or service not known.* Check the network, "
        r"or download it \(hf download --repo-type dataset a/b --local-dir DIR\) and use DIR\.$"
    )
    with pytest.raises(PreflightError, match=reported):
        found_at("hf://datasets/a/b")

    def down(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(HfFileSystem, "info", down)
    with pytest.raises(PreflightError, match=r"cannot be reached: .*Network is unreachable"):
        found_at("hf://datasets/a/b")

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("a/b")

    monkeypatch.setattr(HfFileSystem, "info", missing)
    with pytest.raises(DataError, match=r"no such data set, .*hf auth login"):
        found_at("hf://datasets/a/b")
    with pytest.raises(DataError, match=r"no such model: for a data set, use hf://datasets/a/c"):
        found_at("hf://a/c")
