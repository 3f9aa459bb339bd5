"""Which files a run is trained and evaluated on, compared with what `datasets` finds."""

from __future__ import annotations

import errno
import io
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.discovery.data_check import Found, locate
from raytrain_ddp.data.discovery.discovery import open_data_set
from raytrain_ddp.data.discovery.split_names import ROLE_OF
from raytrain_ddp.data.formats.image_folder import FolderImages
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.display.formatting import format_data
from raytrain_ddp.errors import ConfigError, DataError, PreflightError

Parts = dict[str, set[str]]


def _encoded(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (number * 40, 0, 0)).save(content, "png")
    return content.getvalue()


PICTURES = [_encoded(number) for number in range(4)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write(root: Path, *names: str, readme: str = "") -> Path:
    """Files of the kinds that their names say, with one row each."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif name.lower().endswith(".parquet"):
            images = [{"bytes": PICTURES[0], "path": None}]
            pq.write_table(pa.table({"image": images, "label": [0]}), path)
        elif name.lower().endswith((".png", ".jpg")):
            path.write_bytes(PICTURES[len(name) % 4])
        else:
            path.write_text("other\n")
    if readme:
        (root / "README.md").write_text(readme)
    return root


def found_at(source: Path | str, **fields: Any) -> Found:
    return locate(DataConfig(source=str(source), **fields))


def below(root: Path, paths: Sequence[str]) -> set[str]:
    return {str(Path(path).relative_to(root.resolve())) for path in paths}


def parts_of(found: Found, root: Path) -> tuple[set[str], set[str]]:
    return below(root, found.train.paths), below(root, found.eval.paths if found.eval else ())


def of_datasets(root: Path, config: str | None = None) -> Parts:
    """Files by split, as `load_dataset` would read them; empty if it refuses."""
    cache = str(root.parent / "cache")
    try:
        builder = datasets.load_dataset_builder(str(root), config, cache_dir=cache)
    except (ValueError, FileNotFoundError):
        return {}
    files = builder.config.data_files
    return {split: below(root, files[split]) for split in files}


def of_ours(root: Path, config: str = "auto") -> Parts:
    """The same by this package, under the names of `datasets`."""
    found = open_data_set(str(root), "data.source", DataConfig(config=config))
    parts: Parts = {}
    for split, files in found.splits.items():
        name = ROLE_OF.get(split, split or "train")
        parts.setdefault(name, set()).update(below(root, [*map(found.uri_of, files)]))
    return parts


# ------------------------------------------------------------------ splits as in datasets

SHARDS = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
SAME = {
    "sharded": (*SHARDS, "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    "sharded in data": (*(f"data/{name}" for name in SHARDS), "data/test-00000-of-00001.parquet"),
    "any name in data": (
        *(f"data/{split}-00000-of-00001.parquet" for split in ("train", "extra", "test")),
        "data/unsupervised-00000-of-00001.parquet",
    ),
    "one file of any name": ("photos.parquet",),
    "Hive's folders of other columns": ("year=2020/0.parquet", "year=2021/label=cat/0.parquet"),
    "Hive's folders of a flag": ("test=1/0.parquet", "test=0/0.parquet"),
    "a number after a keyword": ("train=0.parquet", "test=0.parquet"),
    "an equals sign after a keyword": ("train_size=224.parquet", "val_size=224.parquet"),
    "files without names of splits": ("a.parquet", "b.parquet", "deep/er/c.parquet"),
    "plain": ("train.parquet", "test.parquet"),
    "val": ("train_1.parquet", "train_2.parquet", "val_1.parquet"),
    "a dot": ("mnist.train.parquet", "mnist.test.parquet"),
    "numbers": ("train2017.parquet", "val2017.parquet"),
    "parts by letters": ("train_a.parquet", "train_b.parquet", "test_a.parquet"),
    "no keyword within a word": ("pretraining.parquet", "latest.parquet"),
    "folders": ("train/0000.parquet", "train/0001.parquet", "test/0000.parquet"),
    "folders in data": ("data/train/0.parquet", "data/validation/0.parquet"),
    "a config's folder": ("plain_text/train/0.parquet", "plain_text/test/0.parquet"),
    "folders within the split": ("train/a/0.parquet", "train/b/0.parquet", "test/a/0.parquet"),
    "the folder counts, not the file": ("train/test-0.parquet", "test/train-0.parquet"),
    "what the folders leave out": ("train/0.parquet", "test/0.parquet", "val_old.parquet"),
    "extra files": ("train.parquet", "test.parquet", "extra.parquet"),
    "extra folder": ("train/0.parquet", "test/0.parquet", "extra/0.parquet"),
    "no split to train on": ("validation.parquet", "test.parquet"),
    "what belongs to no data set": (
        *("train.parquet", "README.md", "LICENSE", ".hidden.parquet", ".cache/train.parquet"),
        *("__MACOSX/train.parquet", "__pycache__/test.parquet", ".ipynb_checkpoints/val.parquet"),
    ),
}


@pytest.mark.parametrize("layout", SAME)
def test_files_are_split_as_datasets_splits_them(layout: str, tmp_path: Path):
    root = write(tmp_path / "root", *SAME[layout])
    theirs, ours = of_datasets(root), of_ours(root)
    assert {split: ours.get(split) for split in theirs} == theirs
    more = ours.keys() - theirs.keys()
    assert not more & {"train", "validation", "test"}, "of no use for a run that names no split"
    if "train" in theirs:
        train, evaluation = parts_of(found_at(root), root)
        assert train == theirs["train"]
        assert evaluation == theirs.get("validation", theirs.get("test", set()))


def test_a_store_and_a_glob_have_the_same_splits_as_the_disk(tmp_path: Path):
    memory = fsspec.filesystem("memory")
    for number, layout in enumerate([*SAME, *DIFFERENT]):
        files = SAME.get(layout) or DIFFERENT[layout][0]
        root = write(tmp_path / str(number), *files)
        for name in files:
            memory.pipe(f"/splits/{number}/{name}", b"other\n")
        try:
            expected = open_data_set(str(root), "data.source", DataConfig()).splits
        except DataError:
            with pytest.raises(DataError, match="several"):
                open_data_set(f"memory://splits/{number}", "data.source", DataConfig())
            continue
        for source in (f"memory://splits/{number}", str(root / "**")):
            assert open_data_set(source, "data.source", DataConfig()).splits == expected, layout


DIFFERENT: dict[str, tuple[Sequence[str], str, Parts | str]] = {
    # name: (files, what datasets does, ours: files by split, or the error)
    "shards of several names": (
        ("extra-00000-of-00001.parquet", "unsupervised-00000-of-00001.parquet"),
        "all is training data",
        {
            "extra": {"extra-00000-of-00001.parquet"},
            "unsupervised": {"unsupervised-00000-of-00001.parquet"},
        },
    ),
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
    "Hive's folders within others": (
        ("year=2020/Split=Training/0.parquet", "year=2020/Split=Val/0.parquet"),
        "they are merged",
        {
            "train": {"year=2020/Split=Training/0.parquet"},
            "validation": {"year=2020/Split=Val/0.parquet"},
        },
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


# ------------------------------------------------------------------ the choice


def test_validation_is_used_and_test_is_named_as_unused(tmp_path: Path):
    files = ("train.parquet", "validation.parquet", "test.parquet", "extra/0.parquet")
    found = found_at(write(tmp_path, *files))
    assert (found.train.name, found.eval and found.eval.name) == ("train", "validation")
    assert found.eval_from == "the validation split of data.source"
    assert set(found.notes) == {
        "the test split (1 file) is not used: the run is evaluated on validation.",
        "the extra split (1 file) is not used.",
    }


def test_unused_files_are_reported_before_the_first_step(tmp_path: Path):
    images = [{"bytes": picture, "path": None} for picture in PICTURES]
    labels = {"train": [0, 1, 0, 1], "validation": [0, 1, 1, 1], "test": [-1] * 4}
    for name, values in labels.items():
        pq.write_table(pa.table({"image": images, "label": values}), tmp_path / f"{name}.parquet")
    lines = format_data(open_splits(DataConfig(source=str(tmp_path))).summary(), "images")
    assert ("evaluation", "4 images of 2 classes: the validation split of data.source") in lines
    unused = "the test split (1 file) is not used: the run is evaluated on validation."
    assert ("note", unused) in lines
    (tmp_path / "validation.parquet").unlink()  # an unlabeled test split is ignored
    opened = open_splits(DataConfig(source=str(tmp_path)))
    assert opened.eval is None
    assert any("not used for evaluation" in note for note in opened.notes)


def test_a_test_split_is_used_if_there_is_no_validation_split(tmp_path: Path):
    found = found_at(write(tmp_path, "train.parquet", "test.parquet"))
    assert found.eval_from == "the test split of data.source"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("fields", "train", "evaluation"),
    [
        ({"train_split": "extra"}, "extra", "val"),
        ({"train_split": "EXTRA", "eval_split": "Test"}, "extra", "test"),
        ({"train_split": "training"}, "train", "val"),  # another word for it
        ({"eval_split": "validation"}, "train", "val"),
        ({"eval_split": "none"}, "train", None),
        ({"train_split": "val"}, "val", "test"),
        ({"eval_split": "train"}, "train", "train"),
    ],
)
def test_a_split_can_be_selected_by_name(
    fields: dict[str, str], train: str, evaluation: str | None, tmp_path: Path
):
    files = ("train.parquet", "val.parquet", "test.parquet", "extra.parquet")
    found = found_at(write(tmp_path, *files), **fields)
    assert (found.train.name, found.eval.name if found.eval else None) == (train, evaluation)
    trained_too = "the run is evaluated on its training data."
    assert (trained_too in found.notes) == (train == evaluation)


@pytest.mark.parametrize(
    ("files", "fields", "reported"),
    [
        (["train.parquet", "val.parquet"], {"train_split": "x"}, "no such split, only train, val"),
        (["train.parquet", "val.parquet"], {"eval_split": "test"}, "no such split, only train"),
        (["train.parquet", "val.parquet"], {"eval_split": "test"}, "such split, only train, val"),
        (["a.parquet"], {"eval_split": "test"}, "has no named splits"),
        (["a.parquet"], {"train_split": "x"}, "has no named splits"),
        (
            ["val.parquet"],
            {},
            "only val. To train on one of them, name it, such as with --data.train-split val",
        ),
        (["extra.parquet", "test.parquet"], {}, "no split to train on, only extra, test"),
        (["train.parquet", "training.parquet"], {}, "several splits to train on: train, training"),
        (["train.parquet", "dev.parquet", "val.parquet"], {}, "several splits to evaluate on"),
        (["train/a/0.png", "train/b/0.png"], {"eval_split": "val"}, "no such split, only train"),
        (["train/a/0.png", "val/"], {"eval_split": "val"}, "cannot be used: it contains no images"),
        (["train/", "val/a/0.png"], {}, "no split to train on .train: it contains no images."),
    ],
)
def test_an_unknown_split_or_config_is_refused(
    files: list[str], fields: dict[str, str], reported: str, tmp_path: Path
):
    with pytest.raises(DataError, match=reported):
        found_at(write(tmp_path, *files), **fields)


def test_an_evaluation_source_has_its_own_splits(tmp_path: Path):
    source = write(tmp_path / "a", "train.parquet", "val.parquet")
    other = write(tmp_path / "b", "train.parquet", "test.parquet", "dev.parquet", "extra.parquet")
    found = found_at(source, eval_source=str(other))
    assert found.eval
    assert (found.eval.name, found.eval_from) == ("dev", "the dev split of data.eval_source")
    assert set(found.notes) == {
        "the val split of data.source (1 file) is not used: the run is evaluated on "
        "data.eval_source.",
        "the extra split of data.eval_source (1 file) is not used.",
        "the test split of data.eval_source (1 file) is not used: the run is evaluated on dev.",
    }
    found = found_at(source, eval_source=str(other), eval_split="extra", train_split="val")
    assert (found.train.name, found.eval and found.eval.name) == ("val", "extra")
    for eval_source in (source / "train.parquet", write(tmp_path / "c", "x.parquet")):
        assert found_at(source, eval_source=str(eval_source)).eval
    with pytest.raises(DataError, match=r"data\.eval_source .* has no such split, only dev"):
        found_at(source, eval_source=str(other), eval_split="x")
    odd = write(
        tmp_path / "d",
        "x.csv",
        readme=card(
            "- config_name: a\n  data_files: [{split: x, path: x.csv}, {split: y, path: x.csv}]\n"
        ),
    )
    with pytest.raises(DataError, match="has no split to evaluate on, only x, y"):
        found_at(source, eval_source=str(odd))
    with pytest.raises(ConfigError, match=r"conflicts with data\.eval_source"):
        found_at(source, eval_source=str(other), eval_split="none")


def test_a_config_also_selects_that_of_the_evaluation_source_if_it_exists(tmp_path: Path):
    source = write(tmp_path / "root", *CARD_FILES, readme=TWO_CONFIGS)
    found = found_at(source, eval_source=str(source), config="plain")
    assert found.eval
    assert below(source, found.eval.paths) == {"one/test-0.parquet"}
    plain = write(tmp_path / "plain", "test.parquet")
    assert found_at(source, eval_source=str(plain), config="plain").eval


def test_torchvision_sets_and_digits_accept_split_names():
    found = found_at("torchvision:SVHN", train_split="extra", eval_split="test")
    assert (found.train.name, found.eval and found.eval.name) == ("extra", "test")
    found = found_at("torchvision:SVHN")
    assert (found.train.name, found.eval and found.eval.name) == ("", "")
    assert found_at("torchvision:SVHN", eval_split="none").eval is None
    assert found_at("digits", train_split="test", eval_split="train").train.name == "test"
    with pytest.raises(DataError, match="has no such split, only test, train"):
        found_at("digits", eval_split="validation")


# ------------------------------------------------------------------ shards


def shards(split: str, *numbers: int, of: int) -> list[str]:
    return [f"{split}-{number:05d}-of-{of:05d}.parquet" for number in numbers]


@pytest.mark.parametrize(
    ("files", "reported"),
    [
        (shards("train", 0, 2, of=3), "1 of 3 shards are missing: train-00001-of-00003.parquet"),
        ([*shards("train", 0, of=1), *shards("val", 1, of=2)], "missing: val-00000-of-00002"),
        (["data/" + name for name in shards("train", 1, of=2)], "missing: data/train-00000-of"),
        ([*shards("train", 0, of=1), *shards("train", 0, 1, of=2)], "are not one set of shards"),
        (["train-00000-of-00002-ab.parquet", *shards("train", 0, 1, of=2)], "are not one set"),
        (shards("train", 0, 1, 2, of=2), "train-00002-of-00002.parquet are not one set"),
        (["train_1_of_3.parquet", "train_3_of_3.parquet"], "missing: train_2_of_3.parquet"),
        (["train/x-0-of-2.parquet"], "missing: train/x-1-of-2.parquet"),
        (shards("train", 5, of=99), r"98 of 99 .* and 88 more\. Download"),
    ],
)
def test_missing_and_surplus_shards_are_named(files: list[str], reported: str, tmp_path: Path):
    root = write(tmp_path, *files)
    with pytest.raises(DataError, match=reported):
        found_at(root)
    if len(files) > 1:  # a glob that matches them also matches the missing ones
        with pytest.raises(DataError):
            found_at(root / "**" / "*.parquet")


def test_complete_shard_sets_and_partial_globs_are_accepted(tmp_path: Path):
    files = [*shards("train", 0, 1, 2, of=3), "part-1-of-2.parquet", "val_1_of_1.parquet"]
    root = write(tmp_path, *files)
    assert len(found_at(root).train.paths) == 3  # part is not used, so it may be incomplete
    assert len(found_at(root / "train-0000[02]-*").train.paths) == 2
    assert len(found_at(root / files[0]).train.paths) == 1
    (root / files[1]).unlink()
    assert len(found_at(root / "train-0000[02]-*").train.paths) == 2
    with pytest.raises(DataError, match=r"train-00001-of-00003\.parquet"):
        found_at(root / "train-*")


# ------------------------------------------------------------------ class folders

FOLDERS = {
    # name: (files, train, evaluation)
    "train and val": (["train/a/0.png", "train/b/0.png", "val/a/0.png"], "train", "val"),
    "Train and Test": (["Train/a/0.png", "Train/b/0.png", "Test/a/0.png"], "Train", "Test"),
    "training": (["training/a/0.png", "testing/a/0.png"], "training", "testing"),
    "Validation": (["train/a/0.png", "Validation/a/0.png"], "train", "Validation"),
    "dev": (["train/a/0.png", "dev/a/0.png"], "train", "dev"),
    "Hive's": (
        ["split=train/label=a/0.png", "split=train/label=b/0.png", "split=val/label=a/0.png"],
        "split=train",
        "split=val",
    ),
    "Hive's classes": (["label=apple/0.png", "label=train/0.png", "label=truck/0.png"], ".", None),
    "an equals sign": (
        ["train_size=64/a/0.png", "val_size=64/a/0.png"],
        "train_size=64",
        "val_size=64",
    ),
    "train2017": (["train2017/a/0.png", "val2017/a/0.png"], "train2017", "val2017"),
    "before test": (["train/a/0.png", "val/a/0.png", "test/a/0.png"], "train", "val"),
    "nested": (["train/train/a/0.png", "train/val/a/0.png"], "train/train", "train/val"),
    "in data": (["data/train/a/0.png", "data/val/a/0.png"], "data/train", "data/val"),
    "in images": (["x/images/train/a/0.png", "x/images/val/a/0.png"], "x/images/train", None),
    "named alike": (["seg_train/a/0.png", "seg_test/a/0.png"], "seg_train", "seg_test"),
    "test_set": (["train/a/0.png", "train/b/0.png", "test_set/a/0.png"], "train", "test_set"),
    "twice": (
        ["seg_train/seg_train/a/0.png", "seg_test/seg_test/a/0.png"],
        "seg_train/seg_train",
        "seg_test/seg_test",
    ),
    "no splits": (["a/0.png", "b/0.png"], ".", None),
    "no splits, deeper": (["a/x/0.png", "b/y/0.png"], ".", None),
    "words within class names": (["test tube/0.png", "training shoe/0.png"], ".", None),
    "an empty split": (["train/a/0.png", "val/", "test/a/0.png"], "train", "test"),
    "an empty split with classes": (["train/a/0.png", "val/a/", "test/a/0.png"], "train", "test"),
    "a test split without classes": (["train/a/0.png", "test/0.png"], "train", None),
    "what does not belong to it": (
        [
            *("train/a/0.png", "test/a/0.png", "README.md", "LICENSE", "train/.DS_Store"),
            *(".cache/train/a/0.png", "__MACOSX/train/a/._0.png", ".ipynb_checkpoints/a/0.png"),
        ],
        "train",
        "test",
    ),
}


@pytest.mark.parametrize("layout", FOLDERS)
def test_class_folders_are_split_by_the_folders_above_them(layout: str, tmp_path: Path):
    files, train, evaluation = FOLDERS[layout]
    if layout == "in images":
        evaluation = "x/images/val"
    root = write(tmp_path / "root", *files)
    found = found_at(root)
    assert found.train.kind == "folder"
    assert parts_of(found, root) == ({train}, {evaluation} if evaluation else set())


@pytest.mark.parametrize(
    ("files", "reported"),
    [
        (["train/a/0.png", "train/val/0.png"], "names of splits .train/val|val"),
        (["train/a/0.png", "train/b/0.png", "train/val/a/0.png"], "names of splits"),
        (["train/0.png", "cat/0.png", "dog/0.png"], "no split to train on"),
        (["train/0.png", "test/0.png"], "no split to train on .train: it contains images without"),
        (["cat/train/0.png", "cat/test/0.png", "dog/train/0.png"], "no split|several|names of"),
        (
            ["x/train/a/0.png", "y/train/a/0.png"],
            "several data sets, each .* x, y. Name one with --data",
        ),
        (
            ["x/train/a/0.png", "masks/0.png"],
            "x contains splits, but there are also images in masks",
        ),
        (["val/a/0.png", "val/b/0.png"], "only val. To train"),
        (["test/a/0.png"], "only test. To train"),
        (["train-1/a/0.png", "train-2/a/0.png"], "no split to train on, only train-1, train-2"),
        (["0.png"], "holds images, but no class folders|no class folders"),
        (["train/a/notes.txt"], "neither Parquet files nor class folders"),
    ],
)
def test_folders_that_may_be_splits_or_classes_are_refused(
    files: list[str], reported: str, tmp_path: Path
):
    root = write(tmp_path, *files)
    with pytest.raises(DataError, match=reported):
        FolderImages(found_at(root).train.paths[0])


def test_split_names_are_classes_if_configured(tmp_path: Path):
    root = write(tmp_path, "train/car/0.png", "train/train/0.png", "val/car/0.png")
    with pytest.raises(DataError, match=r"confirm it with --data\.train-split train"):
        found_at(root)
    found = found_at(root, train_split="train")
    assert FolderImages(found.train.paths[0]).class_names == ["car", "train"]
    assert found.eval


@pytest.mark.parametrize("word", [*ROLE_OF, "Train", "val2017", "split=test"])
def test_a_class_may_be_named_like_a_split(word: str, tmp_path: Path):
    root = write(tmp_path, "apple/0.png", f"{word}/0.png", "truck/0.png")
    with pytest.raises(DataError, match=r"--data\.train-split \."):
        found_at(root)
    found = found_at(root, train_split=".")
    assert below(root, found.train.paths) == {"."}
    assert FolderImages(found.train.paths[0]).class_names == sorted(["apple", word, "truck"])
    assert found.eval is None
    other = found_at(write(tmp_path / "other", "a/0.png"), eval_source=str(root), eval_split=".")
    assert other.eval
    assert below(root, other.eval.paths) == {"."}
    with pytest.raises(DataError, match="no such split"):
        found_at(write(tmp_path / "files", "train.parquet", "test.parquet"), train_split=".")


# ------------------------------------------------------------------ what is no data

LEFTOVERS = [
    *(".DS_Store", "._0.png", ".AppleDouble/", ".Spotlight-V100/", ".fseventsd/", "__MACOSX/"),
    *("Thumbs.db", "desktop.ini", "$RECYCLE.BIN/", "System Volume Information/", "~$x.png"),
    *("@eaDir/", "@tmp/", "#recycle/", ".Trash-1000/", "lost+found/", ".nfs00000000000a1b2c.png"),
    *(".ipynb_checkpoints/", "__pycache__/", ".git/", ".NET/", ".svn/", "CVS/", "_gsdata_/"),
    *("@Recently-Snapshot/", "~snapshot/", ".snapshot/", "@SynoResource/", "found.000/"),
    *("RECYCLER/", "Network Trash Folder/", "Temporary Items/"),
]


@pytest.mark.parametrize("name", LEFTOVERS)
def test_leftovers_of_systems_are_noted_and_are_no_data(name: str, tmp_path: Path):
    inside = f"{name}0.png" if name.endswith("/") else name
    folders = write(tmp_path / "folders", "cat/0.png", "dog/0.png", inside, f"cat/{inside}")
    (tmp_path / "folders" / inside).write_bytes(PICTURES[0])
    splits = open_splits(DataConfig(source=str(folders)))
    assert (splits.class_names, int(splits.train.blocks.sum())) == (["cat", "dog"], 2)
    bare = name.rstrip("/")
    assert [note for note in splits.notes if "left by a system" in note and bare in note]
    if name.endswith("/"):
        named = open_splits(DataConfig(source=str(folders), classes=(bare, "cat", "dog")))
        assert int(named.train.blocks.sum()) == 4
        assert not [note for note in named.notes if "left by a system" in note]
    rows = f"{name}0.parquet" if name.endswith("/") else f".{bare}.parquet"
    files = write(tmp_path / "files", "train.parquet", f"sub/{rows}")
    memory = fsspec.filesystem("memory")
    for path in ("train.parquet", f"sub/{rows}"):
        memory.pipe(f"/leftovers/{abs(hash(name))}/{path}", b"")
    for source in (files, f"memory://leftovers/{abs(hash(name))}"):
        found = found_at(source)
        assert [len(files) for files in (found.train.paths,)] == [1]
        assert [note for note in found.notes if "left by a system" in note]
    assert len(found_at(f"{files}/**").train.paths) == 1
    assert len(found_at(files / "sub" / rows, train_split="train").train.paths) == 1


def test_a_glob_of_hidden_files_matches_them(tmp_path: Path):
    files = (".v1.parquet", ".v2.parquet", ".x/a.parquet", "v.parquet", "@eaDir/a.parquet")
    write(tmp_path / "files", *files)
    for name in files:
        fsspec.filesystem("memory").pipe(f"/dots/{name}", b"")
    for source in (str(tmp_path / "files"), "memory://dots"):
        for pattern, expected in (
            (".v*.parquet", 2),
            (".x/*", 1),
            (".*/*", 1),
            ("*", 1),
            ("**", 1),
        ):
            assert len(found_at(f"{source}/{pattern}").train.paths) == expected, pattern


def test_each_unused_file_is_in_one_note(tmp_path: Path):
    files = [f"{split}/{name}/0.png" for split in ("train", "val") for name in ("cat", "dog")]
    extra = ("train/metadata.csv", "notes.txt", "train/cat/notes.txt", "train/0.png", "val/0.png")
    splits = open_splits(DataConfig(source=str(write(tmp_path, *files, *extra))))
    for name, count in (("metadata.csv", 1), (".csv", 1), (".txt", 1), ("images in train", 1)):
        assert sum(name in note for note in splits.notes) == count, splits.notes
    assert [note for note in splits.notes if "2 .txt" in note]


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        (["test/metadata.jsonl"], ""),
        (["train/metadata.jsonl", "test/metadata.jsonl"], "train/metadata.jsonl"),
        (["test.csv"], ""),
        (["test.csv", "train.csv"], "train.csv"),
        (["labels.csv"], "labels.csv"),
        (["labels.csv", "test_labels.csv"], "labels.csv"),
    ],
)
def test_the_list_of_another_split_is_not_recommended(lists: list[str], named: str, tmp_path: Path):
    root = write(tmp_path, "train/0.png", "test/0.png", *lists)
    with pytest.raises(DataError) as caught:
        found_at(root)
    assert [name for name in lists if name in str(caught.value)] == [named][: bool(named)]


ODD_NAMES = ["a\nb", "a\x1b[31mb", "a\x7fb", "a\u2028b", "a\rb", "a\udcffb", "a\tb"]


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_names_with_control_characters_stay_in_one_line(odd: str, tmp_path: Path):
    both = [f"{name}/0.png" for name in ("cat", odd)]
    root = write(tmp_path / "root", *both, f"cat/{odd}.txt", f"{odd}.csv")
    reported = format_data(open_splits(DataConfig(source=str(root))).summary(), "images")
    assert [text for _, text in reported if odd.encode("unicode_escape").decode() in text]
    assert all(text.isprintable() for _, text in reported)
    for source in (write(tmp_path / "empty", "cat/0.png", f"{odd}/x.txt"), f"{tmp_path}/{odd}"):
        with pytest.raises(DataError) as caught:
            open_splits(DataConfig(source=str(source)))
        assert str(caught.value).isprintable()


def test_paths_that_cannot_be_listed_are_named_in_one_line(tmp_path: Path):
    place = write(tmp_path / "deep", "cat/0.png", "dog/0.png") / "cat"
    for _ in range(30):
        place = place / ("d/" * 10)
    place.mkdir(parents=True)
    for source, reported in ((tmp_path / "deep", "levels"), ("a\0b", "no such file or folder")):
        with pytest.raises(DataError, match=reported) as caught:
            found_at(source)
        assert str(caught.value).isprintable()


def test_folders_of_any_name_are_splits_if_configured(tmp_path: Path):
    root = write(tmp_path, "one/a/0.png", "one/b/0.png", "two/a/0.png", "three/a/0.png")
    found = found_at(root, train_split="one", eval_split="two")
    assert parts_of(found, root) == ({"one"}, {"two"})
    assert found.notes == ("the three split (1 folder) is not used.",)


def test_unused_class_folders_are_reported(tmp_path: Path):
    files = ("train/a/0.png", "val/", "test/0.png", "extra/a/0.png", "eval/a/0.png")
    assert set(found_at(write(tmp_path, *files)).notes) == {
        "val is not used: it contains no images.",
        "test is not used: it contains images without class folders.",
        "extra is not used: its name is not the name of a split.",
    }


def test_images_next_to_parquet_files_are_read_only_by_path(tmp_path: Path):
    found = found_at(write(tmp_path, "train.parquet", "test.parquet", "train/a/0.png"))
    assert found.train.kind == "files"
    assert "images in train/a are read only if a file references them." in found.notes
    (tmp_path / "train.parquet").rename(tmp_path / "metadata.parquet")  # that of `datasets`
    (tmp_path / "test.parquet").unlink()
    assert found_at(tmp_path).train.kind == "folder"


@pytest.mark.parametrize("layout", ["train and val", "before test", "in data"])
def test_class_folders_have_the_rows_that_datasets_finds(layout: str, tmp_path: Path):
    files = [name for name in FOLDERS[layout][0] if name.endswith(".png")]
    more = [name.replace("/a/", "/b/") for name in files]
    root = write(tmp_path / "root", *files, *more)
    theirs = datasets.load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    found = found_at(root)
    assert found.eval
    for part, split in ((found.train, "train"), (found.eval, None)):
        ours = FolderImages(part.paths[0])
        rows = theirs[split or ("validation" if "validation" in theirs else "test")]
        assert ours.class_names == rows.features["label"].names
        assert sorted(label for _, label in ours.files) == sorted(rows["label"])


def test_parquet_has_the_rows_that_datasets_loads(tmp_path: Path):
    root = write(tmp_path / "root", *SAME["sharded"])
    theirs = datasets.load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    found = found_at(root)
    assert found.eval
    train, evaluation = (
        ShardImages(part.paths, DataConfig(), ["0", "1"]) for part in (found.train, found.eval)
    )
    assert (train.blocks.sum(), evaluation.blocks.sum()) == (2, 1)
    assert (len(theirs["train"]), len(theirs["validation"])) == (2, 1)


def test_the_folder_of_a_readme_may_hold_class_folders(tmp_path: Path):
    readme = card(
        "- config_name: x\n  data_files:\n"
        "  - {split: train, path: pics/one/**}\n  - {split: test, path: 'pics/two/*/*.png'}\n"
        "  - {split: odd, path: 'pics/*/a/*.png'}\n"
    )
    files = ("pics/one/a/0.png", "pics/one/b/0.png", "pics/two/a/0.png")
    root = write(tmp_path / "root", *files, readme=readme)
    assert parts_of(found_at(root), root) == ({"pics/one"}, {"pics/two"})
    with pytest.raises(DataError, match="not all images of the class folders of a local folder"):
        found_at(root, eval_split="odd")


def test_a_folder_that_cannot_be_fully_listed_is_refused(tmp_path: Path):
    root = write(tmp_path / "root", "train/a/0.png")
    (root / "train" / "a" / "up").symlink_to(root)
    with pytest.raises(DataError, match=r"the link .*train/a/up points to a folder above it"):
        found_at(root)


@pytest.mark.parametrize("name", ["README.md", "dataset.json", "dataset_dict.json"])
def test_a_readme_that_is_a_broken_symlink_is_refused(name: str, tmp_path: Path):
    root = write(tmp_path / "root", "train/a/0.png")
    (root / name).symlink_to("gone")
    with pytest.raises(DataError, match=f"root': {name}: cannot be read: No such file or dir"):
        found_at(root)


def test_folders_behind_symlinks_are_found(tmp_path: Path):
    write(tmp_path / "elsewhere", "a/0.png", "b/0.png")
    root = write(tmp_path / "root", "val/a/0.png")
    (root / "train").symlink_to(tmp_path / "elsewhere")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    assert parts_of(found_at(root), root) == ({"train"}, {"val"})


# ------------------------------------------------------------------ other forms of data


def test_what_datasets_loads_by_name_is_read_from_its_arrow_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = [f"{split}/{name}/0.png" for split in ("train", "test") for name in ("cat", "dog")]
    root = write(tmp_path / "root", *files)
    splits = open_splits(DataConfig(source=f"hf:{root}"))
    assert (splits.class_names, splits.eval_from) == (
        ["cat", "dog"],
        "the test split of data.source",
    )
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


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        ("ylecun/mnist", "on the Hugging Face Hub, use hf:ylecun/mnist"),
        (
            "https://huggingface.co/datasets/ylecun/mnist",
            "is a web page: use hf://datasets/ylecun/mnist",
        ),
        ("./ylecun/mnist", r"no such file or folder in /.*\. Other choices"),
        ("photos.csv", r"no such file or folder in /[^ ]*\.$"),
        ("x" * 300, r"no such file or folder in /"),
        (
            "mnist",
            r"no such file or folder in /.*\. Other choices: 'digits', 'torchvision:CIFAR10'",
        ),
    ],
)
def test_a_hub_name_is_recognized(source: str, reported: str):
    with pytest.raises(DataError, match=reported):
        found_at(source)


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
